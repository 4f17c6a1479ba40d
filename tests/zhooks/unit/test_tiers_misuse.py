"""Ways a stranger would use the tiers wrongly or at their edges: each was once answered with a wrong result or a wrong word.

pytest runs it, in this process and on ranks over Gloo.  It never looks at a clock.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import BudgetError, CapabilityError, ShardedOpError
from offload.events import Event
from offload.policy import Policy
from tests.support.inside import tiers_changed
from tests.support.on_ranks import on_ranks, place
from tests.support.values import full, same, sharded


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def tiered(tier: str, **optimizer: Any) -> dict[str, Any]:
    cell = {"tier": tier}
    return {"parameter": cell, "gradient": cell, "optimizer": {**cell, **optimizer}}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()


def scaled(model: nn.Module, policy: dict[str, Any] | None) -> dict[str, Tensor]:
    """Four steps under a GradScaler that leaves the unscaling to the kernel; the third gradient overflows."""
    attached = zhooks.attach(model, policy=policy) if policy is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rank, world = place()
    for number in range(4):
        optimizer.zero_grad()
        torch.manual_seed(number)
        inputs = torch.randn(4 * world, 16)
        mine = inputs if attached is None else inputs[4 * rank : 4 * rank + 4]
        loss = model(mine).square().mean() * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if attached is not None:
        attached.detach()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@on_ranks(1, 2, tier=("host",))
def test_numba_unscales_and_skips_what_a_scaler_leaves_to_fused_optimizers(tier: str) -> None:
    plain = scaled(build(), None)
    ours = scaled(build(), tiered(tier, kernel="numba"))
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@on_ranks(1)
def test_a_policy_that_apply_refuses_leaves_the_old_one_in_force() -> None:
    model = build()
    attached = zhooks.attach(model, policy=tiered("host"))
    before = attached.policy
    with pytest.raises(BudgetError, match=r"^\[budget\] host is too small. .*, 5\.28 KiB per rank, found 100 B"):
        attached.apply({**tiered("host"), "stage": 0, "budget": {"host": 100}})
    assert attached.policy == before
    step(model, torch.optim.AdamW(model.parameters()))
    attached.detach()


@on_ranks(1)
def test_apply_asks_whether_the_kernel_can_run_where_the_new_policy_wants_it() -> None:
    attached = zhooks.attach(build(), policy=tiered("host"))
    chosen = Policy.of(tiered("host", kernel="numba"))
    with pytest.raises(CapabilityError, match='compute = "host"'):
        tiers_changed(attached, chosen, torch.device("cuda"))
    attached.detach()


@on_ranks(1, tiers=(("host", "device"), ("disk", "disk")))
def test_a_backward_that_apply_came_before_is_refused_by_name_and_training_goes_on(tiers: tuple[str, str]) -> None:
    model, plain = build(), build()
    attached = zhooks.attach(model, policy=tiered(tiers[0]))
    loss = model(torch.ones(4, 16)).sum()
    attached.apply(tiered(tiers[1]))
    with pytest.raises(ShardedOpError, match=r"apply\(\) was called"):
        loss.backward()
    for one in (model, plain):
        step(one, torch.optim.SGD(one.parameters(), lr=0.1))
    assert same(full(model), plain.parameters())
    attached.detach()


class Unforeseen(torch.optim.AdamW):
    """Built from more than its groups, so that what it will keep is not known before its first step."""

    def __init__(self, params: Any, name: str) -> None:
        super().__init__(params, lr=0.1)
        self.name = name


@on_ranks(1)
def test_a_step_that_finds_no_memory_for_states_that_nobody_foresaw_says_that_it_had_updated() -> None:
    model = build()
    attached = zhooks.attach(model, policy={**tiered("host"), "budget": {"host": 6000}})
    optimizer = Unforeseen(model.parameters(), "unforeseen")
    with pytest.raises(BudgetError, match="1 of 1 unit had been updated in this step"):
        step(model, optimizer)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    attached.detach()


class Interrupting:
    """Presses Ctrl-C at the beginning of the n-th gather from now."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_event(self, event: Event) -> None:
        if (event.kind, event.what) == ("begin", "gather"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@on_ranks(1, after=(1, 2, 3))
def test_an_interrupt_as_a_gather_begins_leaves_no_buffer_that_passes_for_the_values(after: int) -> None:
    model = build()
    attached = zhooks.attach(model, policy={**tiered("host"), "units": {"min_numel": 0}})
    plain = build()
    observation = attached.observe(Interrupting(after))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(4, 16)).square().mean().backward()
    observation.close()
    assert torch.equal(model(torch.ones(4, 16)), plain(torch.ones(4, 16)))
    for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded(param).full_tensor(), twin)
    attached.detach()


def test_an_update_on_the_host_is_refused_where_16_bit_parameters_are_their_own_masters_on_the_device() -> None:
    model = build().bfloat16()
    policy = {
        "gradient": {"tier": "host"}, "optimizer": {"tier": "host", "compute": "host"}, "precision": {"param": "bf16"},
    }  # fmt: skip
    with pytest.raises(CapabilityError, match='compute = "host" needs masters, gradient and states'):
        zhooks.attach(model, policy=policy)
    assert not isinstance(next(model.parameters()), zhooks.ShardedTensor)
