"""Checkpoints in the memory of the ranks' hosts, and copies of each rank's file on other hosts, where a restart finds them.

``resilience/peers.py`` opens it and saves with it; ``peer_files.py`` brings what it found to the ranks that resume.  The files
are those of every checkpoint, on a tmpfs.  It never touches a file of another job, and never loads anything.

Note: [Generations]
    A save writes a folder ``gen-TOKEN`` on every host: its ranks' files, and copies of those of other hosts' ranks.  Once every
    file of every rank is there, and all ranks know, each host gets the manifest, and then the generation before goes.  So a
    manifest on any host says that the generation was complete, and killed at any moment a save leaves one that is.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.budget import Budget, preflight
from offload.errors import BudgetError, CheckpointError
from offload.events import Bus
from offload.policy import Policy
from offload.shards import (
    MANIFEST,
    HostMemory,
    Manifest,
    Record,
    ShardWriter,
    copy_name,
    encoded,
    file_nbytes,
    job_of,
    read_manifest,
    saved_ns,
    shard_name,
)
from offload.store import Store
from offload.text import as_size, counted, shown_path
from offload.tier import Tier
from offload.user_warnings import warn_user
from zhooks.checkpoint import FileTensor, RunState, about_run, contents, host_budget, whole_digests, write_file
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, Move, Span, fetch, text_digest

__all__ = ["Generation", "Hosts", "PeerMemory", "moved"]

_KEY = "memory of peers"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which ranks share the memory of a host, by number, and which share its space."""

    of: tuple[int, ...]
    spaces: tuple[int, ...]

    @classmethod
    def met(cls, comm: Comm, memory: HostMemory) -> Hosts:
        """Where every rank is.  Collective."""
        axis = comm.stage.axis
        both = torch.zeros(2, axis.world, dtype=torch.int64, device="cpu")
        both[:, axis.rank] = torch.tensor([text_digest(memory.identity), text_digest(memory.device)], device="cpu")
        flat = both.reshape(-1)
        comm.stage.all_reduce(Call(CONTROL, "find hosts", "all ranks"), flat, "sum")
        hosts, spaces = flat.reshape(2, -1).tolist()
        numbers = list(dict.fromkeys(hosts))
        return cls(tuple(map(numbers.index, hosts)), tuple(spaces))

    @property
    def count(self) -> int:
        return 1 + max(self.of)

    def ranks(self, host: int) -> list[int]:
        return [rank for rank, its in enumerate(self.of) if its == host]

    def leads(self, rank: int) -> bool:
        """One rank of each host does what is done once a host."""
        return self.ranks(self.of[rank])[0] == rank

    def keepers(self, rank: int, copies: int) -> list[int]:
        """The ranks that keep copies of a rank's file: of the next hosts, at its place there."""
        place = self.ranks(self.of[rank]).index(rank)
        others = [self.ranks((self.of[rank] + 1 + number) % self.count) for number in range(min(copies, self.count - 1))]
        return [each[place % len(each)] for each in others]


@dataclass(frozen=True, slots=True)
class Generation:
    """One complete save, as the hosts have it now.

    Attributes:
        rank: one that sees the manifest.
        world: how many ranks saved.
        holders: of each rank's file, the hosts that have it and what it is called there, the rank's own first.
    """

    token: str
    saved_ns: int
    world: int
    rank: int
    holders: Mapping[int, Sequence[tuple[int, str]]]

    @property
    def whole(self) -> bool:
        """Every rank's file is somewhere."""
        return set(range(self.world)) <= self.holders.keys()


