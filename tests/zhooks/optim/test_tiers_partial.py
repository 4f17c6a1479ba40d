"""A step that updates only some parameters of a unit leaves the others as they are, on every tier and with both kernels.

pytest runs it on ranks over Gloo; the oracle is the same run with everything on the device. It never looks at a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import ShardedOpError
from offload.store import Block, Lease, Mode, Store
from offload.store.allocation import as_bytes
from offload.tier import Tier
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from zhooks.optim.numba_kernel import AdamRule

STEPS = 6
#: What a buffer holds that nobody has written: no weight of these runs is this number in any dtype.
UNWRITTEN = 0xA5


class Branches(nn.Module):
    """Three layers, of which a step may skip the middle one; odd sizes, so that the shards have padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.middle, self.last = nn.Linear(13, 17), nn.Linear(17, 17), nn.Linear(17, 3)

    def forward(self, inputs: Tensor, *, middle: bool = True) -> Tensor:
        hidden = self.first(inputs).relu()
        return self.last(hidden + self.middle(hidden).relu() if middle else hidden)


@contextmanager
def unwritten_is_noticed() -> Iterator[list[str]]:
    """Buffers for whole writes begin as a mark; the names of blocks that still have it when the write ends are listed."""
    lease, close, left = Store._open, Store.close, list[str]()

    def marked(self: Store, block: Block, at: Tier, mode: Mode) -> Lease:
        made = lease(self, block, at, mode)
        if mode is Mode.WRITE_ALL:
            as_bytes(made.values).fill_(UNWRITTEN)
        return made

    def checked(self: Store, block: Block) -> None:
        held = block.lease
        if held is not None and held.holds == 1 and held.mode is Mode.WRITE_ALL and block.numel:
            rows = as_bytes(held.wait()).view(block.numel, -1)
            left.extend([block.key] * int((rows == UNWRITTEN).all(1).sum()))
        close(self, block)

    Store._open, Store.close = marked, checked  # type: ignore[method-assign]
    try:
        yield left
    finally:
        Store._open, Store.close = lease, close  # type: ignore[method-assign]


def losses(case: str, kernel: str, tier: str, **more: Any) -> list[Tensor]:
    """The loss of every step, and the parameters at the end."""
    model = Branches()
    if case == "stochastic":
        model.bfloat16()
    cell = {"tier": tier}
    policy: dict[str, Any] = {"parameter": cell, "gradient": cell, "optimizer": {**cell, "kernel": kernel}} | more
    if case == "stochastic":
        policy["optimizer"]["rounding"] = "stochastic"
    else:
        policy.setdefault("precision", {"param": "bf16"})
    attachment = zhooks.attach(model, policy=policy)
    middle = list(model.middle.parameters())
    others = [*model.first.parameters(), *model.last.parameters()]
    if case == "two optimizers":
        made = [torch.optim.AdamW(middle, lr=1e-2), torch.optim.SGD(others, lr=1e-1, momentum=0.9)]
    else:
        made = [torch.optim.AdamW([*middle, *others], lr=1e-2)]
    seen = []
    for number in range(STEPS):
        if case == "frozen":
            model.middle.requires_grad_(number % 3 == 0)
        inputs = torch.randn(8, 13, generator=torch.Generator().manual_seed(10 * number + place()[0]))
        if case == "stochastic":
            inputs = inputs.bfloat16()
        loss = model(inputs, middle=case == "frozen" or number % 3 == 0).float().square().mean()
        loss.backward()
        seen.append(loss.detach())
        if case == "written":
            with torch.no_grad():
                model.middle.weight.mul_(0.5)
        for optimizer in made[:1] if case == "two optimizers" and number % 2 else made:
            optimizer.step()
            optimizer.zero_grad()
    attachment.detach()
    return [*seen, *(param.detach().clone() for param in model.parameters())]


@pytest.mark.slow
@on_ranks(*slow(1), 2, kernel=("torch", *slow("numba")))
def test_what_a_step_leaves_out_stays_as_it_was_on_every_tier(kernel: str) -> None:
    for case in ("skipped", "two optimizers", "frozen", "stochastic", "written"):
        wanted = losses(case, kernel, "device")
        for tier in ("host", "disk"):
            with unwritten_is_noticed() as left:
                found = losses(case, kernel, tier)
            assert not left, (case, tier, sorted(set(left)))
            assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True)), (case, tier, found[:STEPS])


def test_an_update_that_raises_leaves_the_weights_of_its_unit_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"tier": "disk"}
    policy = {"parameter": cell, "gradient": cell, "optimizer": {**cell, "kernel": "numba"}, "precision": {"param": "bf16"}}
    model = Branches()
    attachment = zhooks.attach(model, policy=policy)
    inputs = torch.ones(4, 13)
    before = model(inputs)
    model(inputs).float().sum().backward()
    made = torch.optim.AdamW(model.parameters())
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(AdamRule, "begin", _refuse)
        made.step()
    assert torch.equal(model(inputs), before)
    attachment.detach()


