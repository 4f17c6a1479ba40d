"""What a process holds open does not grow with its saves, loads, evaluations and changes of policy.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch

import zhooks
from tests.support.on_ranks import folder, from_first, on_ranks
from tests.support.resuming import Run, batch
from tests.support.slow import slow

CELLS = ("parameter", "gradient", "optimizer")


def held(path: Path) -> dict[str, int]:
    """Descriptors (sockets among them), threads, mappings of files and of shared memory, and names in ``path``.

    Anonymous memory is the allocator's business.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mapped files": sum(len(line.split()) > 5 for line in maps),
        "names": len(os.listdir(path)),
    }


@on_ranks(*slow(1), 2, tier=(*slow("device", "host"), "disk"))
def test_saves_loads_and_evaluations_leave_nothing_open(tier: str) -> None:
    with folder() as path:
        policy: dict[str, Any] = {"stage": 3, "units": {"min_numel": 0}, **{cell: {"tier": tier} for cell in CELLS}}
        if tier == "disk":
            policy["disk"] = {"path": str(path / "scratch")}
        run = Run(policy)
        seen: list[dict[str, int]] = []
        for step in range(9):
            run.train(range(step, step + 1))
            run.save(path / "run")
            run.attachment.save(path / f"step-{step}", run.optimizer, wait=False, keep=2).wait()
            run.attachment.save_full(path / "model.safetensors")
            run.attachment.load_state_dict(run.attachment.state_dict(run.optimizer), run.optimizer)
            newest = zhooks.latest(path)
            assert newest is not None and newest.name == f"step-{step}"
            run.attachment.load(newest, run.optimizer)
            run.load(path / "run")
            run.attachment.apply({**policy, "schedule": {"prefetch": 1 + step % 2}})
            with torch.no_grad():
                run.model.eval()(batch(step))
            run.model.train()
            gc.collect()
            from_first(None)  # the other rank's saves are over as well
            if step >= 3:
                seen.append(held(path))
        assert all(each == seen[0] for each in seen), seen
