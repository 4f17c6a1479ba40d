"""What lies in peers' memory, brought to the ranks that resume: each rank gets what it will read, and every part is verified.

``peers.py`` opens a generation with it, which is then loaded as any checkpoint.  Files of this host are read where they are;
of others' a rank fetches the ranges that it owns.  It changes nothing of the run.

Note: [Parts of files]
    A rank's folder has links to the files of its host, and of every other file it has a part in memory: its header, what is no
    range of a flat buffer, and of those the ranges that this rank owns by names.  Whoever reads beyond them is told so, and
    gets no zeros.

Note: [Verified once]
    Checksums are of whole tensors.  Who gets one whole from another host compares it as it comes.  What is left, in files that
    are read where they are and of tensors that others get ranges of, is read by the host that has it, whose ranks share that.
    So where one host stands in for another it sends, and the other compares.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from offload.budget import preflight
from offload.errors import BudgetError, CheckpointError
from offload.shards import MANIFEST, Manifest, Part, Record, ShardReader, read_manifest, shard_name
from offload.text import as_size
from offload.tier import Tier
from offload.user_warnings import warn_user
from zhooks.checkpoint import GAP, Place, Present, RunState, SavedFolder, buffer_name, difference, gradient_name
from zhooks.comm import ControlPlane, Span
from zhooks.resilience.peer_memory import Generation, PeerMemory, moved

__all__ = ["Brought", "brought"]

Ranges = list[tuple[int, int]]

_FLAT = re.compile(r"(\d{4,})/(.+)")


@dataclass(frozen=True, slots=True)
class Brought:
    """A folder with what this rank needs of a generation."""

    folder: Path
    present: Present
    manifest: Manifest


@contextmanager
def brought(run: RunState, memory: PeerMemory, generation: Generation, ranks: ControlPlane) -> Iterator[Brought | None]:
    """The files of a generation for as long as they are loaded; None where none are whole on any host.  Collective."""
    with memory.memory.scratch(ranks.rank) as folder:
        manifest = _manifest(run, memory, generation, ranks, folder)
        parts = _Bringing(run, memory, generation, manifest, ranks, folder).bring()
        yield None if parts is None else Brought(folder, parts, manifest)


def _manifest(run: RunState, memory: PeerMemory, generation: Generation, ranks: ControlPlane, folder: Path) -> Manifest:
    """That of one host on all."""
    source = memory.memory.generation(generation.token) / MANIFEST
    mine = ranks.run(lambda: source.read_text(encoding="ascii") if ranks.rank == generation.rank else "")
    text = ranks.texts(mine)[generation.rank]

    def written() -> Manifest:
        (folder / MANIFEST).write_text(text, encoding="ascii")
        return read_manifest(folder)

    return ranks.run(written)


class _Bringing:
    """The search for whole files: what is damaged on one host is looked for on the next that has it.

    Every rank takes the same steps; the ones that this rank has no part in are those of others.
    """

    def __init__(
        self, run: RunState, memory: PeerMemory, generation: Generation, manifest: Manifest, ranks: ControlPlane, folder: Path
    ) -> None:
        self._run, self._memory, self._manifest, self._ranks, self._folder = run, memory, manifest, ranks, folder
        self._kept = memory.memory.generation(generation.token)
        self._rank, self._hosts = ranks.rank, memory.hosts
        self._host = memory.hosts.of[ranks.rank]
        #: The hosts that may have each file whole, and what it is called there; the first is the one that is asked.
        self._left = {file: list(generation.holders.get(file, ())) for file in range(manifest.world)}
        self._parts: dict[int, Part] = {}

    def bring(self) -> dict[int, Part] | None:
        """What this rank needs of other hosts' files; those of its own are linked.  None where one is nowhere.  Collective."""
        pending = list(self._left)
        while pending:
            if any(not self._left[file] for file in pending):
                return None
            bad = self._agreed(lambda now=tuple(pending): self._check_headers(now))  # type: ignore[misc]
            found = [file for file in pending if file not in bad]
            compared = self._fetch(found)
            bad |= self._agreed(lambda now=found, done=compared: self._check(now, done))  # type: ignore[misc]
            pending = [file for file in pending if file in bad]
            for file in pending:
                self._left[file].pop(0)
                self._parts.pop(file, None)
        self._ranks.run(self._link)
        return self._parts

    def _on_this_host(self, files: Iterable[int]) -> dict[int, Path]:
        """Those of them that are taken from this host."""
        return {file: self._kept / self._left[file][0][1] for file in files if self._left[file][0][0] == self._host}

    def _link(self) -> None:
        for file, path in self._on_this_host(self._left).items():
            os.link(path, self._folder / shard_name(file))

    def _agreed(self, step: Callable[[], set[int]]) -> set[int]:
        """The files that some rank finds damaged."""
        mine = self._ranks.run(step)
        bad = self._ranks.any([file in mine for file in range(self._manifest.world)])
        return {file for file, damaged in enumerate(bad) if damaged}

    # What is compared where it lies.

    def _check_headers(self, pending: Sequence[int]) -> set[int]:
        place, count = self._beside()
        return self._damaged([(file, []) for file in list(self._on_this_host(pending))[place::count]])

    def _check(self, files: Sequence[int], compared: Mapping[int, Container[str]]) -> set[int]:
        """Files of this host, as far as this rank looks and nobody else has compared them; its ranks share the work.  And what
        came of other hosts' files."""
        place, count = self._beside()
        mine = list(self._on_this_host(files))
        left = {file: [name for name in self._manifest.files[file].tensors if name not in compared[file]] for file in mine}
        whole = len(mine) - len(mine) % count
        # What is left over after each has as many files is shared tensor by tensor.
        jobs = [(file, left[file]) for file in mine[place:whole:count]]
        bad = self._damaged(jobs + [(file, left[file][place::count]) for file in mine[whole:]])
        for file, part in self._parts.items():
            if file in files and part.wrong:
                name, host = self._manifest.files[file].name, self._left[file][0][0]
                bad.add(file)
                whose = f"{name} of the host of rank {self._hosts.ranks(host)[0]}"
                what = "Expected the shard file its manifest describes, received bytes whose checksum does not match."
                self._say(file, f"{whose} is damaged. {what}")
        return bad

    def _damaged(self, jobs: Sequence[tuple[int, Sequence[str]]]) -> set[int]:
        """Files of this host whose header, or one of these tensors, is not what was written."""
        bad = set()
        for file, names in jobs:
            record = self._manifest.files[file].model_copy(update={"name": self._left[file][0][1]})
            try:
                with closing(ShardReader(self._kept, record)) as reader:
                    reader.verify(names)
            except CheckpointError as error:
                bad.add(file)
                self._say(file, str(error))
        return bad

    def _say(self, file: int, found: str) -> None:
        record = self._manifest.files[file]
        self._run.bus.instant("peer memory damaged", self._left[file][0][1], record.nbytes)
        warn_user(f"resume: {found} A copy of it is used, or an older checkpoint.", RuntimeWarning, this_rank=True)

    def _beside(self) -> tuple[int, int]:
        """This rank's place among those of its host, and their number."""
        beside = self._hosts.ranks(self._host)
        return beside.index(self._rank), len(beside)

    # What comes from other hosts.

    def _fetch(self, files: Sequence[int]) -> dict[int, set[str]]:
        """What this rank needs of those of other hosts; returns which tensors of each some rank has got whole, and compared."""
        here = self._on_this_host(files)
        away = [file for file in files if file not in here]
        about = self._manifest.about["headers"]
        headers: dict[int, Ranges] = {file: [(0, int(about[file]))] for file in away}
        first = {file: Part(self._manifest.files[file].nbytes, ranges) for file, ranges in headers.items()}
        self._move(first, headers, here)
        needed = self._ranks.run(lambda: _needed(self._run, self._saved(first), away))
        nbytes = sum(stop - start for each in needed.values() for start, stop in each.ranges)
        self._ranks.run(lambda: self._check_memory(nbytes))
        parts = self._ranks.run(lambda: {file: self._part(first[file], each) for file, each in needed.items()})
        self._move(parts, {file: each.ranges for file, each in needed.items()}, here)
        self._parts |= parts
        return self._compared(files, needed)

    def _saved(self, parts: Mapping[int, Part]) -> SavedFolder:
        return SavedFolder(self._folder, self._manifest, Place.of(self._run.comm), present=parts)

    def _part(self, first: Part, needed: _Needed) -> Part:
        (header,) = first.ranges
        part = Part(first.nbytes, [header, *needed.ranges], needed.digests)
        part.write(0, first.bytes(*header))
        return part

    def _check_memory(self, nbytes: int) -> None:
        try:
            preflight({Tier.HOST: nbytes}, ranks=self._run.comm.alike)
        except BudgetError as error:
            raise CheckpointError(
                f"resume expected {as_size(nbytes)} of host memory per rank for shards of other hosts, found {error} "
                "Resume on more hosts, or from a folder."
            ) from error

    def _move(self, parts: Mapping[int, Part], ranges: Mapping[int, Ranges], here: Mapping[int, Path]) -> None:
        wanted = [Span(self._server(file), file, start, stop) for file, each in ranges.items() for start, stop in each]

        def write(file: int, start: int, data: Tensor) -> None:
            parts[file].write(start, data)

        self._ranks.run(lambda: moved(self._run, wanted, here, write, "resume: fetch"))

    def _server(self, file: int) -> int:
        """A rank of the host that has it, another for each of those that ask."""
        there = self._hosts.ranks(self._left[file][0][0])
        return there[self._rank % len(there)]

    def _compared(self, files: Sequence[int], needed: Mapping[int, _Needed]) -> dict[int, set[str]]:
        names = {file: list(self._manifest.files[file].tensors) for file in files}
        whole = [file in needed and name in needed[file].whole for file, each in names.items() for name in each]
        every = zip(((file, name) for file, each in names.items() for name in each), self._ranks.any(whole), strict=True)
        compared: dict[int, set[str]] = {file: set() for file in files}
        for (file, name), mark in every:
            if mark:
                compared[file].add(name)
        return compared


