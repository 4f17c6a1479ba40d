"""What torchrun tells a process by its environment, for a rank of the tests' own pools: Accelerate asks nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tests.support.on_ranks import place


@contextmanager
def launched() -> Iterator[tuple[int, int]]:
    """This rank and the number of ranks, known to Accelerate inside the block; what it remembers ends with it."""
    import accelerate.state

    rank, world = place()
    environment: dict[str, object] = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    environment |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    before, connected = dict(os.environ), dist.is_initialized()
    # A world of one is launched by nobody.
    os.environ.update({name: str(value) for name, value in environment.items()} if world > 1 else {})
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        yield rank, world
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized() and not connected:
            # Lightning connects a world of one, too.
            dist.destroy_process_group()