class PeerMemory:
    """What the ranks of one model keep in the memory of their hosts.  Made by ``open``."""

    def __init__(self, comm: Comm, memory: HostMemory, hosts: Hosts, policy: Policy, budget: Budget) -> None:
        self.memory, self.hosts, self._comm, self._budget = memory, hosts, comm, budget
        self._wanted = policy.resilience
        self._rank = comm.stage.axis.rank
        self._held: dict[str, int] = {}
        #: The last generation that is known to be whole, by its token; None: nobody has looked yet.
        self.last: str | None = None
        for token, sizes in memory.generations().items() if hosts.leads(self._rank) else ():
            # Ranks that were here before filled it.
            if budget.try_admit(Tier.HOST, sum(sizes.values())):
                self._count(token, sum(sizes.values()))

    @classmethod
    def open(cls, comm: Comm, policy: Policy, store: Store | None, bus: Bus, ranks: ControlPlane) -> PeerMemory:
        """Find or make this job's memory on every host.  Collective.

        Raises:
            CheckpointError: it cannot be had on some host, or another job has it; on every rank.
        """
        wanted = policy.resilience
        session = ranks.on_first(lambda: secrets.token_hex(8))
        opened: list[HostMemory] = []

        def find() -> None:
            if comm.pp.axis.world > 1:
                raise CheckpointError(
                    f"The memory of peers needs one model on all ranks, found {comm.pp.axis.world} pipeline stages or ep "
                    "ranks. Use attachment.save() and load() there."
                )
            opened.append(HostMemory(Path(wanted.memory).expanduser(), job_of(wanted.job), session))

        try:
            ranks.run(find)
            hosts = Hosts.met(comm, opened[0])
        except BaseException:
            for each in opened:
                each.close()
            raise
        # Who runs on one host and asks for nothing has no copies to lose; who has run on several has.
        kept = [name for sizes in opened[0].generations().values() for name in sizes]
        asked = "copies" in wanted.model_fields_set or any(name.startswith("copy-") for name in kept)
        if wanted.copies >= hosts.count and asked:
            warn_user(
                f"The memory of peers needs {counted(wanted.copies, 'other host')} for copies, found "
                f"{hosts.count - 1}: shards that only a lost host had are lost with it. Run on more hosts, or also save to a "
                "folder.",
                RuntimeWarning,
            )
        return cls(comm, opened[0], hosts, policy, host_budget(policy, store, bus))

    def serves(self, policy: Policy) -> bool:
        """The folder is there on every host, and the policy asks for no other, nor for more copies.  Collective."""
        asked = policy.resilience
        same = (asked.memory, asked.job, asked.copies) == (self._wanted.memory, self._wanted.job, self._wanted.copies)
        everywhere = torch.tensor([int(same and self.memory.path.is_dir())], device="cpu")
        self._comm.stage.all_reduce(Call(CONTROL, "memory of peers: look", "all ranks"), everywhere, "min")
        return bool(everywhere.item())

    # What is there.

    def generations(self, ranks: ControlPlane) -> list[Generation]:
        """The complete saves, the newest first.  Collective."""
        raws = ranks.texts(json.dumps(ranks.run(self._listed)), first_only=True)
        found = ranks.on_first(lambda: self._merged([json.loads(raw) for raw in raws]))
        return [
            Generation(token, when, world, rank, {int(file): [(host, name) for host, name in at] for file, at in each.items()})
            for token, when, world, rank, each in found
        ]

    def _listed(self) -> dict[str, Any]:
        """What this host has, said by one of its ranks."""
        if not self.hosts.leads(self._rank):
            return {}
        found: dict[str, Any] = {}
        for token, sizes in self.memory.generations().items():
            found[token] = {"said": None, "files": list(sizes)}
            if MANIFEST in sizes:
                # A damaged one is none: another host's may be whole.
                with suppress(CheckpointError):
                    manifest = read_manifest(self.memory.generation(token))
                    found[token]["said"] = saved_ns(manifest), manifest.world
        return found

    def _merged(self, listed: Sequence[Mapping[str, Any]]) -> list[Any]:
        complete: dict[str, tuple[int, int, int]] = {}
        holders: dict[str, dict[int, list[tuple[int, str]]]] = {}
        for rank, found in enumerate(listed):
            for token, about in found.items():
                if about["said"] is not None:
                    complete.setdefault(token, (*about["said"], rank))
                for name in about["files"]:
                    file = _file_of(name)
                    if file is not None:
                        holders.setdefault(token, {}).setdefault(file, []).append((self.hosts.of[rank], name))
        for each in holders.values():
            for found_at in each.values():
                found_at.sort(key=lambda at: at[1].startswith("copy-"))
        order = sorted(complete, key=lambda token: (complete[token][0], token), reverse=True)
        return [(token, *complete[token], holders.get(token, {})) for token in order]

    # Saving.

    @torch.no_grad()
    def save(self, run: RunState, extra: Mapping[str, Any], name: str, after_ns: int) -> int:
        """See ``Attachment.save_to_peers``; ``name``: that of the run.  Returns when it was.  Collective."""
        ranks = ControlPlane(run.comm.stage, "save_to_peers", shown_path(self.memory.path))
        run.bus.begin("save", _KEY)
        nbytes = 0
        try:
            if self.last is None:
                self.last = next((each.token for each in self.generations(ranks) if each.whole), "")
            ranks.run(lambda: self._drop_but(self.last or ""))
            token = ranks.on_first(lambda: secrets.token_hex(8))
            digests = ranks.on_first(lambda: whole_digests(run))
            tensors = ranks.run(lambda: contents(run, extra, digests))
            header, size = file_nbytes([each.entry for each in tensors])
            headers, sizes = self._sizes(ranks, header, size)
            needs = [sizes[rank] + sum(sizes[other] for other in self._kept_by(rank)) for rank in range(len(sizes))]
            nbytes = needs[self._rank]
            complete = False
            try:
                ranks.run(lambda: self._take(token, needs))
                record = ranks.run(lambda: self._write(run, token, tensors))
                ranks.run(lambda: self._copy(run, token, sizes))
                raws = ranks.texts(record.model_dump_json(), first_only=True)
                when = ranks.on_first(lambda: max(self._now_ns(token), after_ns + 1))
                about = {**about_run(run), "run": name, "replaceable": False}
                facts = {**about, "saved_ns": when, "headers": headers}
                records = [Record.model_validate_json(raw) for raw in raws]
                text = ranks.on_first(lambda: encoded(Manifest.of(token, facts, records)).decode("ascii"))
                complete = True
                ranks.run(lambda: self._commit(token, text))
            except BaseException:
                # Once all files are there some host may have the manifest.
                if not complete:
                    self._drop(token)
                raise
            self.last = token
            ranks.run(lambda: self._drop_but(token))
            return int(when)
        finally:
            run.bus.end("save", _KEY, nbytes)

    def _kept_by(self, rank: int) -> list[int]:
        """Whose files a rank keeps copies of."""
        return [other for other in range(len(self.hosts.of)) if rank in self.hosts.keepers(other, self._wanted.copies)]

    def _sizes(self, ranks: ControlPlane, header: int, size: int) -> tuple[list[int], list[int]]:
        found = [json.loads(text) for text in ranks.texts(json.dumps([header, size]))]
        return [front for front, _ in found], [nbytes for _, nbytes in found]

    def _take(self, token: str, needs: Sequence[int]) -> None:
        """Count what this rank will keep.

        Raises:
            CheckpointError: it does not fit; nothing is counted.
        """
        together = sum(need for rank, need in enumerate(needs) if self.hosts.spaces[rank] == self.hosts.spaces[self._rank])
        free, mine, found = self.memory.free(), needs[self._rank], ""
        if together > free:
            place = shown_path(self.memory.path.parent.parent)
            found = f"{as_size(free)} free at {place} for the {as_size(together)} of its ranks"
        else:
            try:
                preflight({Tier.HOST: mine}, ranks=self._comm.alike)
                self._budget.admit(Tier.HOST, _KEY, mine)
            except BudgetError as error:
                found = str(error)
        if found:
            raise CheckpointError(
                f"save_to_peers expected {as_size(mine)} of host memory per rank on top of the previous save, found "
                f"{found}. Set [resilience] copies = 0, or save to a folder."
            )
        self._count(token, mine)

    def _count(self, token: str, nbytes: int) -> None:
        self._budget.account.take(Tier.HOST, _KEY, nbytes, None)
        self._held[token] = nbytes

    def _write(self, run: RunState, token: str, tensors: Sequence[FileTensor]) -> Record:
        folder = self.memory.generation(token, make=True)
        writer = ShardWriter(folder / shard_name(self._rank), [each.entry for each in tensors])
        return write_file(writer, tensors, run.bus)

    def _copy(self, run: RunState, token: str, sizes: Sequence[int]) -> None:
        """Every rank's file to the ranks that keep copies of it."""
        folder = self.memory.generation(token)
        wanted = [Span(other, other, 0, sizes[other]) for other in self._kept_by(self._rank)]
        sources = {self._rank: folder / shard_name(self._rank)}
        targets = {span.file: folder / copy_name(span.file) for span in wanted}

        def write(file: int, start: int, data: Tensor) -> None:
            _move(os.pwritev, targets[file], os.O_WRONLY | os.O_CREAT, start, data)

        moved(run, wanted, sources, write, "save_to_peers: copy")

    def _now_ns(self, token: str) -> int:
        return os.stat(self.memory.generation(token)).st_mtime_ns

    def _commit(self, token: str, text: str) -> None:
        if self.hosts.leads(self._rank):
            folder = self.memory.generation(token)
            (folder / "manifest.part").write_text(text, encoding="ascii")
            os.rename(folder / "manifest.part", folder / MANIFEST)

    def _drop_but(self, token: str) -> None:
        for other in self._held.keys() - {token}:
            self._give(other)
        if self.hosts.leads(self._rank):
            for other in self.memory.generations().keys() - {token}:
                self.memory.drop(other)

    def _drop(self, token: str) -> None:
        self._give(token)
        if self.hosts.leads(self._rank):
            self.memory.drop(token)

    def _give(self, token: str) -> None:
        nbytes = self._held.pop(token, 0)
        self._budget.release(Tier.HOST, nbytes)
        self._budget.account.give(Tier.HOST, _KEY, nbytes)

    def close(self, *, over: bool) -> None:
        """The attachment ends; ``over``: so does the job, and what it kept goes."""
        for token in list(self._held):
            self._give(token)
        if over:
            self.memory.remove()
        else:
            self.memory.close()


