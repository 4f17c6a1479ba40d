"""The state of a living rank, handed to the rank at the same place of another job: the file it would save, read range by range.

``replicas.py`` offers and takes it over; an integration moves the bytes between.  Nothing is gathered and no whole
file is ever held: what is asked for is opened where it lies, at most a chunk or a block of a tier at a time.  It never writes
to a disk and never decides when a state is due.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CHUNK, CODES, DTYPES, Entry, Manifest, Record, digest, shard_name
from offload.store import BlockRange
from zhooks.checkpoint import (
    DOCUMENT,
    FileTensor,
    Loading,
    Piece,
    Place,
    RunState,
    SavedFolder,
    Unpacker,
    about_run,
    contents,
    describe,
    group_names,
    opened,
    tagged,
)
from zhooks.comm import ControlPlane
from zhooks.rng import generators

__all__ = ["Ask", "OfferedState", "PeerLostError", "extra_of", "replica_facts", "take_over"]

Ask = Callable[[str, int, int], Tensor]
"""Given a tensor's name, a first element and a number of them: those, 1-D on the CPU, from a peer."""


class PeerLostError(CheckpointError):
    """The peer a state was asked of is gone, or does not answer: another may have it."""


def replica_facts(run: RunState, policy: Any) -> str:
    """A checksum of what must be the same in all jobs that train copies of one model: layout, policy and optimizers."""
    kinds = [[type(one).__name__, group_names(run, one)] for one in run.optimizers]
    facts = [describe(run), run.about, policy, kinds, torch.__version__]
    return xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())


class OfferedState:
    """What this rank has now: parameters, optimizer states, buffers, and ``extra``; read while nothing of it changes.

    Args:
        facts: what the taker must have the same.
    Attributes:
        header: what it consists of, as JSON.
    Raises:
        CheckpointError: something cannot be handed on without pickle.
    """

    def __init__(self, run: RunState, extra: Mapping[str, Any], facts: str) -> None:
        self._tensors = {tensor.entry.name: tensor for tensor in contents(run, extra, {})}
        axis = run.comm.stage.axis
        self._scale = run.scaling.saved()
        self.header: dict[str, Any] = {
            "world": axis.world,
            "rank": axis.rank,
            "facts": facts,
            "about": about_run(run),
            "tensors": {
                name: [CODES[tensor.entry.dtype], list(tensor.entry.shape)] for name, tensor in self._tensors.items()
            },
        }

    def read(self, name: str, start: int, numel: int) -> Iterator[Tensor]:
        """Elements of one tensor, in order; each is valid until the next is asked for.

        Raises:
            CheckpointError: it has no such elements.
        """
        tensor = self._tensors.get(name)
        if tensor is None or not 0 <= start <= start + numel <= math.prod(tensor.entry.shape):
            raise CheckpointError(
                f"Cannot use the state for a peer. Expected a range of an existing tensor, found {name[:80]}, {start}."
            )
        return _between(tensor, start, start + numel)

    @torch.no_grad()
    def digest(self) -> str:
        """A checksum of the values, the optimizer states and options and the loss scale: of what replicas have the same."""
        document = json.loads(bytes(opened(next(iter(self._tensors[DOCUMENT].pieces()))).numpy()))
        common = [document["states"], document["optimizers"], self._scale]
        found = xxhash.xxh3_64(json.dumps(common, sort_keys=True).encode())
        named = {found["tensor"] for found in tagged("tensor", document["optimizers"])}
        for name, tensor in self._tensors.items():
            if tensor.key or name in named:
                found.update(f"{name} {digest(tensor.chunks())}".encode())
        return found.hexdigest()


def _between(tensor: FileTensor, start: int, stop: int) -> Iterator[Tensor]:
    at = 0
    for piece in tensor.pieces():
        numel = piece.numel if isinstance(piece, BlockRange) else piece.numel()
        low, high = max(start - at, 0), min(stop - at, numel)
        if low < high:
            yield _narrowed(piece, low, high)
        at += numel
        if at >= stop:
            return


def _narrowed(piece: Piece, low: int, high: int) -> Tensor:
    if isinstance(piece, BlockRange):
        return BlockRange(piece.block, piece.start + low, high - low).open()
    return opened(piece).detach().reshape(-1)[low:high]


