"""A GPT's run that moves to another mesh while it lives, beside one that loads there what was saved before the move.

Tests of ``attachment.reshard(mesh)`` call it on the ranks of a pool. It asserts that the move leaves every value as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.on_ranks import folder, place
from tests.support.resharding import Resharded, differences, policy_of


def arranged(replicate: int, tp: int = 1) -> DeviceMesh:
    """All ranks, in so many replicas of what ``tp`` ranks divide."""
    sizes, names = (replicate, place()[1] // replicate // tp, tp), ("replicate", "shard", "tp")
    axes = 3 if tp > 1 else 2
    return init_device_mesh("cpu", sizes[:axes], mesh_dim_names=names[:axes])


def moved_beside_loaded(before: dict[str, Any], after: dict[str, Any], **common: Any) -> tuple[list[float], list[float]]:
    """The losses of two steps after the move, and of those after a load on the mesh that was moved to."""
    with folder() as path:
        run = Resharded(path, **before, **common)
        run.train(0, 2)
        run.attachment.save(path / "run", run.optimizer)
        whole = run.full()
        policy = policy_of(path, after.get("stage", 3), after.get("tier", "device"), common.get("units"), half="half" in common)
        disk = before.get("tier", "device") == "disk"
        # Once there is a scratch file it stays where it is.
        policy |= {"disk": {"path": str(path)}} if disk or after.get("tier") == "disk" else {}
        run.attachment.apply(policy | common.get("more", {}), mesh=arranged(after.get("replicate", 1)))
        assert not differences(run.full(), whole)
        moved = run.train(2, 2)
        run.attachment.detach()

        run = Resharded(path, seed=5, **after, **common)
        run.attachment.load(path / "run", run.optimizer)
        loaded = run.train(2, 2)
        run.attachment.detach()
    return moved, loaded


def there_and_back(path: Path, tp: int = 1, **common: Any) -> tuple[list[float], list[float]]:
    """The losses of a run that moves to replicas and back, and of one that stays where it is."""
    losses = []
    for moves in (True, False):
        run = Resharded(path, tp=tp, **common)
        found = run.train(0, 1)
        for step, replicate in ((1, place()[1] // tp), (2, 1)):
            if moves:
                run.attachment.reshard(arranged(replicate, tp))
            found += run.train(step, 1)
        run.attachment.detach()
        losses.append(found)
    return losses[0], losses[1]
