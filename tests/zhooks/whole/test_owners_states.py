"""Whatever an optimizer of whole matrices keeps, on any tier: odd containers, shared memory, quantised states of libraries.

pytest runs it, on one rank and on two.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zhooks
from tests.support.matrix_optimizers import batch, net
from tests.support.on_ranks import on_ranks
from tests.support.torches import Muon
from tests.support.values import full
from zhooks.optim import tensors_in
from zhooks.tensor import StoredTensor

CELLS = ("parameter", "gradient", "optimizer")


def policy(tier: str) -> dict[str, Any]:
    return {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}, **{cell: {"tier": tier} for cell in CELLS}}


class Odd(Optimizer):
    """Keeps views of one tensor, lists, tuples and queues, two states that it swaps, one that grows, and a table of its own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 5e-4) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.linspace(0, 1, 7)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group["lr"])

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["step"], state["all"] = torch.tensor(0.0), torch.zeros(2, *param.shape)
            state["first"], state["last"] = state["all"][0], deque([grad.clone()], maxlen=3)
            state["deep"] = {"row": (torch.zeros_like(param).t(), [torch.ones(param.shape[0])]), "none": None}
            state["wide"], state["table"], state["seen"] = torch.ones(1).expand(5), self.table, grad > 0
            state["one"], state["two"] = torch.zeros_like(param), torch.ones_like(param)
            state["grows"] = torch.zeros(3, dtype=torch.float64)
        state["step"] += 1
        state["first"].add_(grad)
        state["all"][1].add_(state["first"], alpha=0.1)
        state["last"].append(grad.clone())
        turned, (scale,) = state["deep"]["row"]
        turned.add_(grad.t())
        scale.mul_(1.01)
        state["one"], state["two"] = state["two"], state["one"]
        state["one"].add_(1e-3)
        state["grows"] = torch.cat([state["grows"], torch.ones(1, dtype=torch.float64)])
        state["seen"] = state["seen"].logical_not()
        update = grad @ grad.mT @ grad if grad.dim() == 2 else grad
        update = update + state["all"].sum(0) + torch.stack(list(state["last"])).sum(0) + turned.t()
        update = update * scale.reshape(-1, *[1] * (param.dim() - 1)) + state["two"] * state["grows"].sum().float()
        update = update + state["seen"] * state["table"].sum() + state["wide"].sum()
        param.sub_(update * lr / state["step"])


def changed_by_hand(optimizer: Optimizer) -> list[Any]:
    """What a user may do to the states of the parameters that this rank keeps; returns what was read."""
    read: list[Any] = []
    for states in optimizer.state.values():
        if not states:
            continue
        one = states["one"]
        one.mul_(0.5)
        one[1:3].zero_()
        one.data.add_(1)
        states["all"].view(2, -1)[1, :2] = 7.0
        torch._foreach_mul_([states["two"]], 0.9)
        read.append([one.tolist(), float(states["first"].sum()), (one * states["two"]).sum().item(), one.numpy().max().item()])
    return read


def trained(optimizer_of: Callable[[Any], Optimizer], tier: str | None) -> tuple[nn.Module, Optimizer, list[Any]]:
    model, read = net(), list[Any]()
    attachment = None if tier is None else zhooks.attach(model, policy=policy(tier))
    optimizer = optimizer_of(model.parameters())
    kept: Any = None
    for step in range(6):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            read = changed_by_hand(optimizer)
            kept = copy.deepcopy(optimizer.state_dict())
        if step in (3, 4):
            optimizer.load_state_dict(copy.deepcopy(kept) if step == 3 else kept)
    if attachment is not None:
        if tier != "device":
            states = [one for states in optimizer.state.values() for one in states.values()]
            stored = [isinstance(one, StoredTensor) for one in tensors_in(states) if one.dim()]
            assert all(stored) and (stored or torch.distributed.is_initialized())
        attachment.detach()
    return model, optimizer, read


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_odd_states_are_what_plain_training_has_whatever_their_tier(tier: str) -> None:
    expected, other, wanted = trained(Odd, None)
    model, optimizer, read = trained(Odd, tier)
    assert all(one in wanted for one in read)
    for value, plain_value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, plain_value)
        found, there = (list(tensors_in(one.state[param])) for one, param in ((optimizer, value), (other, plain_value)))
        assert all(type(one) is torch.Tensor and torch.equal(one, two) for one, two in zip(found, there, strict=True))


def test_a_state_on_a_tier_refuses_to_name_memory_and_copies_are_plain() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=policy("disk"))
    optimizer = Muon([param for param in model.parameters() if param.dim() == 2])
    model(batch(0)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    with pytest.raises(zhooks.ShardedOpError, match=r"data_ptr .*is on the disk tier"):
        state.data_ptr()
    twice = copy.deepcopy((state, state[0]))
    assert all(type(one) is torch.Tensor for one in twice)
    twice[0][0].fill_(3)
    assert torch.equal(twice[0][0], twice[1]) and not torch.equal(state[0], twice[1])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["state"][0]["momentum_buffer"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, state)
    attachment.detach()


# ---- states of libraries


def large() -> nn.Sequential:
    """Matrices that the libraries quantise the states of."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 3))


def check_as_plain(optimizer_of: Callable[[Any], Optimizer], tier: str) -> None:
    results = []
    for attached in (False, True):
        model = large()
        attachment = zhooks.attach(model, policy=policy(tier)) if attached else None
        optimizer = optimizer_of(model.parameters())
        for step in range(4):
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            # What torchao compiles is the same uncompiled, and nobody waits for compilers.
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in model.parameters()] if attachment is None else full(model))
        if attachment is not None and tier != "device":
            assert {row.tier for row in attachment.memory().rows if row.what == "optimizer" and row.nbytes > 8192} <= {tier}
    for value, other in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_eight_bit_adam_of_torchao_trains_as_it_does_plain(tier: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim import AdamW8bit

        check_as_plain(lambda params: AdamW8bit(params, lr=0.01), tier)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_eight_bit_adam_of_bitsandbytes_trains_as_it_does_plain(tier: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bitsandbytes.optim import Adam8bit

        check_as_plain(lambda params: Adam8bit(params, lr=0.01, min_8bit_size=256), tier)