def _refuse(self: AdamRule, group: dict[str, Any], state: dict[str, Any]) -> object:
    raise ArithmeticError


class Scaled(torch.optim.SGD):
    """SGD whose step takes a factor, by place or by name."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, scale: Any = 1.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * scale)


class Lion(Scaled):
    """Takes a factor as well; by its name and groups one that the kernels know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        for group in self.param_groups:
            group["betas"] = (0.9, 0.99)


def ready(make: Callable[[Any], torch.optim.Optimizer], tier: str | None, **optimizer: Any) -> tuple[Any, Any, Any]:
    """A model with gradients and an optimizer that is to be stepped."""
    model = Branches()
    attachment = None
    if tier is not None:
        cell = {"tier": tier}
        policy = {"parameter": cell, "gradient": cell, "optimizer": {**cell, **optimizer}, "units": {"min_numel": 0}}
        attachment = zhooks.attach(model, policy=policy)
    made = make(model.parameters())
    model(torch.ones(4, 13)).square().mean().backward()
    return model, attachment, made


@on_ranks(1, 2, tier=("host", "disk"))
def test_arguments_of_a_step_reach_the_optimizer(tier: str) -> None:
    calls: tuple[dict[str, Any], ...] = (
        {"args": (None, 5.0), "kwargs": {}}, {"args": (), "kwargs": {"closure": None, "scale": 5.0}},
    )  # fmt: skip
    for call in calls:
        found = []
        for where in (None, tier):
            model, attachment, made = ready(lambda params: Scaled(params, lr=1e-2), where)
            made.step(*call["args"], **call["kwargs"])
            if attachment is not None:
                attachment.detach()
            found.append([param.detach() for param in model.parameters()])
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("make", "optimizer", "call", "error", "message"),
    [
        (lambda params: Scaled(params, lr=1e-2), {}, {"closure": lambda: 0.0}, ShardedOpError, "without a closure"),
        (lambda params: Scaled(params, lr=1e-2), {}, {"scale": [torch.ones(2)]}, ShardedOpError, "tensors for each parameter"),
        (torch.optim.AdamW, {}, {"scale": 5.0}, TypeError, "scale"),
        (Lion, {"kernel": "numba"}, {"scale": 5.0}, ShardedOpError, r'without arguments.*found scale. Use kernel = "torch"'),
    ],
    ids=["closure", "by parameter", "unknown", "kernel"],
)
def test_arguments_that_a_step_on_tiers_cannot_pass_are_refused_before_anything_changed(
    make: Any, optimizer: dict[str, Any], call: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, attachment, made = ready(make, "host", **optimizer)
    before = [param.full_tensor() for param in model.parameters()]
    with pytest.raises(error, match=message):
        made.step(**call)
    assert all(torch.equal(param.full_tensor(), value) for param, value in zip(model.parameters(), before, strict=True))
    made.step()
    assert not torch.equal(model.first.weight.full_tensor(), before[0])
    attachment.detach()


class Derived(torch.optim.AdamW):
    """Its step calls its base class's, which torch announces once more."""

    def step(self, closure: Any = None) -> Any:
        super().step()


class Wrapped(torch.optim.Optimizer):
    """Steps another optimizer: over the same groups, or over groups of its own."""

    def __init__(self, params: Any, *, shared: bool = True, **options: Any) -> None:
        self.inner = torch.optim.AdamW(list(params), **options)
        super().__init__([dict(group) for group in self.inner.param_groups], {})
        if shared:
            self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "in backward"])
@pytest.mark.parametrize("make", [Derived, Wrapped])
def test_a_step_that_calls_another_updates_once(make: Any, overlap: bool) -> None:
    found = []
    for kind, tier in ((torch.optim.AdamW, None), (make, "host")):
        model, attachment, made = ready(partial(kind, lr=1e-2), tier, overlap=overlap)
        seen: list[int] = []
        made.register_step_post_hook(lambda optimizer, *_, seen=seen: seen.append(len(optimizer.param_groups[0]["params"])))
        for _ in range(3):
            made.step()
            made.zero_grad()
            model(torch.ones(4, 13)).square().mean().backward()
        made.step()
        if attachment is not None:
            attachment.detach()
        assert set(seen) == {6}
        found.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_step_that_calls_one_over_groups_of_its_own_is_refused() -> None:
    model, attachment, made = ready(lambda params: Wrapped(params, lr=1e-2, shared=False), "host")
    before = model.first.weight.full_tensor()
    with pytest.raises(ShardedOpError, match="AdamW cannot be stepped in this way"):
        made.step()
    assert torch.equal(model.first.weight.full_tensor(), before)
    attachment.detach()
