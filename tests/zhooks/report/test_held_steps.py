"""Whatever a run does, an observer knows every byte it holds wherever it rests: on the device, on the host and on disk."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch

import zhooks
from offload.events import listen, state_all
from offload.store import Block, BlockRange
from offload.tier import Tier
from tests.support.held_levels import POLICIES, TIERED, Levels, training
from tests.support.inside import flats_of, has_store, memory_of, runtime_of, store_of
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow
from zhooks.tensor import ShardedTensor


def on_device(attachment: zhooks.Attachment, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes by category of the storages on the device that an attachment at rest refers to, each counted once."""
    found: dict[int, tuple[str, int]] = {}

    def add(category: str, value: Any) -> None:
        value = memory_of(value) if isinstance(value, ShardedTensor) else value
        block = value.block if isinstance(value, BlockRange) else value
        value = block.stored if isinstance(block, Block) and block.tier is Tier.DEVICE else value
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            found[value.untyped_storage()._cdata] = (f"{category} on device", value.untyped_storage().nbytes())

    for flat in flats_of(attachment):
        add("optimizer" if flat.resident else "parameter", flat.storage.memory)
        add("parameter", flat.full)
        if isinstance(flat.storage.at, Block):
            add("optimizer", flat.storage.at)
            add("parameter", flat.storage.sends)
        for param in flat.params:
            with torch._C.DisableTorchFunctionSubclass():
                add("gradient", param.grad)
            for value in optimizer.state.get(param, {}).values():
                add("optimizer", value)
        gradient = runtime_of(attachment).reducer.gradients.get(flat.number)
        for value in (gradient.partial, gradient.at) if gradient is not None else ():
            add("gradient", value)
    held: Counter[str] = Counter()
    for what, nbytes in found.values():
        held[what] += nbytes
    return dict(held)


class Watched:
    """A run, and an observer that has to know of every byte of it whenever it rests."""

    def __init__(self, policy: dict[str, Any], folder: str) -> None:
        gc.collect()  # who listens hears every attachment that is alive, those other tests left too
        self.levels = Levels()
        self.stop = listen(self.levels)
        self.policy = {**policy, "disk": {"path": folder}}
        self.attachment, self.optimizer = training(self.policy)
        self.model = self.attachment.model

    def rest(self, where: str) -> None:
        known = {what: nbytes for what, nbytes in self.levels.table().items() if what.endswith("on device")}
        assert known == on_device(self.attachment, self.optimizer), where
        for tier in (Tier.HOST, Tier.DISK):
            used = store_of(self.attachment).budget.used(tier) if has_store(self.attachment) else 0
            assert self.levels.on(tier.value) == used, f"{where}: {tier}"

    def backward(self) -> None:
        self.model(torch.ones(4, 8)).sum().backward()

    def step(self, where: str, *, keep: bool = False) -> None:
        self.backward()
        self.optimizer.step()
        state_all()
        self.rest(where)
        self.optimizer.zero_grad(set_to_none=not keep)
        self.rest(f"{where}, zero_grad")


TENSE: dict[str, dict[str, Any]] = {
    **POLICIES,
    "all on disk": {"stage": 3, **{cell: {"tier": "disk"} for cell in ("parameter", "gradient", "optimizer")}},
    "activations": {"stage": 3, "activation": {"tier": "host", "keep": 0}},
    "activations on disk": {"stage": 1, "activation": {"tier": "disk", "keep": 0}, "precision": {"param": "bf16"}},
    "recomputed": {"stage": 3, "units": {"names": ["0"], "min_numel": 0}, "activation": {"checkpoint": "unit"}, **TIERED},
    "overlap": {"stage": 2, "optimizer": {"tier": "host", "overlap": True}},
    "numba": {"stage": 3, "optimizer": {"tier": "host", "kernel": "numba"}, "precision": {"param": "bf16"}},
}

#: Of which another holds what they do.
HELD_ALIKE = ("disk", "bf16", "activations")


@on_ranks(1, 2, name=(*(name for name in TENSE if name not in HELD_ALIKE), *slow(*HELD_ALIKE)))
def test_every_byte_is_known_wherever_a_run_rests(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Watched(TENSE[name], folder)
        run.rest("attached")
        run.step("first step")
        run.step("second step", keep=True)
        if name != "overlap":
            with run.attachment.no_sync():
                run.backward()
                run.rest("accumulating")
            run.step("accumulated")
        with run.attachment.gathered():
            pass
        with run.attachment.resident(), torch.no_grad():
            run.model(torch.ones(4, 8))
            run.rest("resident")
        run.rest("released")
        fails_in_forward(run)
        run.step("after an exception in forward")
        fails_in_backward(run)
        run.step("after an exception in backward")
        run.attachment.load_state_dict(run.attachment.state_dict(run.optimizer), run.optimizer)
        state_all()
        run.rest("loaded")
        next(iter(run.model.parameters())).requires_grad_(False)
        run.step("frozen")
        run.attachment.apply({"units": {"min_numel": 0}, **run.policy, "stage": 3, "parameter": {"tier": "host"}})
        run.step("applied")
        run.attachment.detach()
        run.stop()
        levels = run.levels
        del run
        gc.collect()
        assert levels.table() == {} and levels.of("communication on host") == 0


def fails_in_forward(run: Watched) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run.model(torch.ones(4, 9))


def fails_in_backward(run: Watched) -> None:
    """The input's own gradient comes last: every unit's has been made by then."""

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    # No leaf: torch 2.8 loses the hooks of one that is saved and unpacked by hooks, as recomputation does.
    x = torch.ones(4, 8, requires_grad=True) * 1
    x.register_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        run.model(x).sum().backward()
    if run.attachment.policy.optimizer.overlap:
        run.optimizer.step()
    run.optimizer.zero_grad()