@dataclass(frozen=True, slots=True)
class _Needed:
    """Of a file: the bytes that loading reads, the tensors that are whole among them, and those tensors' checksums."""

    ranges: Ranges
    whole: frozenset[str]
    digests: Mapping[tuple[int, int], str]


def _needed(run: RunState, folder: SavedFolder, files: Iterable[int]) -> dict[int, _Needed]:
    """What loading reads of these files."""
    with closing(folder):
        elements: dict[tuple[int, int], Ranges] = {}
        used = {folder.counterpart, 0}
        for flat in run.flats:
            for spec in flat.specs:
                param = folder.params.get(spec.name)
                if difference(param, spec) or param is None:
                    # The load will say so.
                    continue
                for tp, shard, offset, numel in param.runs(spec):
                    rank = folder.rank_at(tp, shard)
                    used.add(rank)
                    elements.setdefault((rank, param.flat.number), []).append((offset, offset + numel))
        found: dict[int, _Needed] = {}
        for file in files:
            reader, ranges = folder.reader(file), list[tuple[int, int]]()
            assert isinstance(reader, ShardReader)
            for name, entry in reader.entries.items():
                flat_of = _FLAT.fullmatch(name)
                whole = [(0, math.prod(entry.shape))]
                if flat_of and flat_of[2] != "partial":
                    runs = elements.get((file, int(flat_of[1])), [])
                elif flat_of:
                    runs = whole if file == folder.counterpart else []
                else:
                    # A parameter that is updated whole has its states, and what is said of them, in its owner's file.
                    own = name.startswith((buffer_name(""), gradient_name("")))
                    runs = whole if file in used or not own else []
                ranges += [reader.span(name, start, stop) for start, stop in runs if stop > start]
            found[file] = _with_digests(reader, _joined(ranges), folder.manifest.files[file])
        return found


def _with_digests(reader: ShardReader, ranges: Ranges, record: Record) -> _Needed:
    starts, digests, whole = [start for start, _ in ranges], {}, set()
    for name, entry in reader.entries.items():
        start, stop = reader.span(name, 0, math.prod(entry.shape))
        at = bisect_right(starts, start) - 1
        if start < stop and at >= 0 and stop <= ranges[at][1]:
            whole.add(name)
            digests[start, stop] = record.tensors[name]
    return _Needed(ranges, frozenset(whole), digests)


def _joined(ranges: Ranges) -> Ranges:
    """In order, with gaps that reading does not skip among them."""
    joined: Ranges = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= GAP:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