def moved(run: RunState, wanted: Sequence[Span], sources: Mapping[int, Path], write: Move, what: str) -> int:
    """Bytes of files on other hosts, handed to ``write``; returns how many.  Collective.

    Args:
        sources: the files that others may ask this rank for, by number; opened when they do.
    """

    def read(file: int, start: int, out: Tensor) -> None:
        _move(os.preadv, sources[file], os.O_RDONLY, start, out)

    return fetch(run.comm.stage, Call(run.comm.bulk, what, "files"), wanted, read, write, run.devices[0])


def _move(move: Callable[[int, list[memoryview], int], int], path: Path, flags: int, start: int, data: Tensor) -> None:
    """Read or write all of ``data`` at one place of a file.

    Raises:
        CheckpointError: the file ends before it.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view, done = data.numpy().data, 0
        while done < len(view):
            count = move(fd, [view[done:]], start + done)
            if count == 0:
                raise CheckpointError(
                    f"Cannot copy {path}. Expected {start + len(view)} bytes, found {start + done}. Save again."
                )
            done += count
    finally:
        os.close(fd)


def _file_of(name: str) -> int | None:
    """Which rank's file is called so."""
    stem = name.removesuffix(".safetensors").removeprefix("rank-").removeprefix("copy-")
    return int(stem) if stem.isdigit() and name in (shard_name(int(stem)), copy_name(int(stem))) else None
