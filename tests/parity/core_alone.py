"""A rank that trains cells of the matrix on the core of zhooks alone: what plugs into it cannot be imported.

``python -m tests.parity.core_alone RANK WORLD FOLDER NAME...`` leaves its records in FOLDER.  It takes the place of
``zhooks/__init__.py``, where the packages are plugged in.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from offload.errors import CapabilityError
from tests.parity import run
from tests.source_rules import ORDER
from tests.support.matrix_optimizers import Shampoo

_ABOVE = next(number for number, names in enumerate(ORDER["zhooks"]) if "attach" in names.split())
PLUGGED = [name for names in ORDER["zhooks"][1:_ABOVE] for name in names.split()]


class Refused(MetaPathFinder):
    """Finds none of the packages that plug into the core."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, inner = name.partition(".")
        if top == "zhooks" and inner.partition(".")[0] in PLUGGED:
            raise ImportError(f"{name} is no part of the core")
        return None


def begin() -> None:
    """Import the core as ``zhooks``."""
    assert "zhooks" not in sys.modules
    sys.meta_path.insert(0, Refused())
    spec = find_spec("zhooks")
    assert spec is not None
    # What is in its `__init__` is not run.
    core = sys.modules["zhooks"] = module_from_spec(spec)
    from zhooks.attach import attach

    core.attach = attach  # type: ignore[attr-defined]


def missing() -> dict[str, str]:
    """What each use of a package that is not there says; the attachment goes on, and can be detached."""
    import zhooks

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    attachment = zhooks.attach(model)
    said: dict[str, str] = {}

    def step() -> None:
        before = [param.detach().clone() for param in model.parameters()]
        model(torch.ones(1, 4)).sum().backward()
        optimizer = Shampoo(model.parameters())
        try:
            optimizer.step()
        finally:
            # Nothing was changed, and others train as before.
            assert not optimizer.state
            assert all(bool((param == value).all()) for param, value in zip(model.parameters(), before, strict=True))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert not any(bool((param == value).all()) for param, value in zip(model.parameters(), before, strict=True))
            model.zero_grad()

    def freeze() -> None:
        model[0].requires_grad_(False)
        try:
            model(torch.ones(1, 4))
        finally:
            model[0].requires_grad_(True)

    uses: dict[str, Callable[[], object]] = {
        "step": step,
        "apply": lambda: attachment.apply({"stage": 2}),
        "freeze": freeze,
        "memory": attachment.memory,
        "describe": attachment.describe,
        "grad_norms": attachment.grad_norms,
        "noise_scale": lambda: attachment.noise_scale(1),
        "calibrate": lambda: attachment.calibrate().__enter__(),
        "recover": attachment.recover,
        "resume": attachment.resume,
        "save_to_peers": attachment.save_to_peers,
        "catch_preemption": attachment.catch_preemption,
        "preempted": lambda: attachment.preempted,
        "exit_if_preempted": lambda: attachment.exit_if_preempted("nowhere"),
    }
    for name, use in uses.items():
        try:
            use()
        except CapabilityError as error:
            said[name] = str(error)
    attachment.detach()
    return said


def main(rank: int, world: int, folder: Path, names: Sequence[str]) -> None:
    begin()
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    records = {name: run.train(name) for name in names}
    (folder / f"rank{rank}").write_bytes(pickle.dumps((records, missing())))
    if world > 1:
        dist.destroy_process_group()
    assert not {name for name in sys.modules if name.startswith("zhooks.")} & {f"zhooks.{name}" for name in PLUGGED}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