class PeerReader:
    """One rank's tensors as its peer in another job has them, asked for as they are needed."""

    def __init__(self, where: str, tensors: Mapping[str, Any], ask: Ask) -> None:
        self.path, self._ask = Path(where), ask
        self.entries = {
            str(name): Entry(str(name), DTYPES[code], tuple(int(size) for size in shape))
            for name, (code, shape) in tensors.items()
        }

    def entry(self, name: str) -> Entry:
        """The tensor of that name.

        Raises:
            CheckpointError: there is none.
        """
        if name not in self.entries:
            raise CheckpointError(
                f"Cannot use the state of {self.path}. Expected {name}, found none. Run the same program in all replicas."
            )
        return self.entries[name]

    def tensor(self, name: str) -> Tensor:
        entry = self.entry(name)
        whole, step = torch.empty(math.prod(entry.shape), dtype=entry.dtype, device="cpu"), CHUNK // entry.dtype.itemsize
        for start in range(0, whole.numel(), step):
            whole[start : start + step] = self.elements(name, start, min(step, whole.numel() - start))
        return whole.reshape(entry.shape)

    def elements(self, name: str, start: int, numel: int) -> Tensor:
        found = self._ask(name, start, numel) if numel else torch.empty(0, dtype=self.entry(name).dtype, device="cpu")
        return found.view(self.entry(name).dtype)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Nothing: what came is compared with the peer's once all of it is here."""

    def close(self) -> None:
        """The connection is its owner's."""


def extra_of(where: str, header: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """What the peer was given beside its model.

    Raises:
        CheckpointError: it is none that an ``OfferedState`` has.
    """
    reader = PeerReader(where, header["tensors"], ask)
    document = json.loads(bytes(reader.tensor(DOCUMENT).numpy()))
    found = Unpacker(reader.tensor, torch.device("cpu")).unpack(document["extra"])
    if not isinstance(found, dict):
        raise CheckpointError(
            f"Cannot use the state of {where}. Expected the state that goes with a peer's model, found something else."
        )
    return found


@torch.no_grad()
def take_over(run: RunState, where: str, header: Mapping[str, Any], ask: Ask, facts: str) -> None:
    """Make this rank's state its peer's: all but random states, which stay its own.  Collective over the model's ranks.

    Args:
        facts: this rank's own.
    Raises:
        PeerLostError: a rank has lost its peer; the run may be partly changed.
        CheckpointError: on every rank: the peer has another model, policy or optimizer.  Nothing has been changed.
    """
    ranks = ControlPlane(run.comm.stage, "take over", where)
    reader = PeerReader(where, header["tensors"], ask)
    digests = dict.fromkeys(reader.entries, "")
    world = range(run.comm.stage.axis.world)
    files = [Record(name=shard_name(rank), nbytes=0, header="", tensors=digests) for rank in world]
    manifest = Manifest.of("", header["about"], files)

    def checked() -> Loading:
        axis = run.comm.stage.axis
        if (header["world"], header["rank"]) != (axis.world, axis.rank):
            raise CheckpointError(
                f"Cannot use the state of {where}. Expected rank {axis.rank} of {axis.world} in a replica that is sharded like "
                f"this one, found rank {header['rank']} of {header['world']}. Run the same number of ranks in every replica."
            )
        with closing(SavedFolder(Path(where), manifest, Place.of(run.comm), opened=lambda rank: reader)) as folder:
            loading = Loading(run, [folder])
        if header["facts"] != facts:
            raise CheckpointError(
                f"Cannot use the state of {where}. Expected the policy, units and optimizers of this replica, found different "
                f"ones, with the table {str(header['about'].get('table'))[:200]}. Run one program with one policy in all "
                "replicas."
            )
        loading.rng = generators(run.devices)
        return loading

    loading = ranks.run(checked, PeerLostError)
    follow = ranks.run(lambda: run.scaling.checked(header["about"]), PeerLostError)
    with ExitStack() as undo:
        ranks.run(lambda: loading.hand_over(undo), PeerLostError)
        undo.pop_all()
    ranks.run(loading.apply, PeerLostError)
    follow()
