"""What all ranks agree on off the hot path: the order of a path after its first pass, and that their settings are the same.

``run/paths.py`` and ``grad/reduce.py`` ask after a first pass, ``attach.py`` and ``plan/checks.py`` where settings come in; the
answer is the same on every rank.  It never decides an order: ``run/schedule.py`` does, from what is exchanged here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from offload.errors import DivergenceError
from zhooks.comm.choose_transport import Comm
from zhooks.comm.progress import Progress, describe_evaluations, describe_progress
from zhooks.comm.rendezvous import Facts, difference
from zhooks.comm.transport import CONTROL, Call, Transport

_DIGEST_BYTES = 4


class SameGathers:
    """That ranks which gather together have started the same gathers, in one order: bytes that ride along with another
    exchange over the world, which takes the largest of each."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def _groups(self) -> int:
        """Each group of ranks that gather together has a place of its own, that of its first rank."""
        world = self._comm.world.axis.world
        return 1 if world == self._comm.shard.axis.world else world

    @property
    def nbytes(self) -> int:
        return _DIGEST_BYTES * 2 * self._groups

    def bytes(self) -> list[int]:
        """What this rank has started since it was last asked, and beside it the opposite, so that the largest of both tells."""
        shard, world = self._comm.shard, self._comm.world
        mine = shard.order().to_bytes(_DIGEST_BYTES, "little")
        every = [0] * self.nbytes
        place = 0 if self._groups == 1 else world.axis.ranks.index(shard.axis.ranks[0])
        start = 2 * _DIGEST_BYTES * place
        every[start : start + 2 * _DIGEST_BYTES] = [*mine, *(255 - byte for byte in mine)]
        return every

    def check(self, largest: Sequence[int], when: str) -> None:
        """Look at what came back.

        Raises:
            DivergenceError: on every rank, where those of some group differ.
        """
        for start in range(0, self.nbytes, 2 * _DIGEST_BYTES):
            one, other = largest[start : start + _DIGEST_BYTES], largest[start + _DIGEST_BYTES : start + 2 * _DIGEST_BYTES]
            if any(a + b > 255 for a, b in zip(one, other, strict=True)):
                raise DivergenceError(
                    "The ranks gathered different units, so that some computed with the values of others. Expected every rank "
                    f"to gather the same units in the same order, found ranks that differ at the {when}. Let every rank run "
                    "the same model code; where ranks drop layers, set [schedule] uneven = true. "
                    f"{self._progress()} (Axis {self._comm.shard.axis.name}.)".replace("  ", " ")
                )

    def _progress(self) -> str:
        """Where the ranks are that have come here, all of which raise.  Collective over them."""
        failure, world = self._comm.failure, self._comm.world
        here = None if failure is None else failure.progress()
        if here is None:
            return ""
        every = texts_of(world, Call(CONTROL, "compare progress", "all units"), json.dumps(asdict(here)))
        ranks = {rank: Progress(**json.loads(one)) for rank, one in zip(world.axis.ranks, every, strict=True)}
        return f"{describe_evaluations(ranks, ranks)} {describe_progress(ranks)}".strip()


class Agreement:
    """Small exchanges over all ranks of the mesh that hold this part of the model."""

    def __init__(self, comm: Comm) -> None:
        self._world = comm.world
        self._same = SameGathers(comm)

    @property
    def alone(self) -> bool:
        """There is nobody to agree with."""
        return self._world.axis.world == 1

    def sequence(self, name: str, numbers: Sequence[int]) -> list[int]:
        """Rank 0's sequence.  Collective."""
        size = torch.tensor([len(numbers)], dtype=torch.int64, device="cpu")
        self._world.broadcast(Call(CONTROL, "agree on order", name), size)
        values = torch.zeros(int(size.item()), dtype=torch.int64, device="cpu")
        if self._world.axis.rank == 0:
            values.copy_(torch.tensor(list(numbers), dtype=torch.int64, device="cpu"))
        if values.numel():
            self._world.broadcast(Call(CONTROL, "agree on order", name), values)
        return [int(value) for value in values.tolist()]

    def anywhere(self, name: str, numbers: Sequence[int], count: int) -> frozenset[int]:
        """The numbers, of ``count``, that any rank names.  Collective."""
        flags = [0] * count
        for number in numbers:
            flags[number] = 1
        exchanged = torch.tensor([*flags, *self._same.bytes()], dtype=torch.uint8, device="cpu")
        self._world.all_reduce(Call(CONTROL, "agree on use", name), exchanged, "max")
        found = exchanged.tolist()
        self._same.check(found[count:], f"first pass along {name}")
        return frozenset(number for number in range(count) if found[number])


def least(world: Transport, budget: int | None) -> int | None:
    """The smallest budget of any rank, None where none has one: every rank must plan alike.  Collective."""
    unbounded = torch.iinfo(torch.int64).max
    value = torch.tensor([unbounded if budget is None else budget], dtype=torch.int64, device="cpu")
    world.all_reduce(Call(CONTROL, "agree on budget", "device"), value, "min")
    found = int(value.item())
    return None if found == unbounded else found


def text_digest(text: str) -> int:
    """A number that stands for ``text`` in an exchange of int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=7).digest(), "little")


def same_text(world: Transport, call: Call, text: str) -> bool:
    """Every rank has this text.  Collective: one small exchange."""
    digest = text_digest(text)
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    world.all_reduce(call, bounds, "max")
    return int(bounds[0]) == -int(bounds[1])


def disagreement(world: Transport, facts: Mapping[str, Facts]) -> str:
    """What ``difference`` says of the first rank of ``world`` that has other facts than its leader; "" where none has.

    The same on every rank.  Collective: one small exchange where all have the same.
    """
    text = json.dumps(facts)
    call = Call(CONTROL, "compare settings", " ".join(facts))
    if same_text(world, call, text):
        return ""
    leader = json.loads(text_of(world, call, 0, text))
    mine = difference(facts, world.axis.ranks[world.axis.rank], leader, world.axis.ranks[0])
    found = torch.tensor([world.axis.world - world.axis.rank if mine else 0], dtype=torch.int64, device="cpu")
    world.all_reduce(call, found, "max")
    return text_of(world, call, world.axis.world - int(found.item()), mine)


def text_of(world: Transport, call: Call, rank: int, text: str) -> str:
    """The text of one rank of the axis on all of them.  Collective."""
    raw = text.encode(errors="backslashreplace") if world.axis.rank == rank else b""
    size = torch.tensor([len(raw)], dtype=torch.int64, device="cpu")
    world.all_reduce(call, size, "max")
    said = torch.zeros(int(size.item()), dtype=torch.uint8, device="cpu")
    if raw:
        said.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    world.all_reduce(call, said, "max")
    return said.numpy().tobytes().decode()


def texts_of(world: Transport, call: Call, text: str) -> list[str]:
    """The text of every rank of the axis on all of them, in rank order.  Collective."""
    raw = text.encode()
    size = torch.tensor([len(raw)], dtype=torch.int64, device="cpu")
    world.all_reduce(call, size, "max")
    said = torch.zeros(world.axis.world, int(size.item()), dtype=torch.uint8, device="cpu")
    said[world.axis.rank, : len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    world.all_reduce(call, said.view(-1), "max")
    return [row.numpy().tobytes().rstrip(b"\0").decode() for row in said]
