"""What only a GPU can show of an arena: ranges that kernels and the caching allocator agree about, and less stranded memory.

None of it has been run on a GPU yet; here it is collected, and skipped where there is none.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import zhooks
from offload.events import Bus
from offload.memory import Arena, Use
from tests.support.widening import DIM, VOCAB, Widening
from zprof.allocator.study import study

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; the CPU tests hold the same on host memory"),
]


def test_a_range_on_cuda_is_a_storage_that_comes_back_when_it_dies() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arena = Arena(device, Bus())
    arena.reserve({Use.GATHERED: 8 << 20})
    first = arena.take(Use.GATHERED, 8 << 20).view(torch.float32).fill_(3.0)
    view, address = first[10:], first.data_ptr()
    assert address % 512 == 0 and first.untyped_storage().nbytes() == 8 << 20
    del first
    assert arena.take(Use.GATHERED, 1 << 20).data_ptr() != address
    assert view.unique().tolist() == [3.0]
    del view
    assert arena.take(Use.GATHERED, 8 << 20).data_ptr() == address
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert arena.take(Use.GATHERED, 1 << 20).untyped_storage().resizable()
    before = torch.cuda.memory_allocated(device)
    arena.close()
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= before - (8 << 20)


def stuck(arena: str, folder: Path) -> int:
    """The most bytes that shared a segment with bytes in use, over two training steps, as `zprof frag` finds them."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history()
    try:
        torch.manual_seed(0)
        model = Widening().cuda()
        policy = {"units": {"classes": ["Block", "Embedding", "Linear"], "min_numel": 0}, "activation": {"checkpoint": "unit"}}
        attachment = zhooks.attach(model, policy={**policy, "device": {"arena": arena}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, VOCAB, (512 * DIM,), device="cuda")
        for _ in range(2):
            F.cross_entropy(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        path = folder / f"{arena}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    attachment.detach()
    worst = study(str(path)).worst
    assert worst is not None
    return worst.stuck


def test_less_is_stuck_with_an_arena(tmp_path: Path) -> None:
    assert stuck("all", tmp_path) < stuck("none", tmp_path)
