"""One reduction, without ranks: its chunks cover a buffer once, and its buffers are counted where they are its own.

pytest runs it. What is reduced over ranks is test_order.py's, test_buffers.py's and the parity matrix's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zhooks.comm import DONE
from zhooks.grad.gradient import GradientChunk, gradient_chunks
from zhooks.grad.reduction import Sent
from zhooks.layout import flat_layout


def flat(numel: int, world: int, *, bound: int, whole: bool) -> Any:
    layout = flat_layout([numel], world=world, itemsize=4)
    return SimpleNamespace(
        layout=layout,
        long=layout.padded * 4 > bound,
        pool=SimpleNamespace(bound=bound),
        kind=SimpleNamespace(wide=4),
        shard_numel=layout.padded if whole else layout.shard_numel,
    )


@pytest.mark.parametrize("bound", [512, 1024, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_chunks_cover_every_ranks_range_once_within_the_bound(bound: int, world: int, whole: bool) -> None:
    of = flat(1003, world, bound=bound, whole=whole)
    chunks = gradient_chunks(of, in_place=whole or world == 1)
    assert (len(chunks) == 1) is not of.long
    covered = [place for chunk in chunks for place in range(chunk.local, chunk.local + chunk.numel)]
    assert covered == list(range(of.shard_numel))
    assert all(chunk.layout.padded <= chunk.sends and chunk.numel <= chunk.lands for chunk in chunks)
    if of.long:
        assert all(chunk.sends * 4 <= bound for chunk in chunks)
        sent = [place for chunk in chunks for start in chunk.starts for place in range(start, start + chunk.numel)]
        assert sorted(sent) == list(range(of.layout.padded))


def test_a_chunk_counts_no_memory_of_the_gradient_itself() -> None:
    of, partial, out = flat(8, 2, bound=1 << 20, whole=False), torch.zeros(8), torch.zeros(4)
    reduction: Any = None
    chunk: GradientChunk = gradient_chunks(of, in_place=False)[0]

    def counted(partial: torch.Tensor, out: torch.Tensor, received: bool) -> tuple[int, int]:
        sent = Sent(reduction, chunk, DONE, partial, out, received)
        return sent.sent_nbytes, sent.landing_nbytes

    assert counted(partial, out, False) == (32, 16)
    assert counted(partial, out, True) == (32, 0), "it lands in the shard"
    assert counted(partial, partial, False) == (32, 0), "the sum is made where the partial sum is"
    assert counted(partial, partial, True) == (0, 0), "and that is the shard"
