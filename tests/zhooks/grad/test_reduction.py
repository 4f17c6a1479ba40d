"""One reduction, without ranks: its chunks cover a buffer once, and its buffers are counted where they are its own.

pytest runs it. What is reduced over ranks is test_order.py's, test_buffers.py's and the parity matrix's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.events import During
from tests.support.inside import comm_of, runtime_of
from zhooks.comm import DONE, Chunk, chunks_of
from zhooks.grad.reduction import ReduceHooks, Reduction, Sent, Spare
from zhooks.layout import flat_layout


@pytest.mark.parametrize("most", [128, 256])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_chunks_cover_every_ranks_range_once_within_the_bound(most: int, world: int, whole: bool) -> None:
    layout = flat_layout([1003], world=world, itemsize=4)
    kept = layout.undivided() if whole else layout
    chunks = list(chunks_of(kept, most, kept.align * world // kept.world, world=world))
    covered = [place for chunk in chunks for place in range(chunk.local, chunk.local + chunk.numel)]
    assert covered == list(range(kept.shard_numel))
    assert all(chunk.layout.padded == chunk.numel * len(chunk.starts) <= most for chunk in chunks)
    assert all(chunk.layout.world == world for chunk in chunks), "all ranks take part in every chunk"
    sent = [place for chunk in chunks for start in chunk.starts for place in range(start, start + chunk.numel)]
    assert sorted(sent) == list(range(layout.padded))


def test_a_chunk_is_a_run_of_a_shard_or_all_of_it() -> None:
    layout = flat_layout([1003], world=2, itemsize=4)
    shard = torch.arange(layout.shard_numel)
    runs = [chunk.of(shard) for chunk in chunks_of(layout, 256, layout.align)]
    assert torch.equal(torch.cat(runs), shard)
    assert Chunk(0, layout.shard_numel, (), layout).of(shard) is shard


def test_a_chunk_counts_no_memory_of_the_gradient_itself() -> None:
    layout, partial, out = flat_layout([8], world=2, itemsize=4), torch.zeros(8), torch.zeros(4)
    reduction: Any = None

    def counted(partial: torch.Tensor, out: torch.Tensor, received: bool) -> tuple[int, int]:
        sent = Sent(reduction, Chunk(0, 4, (), layout), DONE, partial, out, [], received)
        return sent.sent_nbytes, sent.landing_nbytes

    assert counted(partial, out, False) == (32, 16)
    assert counted(partial, out, True) == (32, 0), "it lands in the shard"
    assert counted(partial, partial, False) == (32, 0), "the sum is made where the partial sum is"
    assert counted(partial, partial, True) == (0, 0), "and that is the shard"


class Timed:
    """A work that a stream has done, where it says from when to when."""

    def __init__(self, begin: Any, end: Any) -> None:
        self.during = None if end is None else During(begin, end)

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([("a", "b"), ("c", "d"), ("e", "f")], ("a", "f")),
        ([("a", "b")], ("a", "b")),
        ([(None, None), ("c", "d")], ("c", "d")),
        ([(None, None)], None),
        ([], None),
    ],
)
def test_a_reduction_lasts_from_the_begin_of_its_first_work_to_the_end_of_its_last(works: Any, expected: Any) -> None:
    attachment = zhooks.attach(nn.Linear(2, 2))
    (gradient,) = runtime_of(attachment).reducer.gradients.values()
    reduction = Reduction(gradient, comm_of(attachment).shard, 1, ReduceHooks(), Spare(keeps=False))
    for work in works:
        reduction.timed(Timed(*work))
    found = reduction.during
    assert found == (None if expected is None else During(*expected))
    attachment.detach()
