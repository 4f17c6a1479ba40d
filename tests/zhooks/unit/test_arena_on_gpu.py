"""An arena on a device: ranges that kernels and the caching allocator agree about, and less stranded memory.

On the accelerator, and on CUDA where there is a GPU (not run yet).
"""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F

import zhooks
from offload.events import Bus
from offload.memory import Arena, Use
from tests.support.on_gpus import allocator_snapshot, module, on_gpus
from tests.support.on_ranks import folder
from tests.support.widening import DIM, VOCAB, Widening
from zprof.allocator.study import study


@on_gpus()
def test_a_range_is_a_storage_that_comes_back_when_it_dies(device: str) -> None:
    here = torch.device(device, module(device).current_device())
    arena = Arena(here, Bus())
    arena.reserve({Use.GATHERED: 8 << 20})
    first = arena.take(Use.GATHERED, 8 << 20).view(torch.float32).fill_(3.0)
    view, address = first[10:], first.data_ptr()
    assert address % 512 == 0 and first.untyped_storage().nbytes() == 8 << 20
    del first
    assert arena.take(Use.GATHERED, 1 << 20).data_ptr() != address
    assert view.unique().tolist() == [3.0]
    del view
    assert arena.take(Use.GATHERED, 8 << 20).data_ptr() == address
    with module(device).stream(module(device).Stream(here)):
        assert arena.take(Use.GATHERED, 1 << 20).untyped_storage().resizable()
    before = module(device).memory_allocated(here)
    arena.close()
    gc.collect()
    assert module(device).memory_allocated(here) <= before - (8 << 20)


def stuck(device: str, arena: str, folder: Path) -> int:
    """The most bytes that shared a segment with bytes in use, over two training steps, as `zprof frag` finds them."""
    gc.collect()
    torch.accelerator.empty_cache()
    memory = module(device).memory
    memory._record_memory_history()
    try:
        torch.manual_seed(0)
        model = Widening().to(device)
        policy = {"units": {"classes": ["Block", "Embedding", "Linear"], "min_numel": 0}, "activation": {"checkpoint": "unit"}}
        attachment = zhooks.attach(model, policy={**policy, "device": {"arena": arena}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, VOCAB, ((512 if device == "cuda" else 64) * DIM,), device=device)
        for _ in range(2):
            F.cross_entropy(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        path = folder / f"{arena}.pickle"
        path.write_bytes(pickle.dumps(allocator_snapshot(device)))
    finally:
        memory._record_memory_history(enabled=None)
    attachment.detach()
    worst = study(str(path)).worst
    assert worst is not None
    return worst.stuck


@on_gpus()
def test_less_is_stuck_with_an_arena(device: str) -> None:
    with folder() as at:
        assert stuck(device, "all", at) < stuck(device, "none", at)
