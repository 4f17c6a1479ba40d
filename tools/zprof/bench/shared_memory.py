"""Owns one rank of the collectives through shared memory that ``zprof bench --profile`` measures: numpy alone, no socket.

`bench/profile.py` starts one process a rank: ``-m zprof.bench.shared_memory FILE RANK RANKS NBYTES...``. Each copies what
others need into slots of its own and what it needs out of theirs, as the runtime's transport does, and prints its times as
JSON. It is no command of its own.

Note: [Slots]
    A rank's ring of slots has a head that it alone writes, and a tail a reader. Stores are seen in order on x86-64; elsewhere
    the figures may be of torn values, which costs nothing here: values are not looked at, and counters are single words.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from zprof.clock import now_ns

__all__ = ["REPEATS", "file_nbytes"]

REPEATS = 7
_SLOT = 1 << 19
_SLOTS = 8
_HEADER = 4096
_WORD_GAP = 8  # Counters on cache lines of their own.

Array = np.ndarray[Any, np.dtype[Any]]


def file_nbytes(ranks: int) -> int:
    """Bytes of the file that so many ranks share."""
    return _HEADER * (1 + ranks) + ranks * _SLOTS * _SLOT


class Rank:
    """One rank's view of the shared file."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), file_nbytes(ranks))
        words = np.frombuffer(memory, np.int64, _HEADER * (1 + ranks) // 8)
        self.rank, self.ranks = rank, ranks
        self._heads = words[: _HEADER // 8 : _WORD_GAP]
        self._tails = [words[_HEADER // 8 * (1 + each) :][:: _WORD_GAP] for each in range(ranks)]
        data = np.frombuffer(memory, np.uint8, ranks * _SLOTS * _SLOT, _HEADER * (1 + ranks))
        self._slots = data.reshape(ranks, _SLOTS, _SLOT)

    def exchange(self, chunks: list[tuple[int, Array]], expected: dict[int, int], land: Callable[[int, Array], None]) -> None:
        """Write ``chunks``, each for one reader (-1: all), and take ``expected`` chunks of each peer, whoever they are for."""
        others = [each for each in range(self.ranks) if each != self.rank]
        left = list(reversed(chunks))
        heads, tails = self._heads, self._tails
        while left or any(expected.values()):
            moved = False
            head = int(heads[self.rank])
            if left and head - min(int(tails[each][self.rank]) for each in others) < _SLOTS:
                _, chunk = left.pop()
                self._slots[self.rank, head % _SLOTS, : len(chunk)] = chunk
                heads[self.rank] = head + 1
                moved = True
            for peer in others:
                tail = int(tails[self.rank][peer])
                if expected[peer] and int(heads[peer]) > tail:
                    land(peer, self._slots[peer, tail % _SLOTS])
                    tails[self.rank][peer] = tail + 1
                    expected[peer] -= 1
                    moved = True
            if not moved:
                os.sched_yield()

    def barrier(self) -> None:
        """Wait for all."""
        peers = {each: 1 for each in range(self.ranks) if each != self.rank}
        self.exchange([(-1, np.zeros(8, np.uint8))], peers, lambda peer, slot: None)

    def all_gather(self, nbytes: int) -> Callable[[], None]:
        """A gather of ``nbytes``, this rank's share in its place already."""
        share = nbytes // self.ranks
        full = np.ones(share * self.ranks, np.uint8)
        own = full[self.rank * share : (self.rank + 1) * share]
        at: dict[int, int] = {}

        def land(peer: int, slot: Array) -> None:
            begin = peer * share + at[peer]
            count = min(_SLOT, share - at[peer])
            full[begin : begin + count] = slot[:count]
            at[peer] += count

        def run() -> None:
            at.update(dict.fromkeys(range(self.ranks), 0))
            pieces = [(-1, own[begin : begin + _SLOT]) for begin in range(0, share, _SLOT)]
            self.exchange(pieces, {each: len(pieces) for each in range(self.ranks) if each != self.rank}, land)

        return run

    def reduce_scatter(self, nbytes: int) -> Callable[[], None]:
        """A sum of ``nbytes`` of float32 on every rank, of which each keeps its share."""
        share = nbytes // self.ranks // 4 * 4
        full = np.ones(share * self.ranks, np.uint8)
        out = np.zeros(share // 4, np.float32)
        counts = -(-share // _SLOT)
        seen: dict[int, int] = {}

        def land(peer: int, slot: Array) -> None:
            # A peer writes the shares in the order of their readers, its own left out.
            mine = self.rank - (self.rank > peer)
            index = seen[peer] - mine * counts
            seen[peer] += 1
            if 0 <= index < counts:
                begin = index * _SLOT // 4
                part = out[begin : begin + _SLOT // 4]
                part += slot[: part.nbytes].view(np.float32)

        def run() -> None:
            seen.update(dict.fromkeys(range(self.ranks), 0))
            others = [each for each in range(self.ranks) if each != self.rank]
            pieces = [
                (reader, full[begin : min(begin + _SLOT, (reader + 1) * share)])
                for reader in others
                for begin in range(reader * share, (reader + 1) * share, _SLOT)
            ]
            self.exchange(pieces, dict.fromkeys(others, (self.ranks - 1) * counts), land)

        return run


def main(path: Path, rank: int, ranks: int, sizes: list[int]) -> None:
    """Measure, and print the seconds of every repeat by kind and size."""
    here = Rank(path, rank, ranks)
    found: dict[str, dict[int, list[float]]] = {}
    for kind in ("all_gather", "reduce_scatter"):
        for nbytes in sizes:
            run = getattr(here, kind)(nbytes)
            seconds = []
            for _ in range(REPEATS + 1):
                here.barrier()
                begin = now_ns()
                run()
                seconds.append((now_ns() - begin) / 1e9)
            found.setdefault(kind, {})[nbytes] = seconds[1:]
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [int(size) for size in sys.argv[4:]])
