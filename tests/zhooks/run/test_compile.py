"""torch.compile beside attach: where graphs break, how many there are, and that training is what it is without.

pytest runs it, on ranks. Compiled code is compared with the same attached training uncompiled: ``aot_eager`` runs the same
operations, so the losses agree to 1e-6; what attach itself does to a model is the parity matrix's. Code that torch generates
(inductor) is slow to make and marked so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import zhooks
from tests.support.compiling import breaks, compiling, graphs, restart
from tests.support.inside import flats_of
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.slow import slow
from tests.support.zoo import GPT, draw_tokens, next_token

UNITS = {"min_numel": 0}
LAYERS = 2
TOLERANCE = 1e-6


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(tied=False, layers=LAYERS)


def blocks_in_place(model: GPT, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def blocks_wrapped(model: GPT, backend: str) -> nn.Module:
    for number, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
        model.blocks[number] = compiled
    return model


def model_in_place(model: GPT, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def model_wrapped(model: GPT, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = draw_tokens(torch.Generator().manual_seed(10 * step + place()[0]), step, place()[0])
    return next_token(model(inputs), targets)


def train(model: nn.Module, steps: int = 3, update: Callable[[Any], Callable[[], Any]] = lambda opt: opt.step) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    change, losses = update(optimizer), []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        change()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def uncompiled(policy: dict[str, Any]) -> list[float]:
    model = gpt()
    zhooks.attach(model, policy=policy)
    return train(model)


@on_ranks(*slow(1), 2, way=("in place", *slow("wrapped")), early=(True, *slow(False)))
@compiling()
def test_blocks_compiled_before_or_after_attach_are_one_graph_without_a_break(way: str, early: bool) -> None:
    expected = uncompiled({"units": UNITS})
    made = {"in place": blocks_in_place, "wrapped": blocks_wrapped}[way]
    restart()
    model = gpt()
    if early:
        made(model, "aot_eager")
    zhooks.attach(model, policy={"units": UNITS})
    if not early:
        made(model, "aot_eager")
    assert train(model) == pytest.approx(expected, abs=TOLERANCE)
    # The blocks are alike: one graph serves all of them, in every step.
    assert (graphs(), breaks()) == (1, [])


@on_ranks(2, way=("in place", *slow("wrapped")), early=(True, *slow(False)))
@compiling()
def test_the_graph_of_a_whole_model_breaks_where_its_units_are_called_alone(way: str, early: bool) -> None:
    expected = uncompiled({"units": UNITS})
    made = {"in place": model_in_place, "wrapped": model_wrapped}[way]
    restart()
    model = gpt()
    called = made(model, "aot_eager") if early else model
    zhooks.attach(called, policy={"units": UNITS})
    if not early:
        called = made(model, "aot_eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert train(called) == pytest.approx(expected, abs=TOLERANCE)
    told = [str(one.message) for one in said if "compiled code calls units of an attached model" in str(one.message)]
    assert len(told) == len(said) == (1 if place()[0] == 0 else 0)  # once a job
    assert breaks()
    assert all("zhooks gathers the unit that is called here" in why for why in breaks())
    assert len(breaks()) <= 2 * (LAYERS + 3)
    made_by_then = graphs()
    train(called)
    assert graphs() == made_by_then


POLICIES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "host": {"parameter": {"tier": "host"}, "gradient": {"tier": "host"}, "optimizer": {"tier": "host"}},
    "activations on host": {"activation": {"tier": "host", "min_bytes": 0}},
    "recomputed": {"activation": {"checkpoint": "unit"}},
    "recomputed from host": {"activation": {"checkpoint": "unit", "tier": "host", "min_bytes": 0}},
    "bf16": {"precision": {"param": "bf16"}},
}
#: Those of them that a default run trains.
MAIN = ("recomputed from host",)


@on_ranks(2, named=(*MAIN, *slow(*sorted(POLICIES.keys() - set(MAIN)))))
@compiling()
def test_compiled_blocks_train_under_every_policy_as_uncompiled_ones(named: str) -> None:
    policy = {"units": UNITS, **POLICIES[named]}
    expected = uncompiled(policy)
    model = gpt()
    zhooks.attach(model, policy=policy)
    blocks_in_place(model, "aot_eager")
    assert train(model) == pytest.approx(expected, abs=TOLERANCE)
    assert (graphs(), breaks()) == (1, [])


def holders_after_forward(compile_it: Callable[[GPT, str], nn.Module]) -> list[int]:
    """How many hold the storage of each buffer that a forward gathered, once it is over."""
    model = gpt()
    attachment = zhooks.attach(model, policy={"units": UNITS, "schedule": {"reshard_after_forward": True}})
    compile_it(model, "aot_eager")
    train(model, steps=1)
    gathered: dict[int, Tensor] = {}
    for flat in [flat for flat in flats_of(attachment) if flat.name.startswith("blocks.")]:
        entry = dict(model.named_modules())[flat.name]
        entry.register_forward_pre_hook(lambda *_, flat=flat: gathered.update({flat.number: flat.full}))
    loss = loss_of(model, 1)
    assert all(flat.full is None for flat in flats_of(attachment))
    counts = [torch._C._storage_Use_Count(full.untyped_storage()._cdata) for full in gathered.values()]
    loss.backward()
    assert len(counts) == LAYERS
    return counts


@on_ranks(2)
@compiling()
def test_a_compiled_block_keeps_no_gathered_buffer_for_backward() -> None:
    assert holders_after_forward(blocks_in_place) == holders_after_forward(lambda model, backend: model)


@pytest.mark.slow
@on_ranks(2)
@compiling()
def test_a_compiled_step_and_a_compiled_average_of_weights_are_those_of_python() -> None:
    expected = uncompiled({"units": UNITS})
    model = gpt()
    zhooks.attach(model, policy={"units": UNITS})
    average = [torch.zeros_like(param) for param in model.parameters()]

    @torch.compile(backend="aot_eager")
    @torch.no_grad()
    def follow() -> None:
        for mean, param in zip(average, model.parameters(), strict=True):
            mean.mul_(0.5).add_(param, alpha=0.5)

    # A compiled step takes its powers of beta in another precision, in plain PyTorch too.
    assert train(model, update=lambda opt: torch.compile(opt.step, backend="aot_eager")) == pytest.approx(expected, abs=1e-5)
    follow()
    for mean, param in zip(average, model.parameters(), strict=True):
        assert torch.equal(mean.full_tensor(), 0.5 * param.full_tensor())  # type: ignore[attr-defined]


@on_ranks(1, 2)
@compiling()
def test_compiled_autograd_is_torchs_own_error_and_the_model_trains_on() -> None:
    expected = uncompiled({"units": UNITS})
    model = gpt()
    zhooks.attach(model, policy={"units": UNITS})
    refused = pytest.raises(NotImplementedError, match=r"ShardedTensor.* not supported by FakeTensorMode")
    with refused, compiled_autograd._enable(torch.compile(backend="eager")):
        loss_of(model, 0).backward()
    model.zero_grad()
    assert train(model) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@on_ranks(2)
@compiling()
def test_names_and_checkpoints_are_the_same_whether_the_model_is_compiled_or_not() -> None:
    policy = {"units": UNITS, "rule": [{"match": "blocks.1.attention.*", "optimizer": {"tier": "host"}}]}
    plain, wrapped = gpt(), blocks_wrapped(gpt(), "aot_eager")
    compiled: Any = torch.compile(wrapped, backend="aot_eager")
    attachments = [
        zhooks.attach(plain, policy=policy),
        zhooks.attach(compiled, policy=policy),
    ]
    described = [attachment.describe() for attachment in attachments]
    assert described[0] == described[1]
    assert attachments[1].model is wrapped
    expected = train(plain)
    assert train(wrapped) == pytest.approx(expected, abs=TOLERANCE)
    with folder() as path:
        optimizer = torch.optim.AdamW(plain.parameters())
        attachments[0].save(path / "shards", optimizer)
        attachments[1].load(path / "shards", torch.optim.AdamW(wrapped.parameters()))
        attachments[1].save_full(path / "model.safetensors")
        states = [attachment.state_dict() for attachment in attachments]
        assert states[0].keys() == states[1].keys()
        if place()[0] == 0:
            assert list(states[0]["model"]) == list(states[1]["model"])
            assert all(torch.equal(states[0]["model"][name], value) for name, value in states[1]["model"].items())
        attachments[1].load_state_dict(states[0])
    attachments[1].detach()
    assert not any(isinstance(param, zhooks.ShardedTensor) for param in wrapped.parameters())
    loss_of(wrapped, 0).backward()


@on_ranks(2)
@compiling()
def test_calibrate_sees_inside_blocks_that_are_compiled_already() -> None:
    said = []
    for made in (lambda model, backend: model, blocks_in_place):
        model = gpt()
        attachment = zhooks.attach(model, policy={"units": UNITS})
        made(model, "aot_eager")
        train(model, steps=1)
        with attachment.calibrate() as calibration:
            train(model, steps=1)
        said.append(str(calibration))
    assert said[0] == said[1]


@pytest.mark.slow
@on_ranks(2, named=("recomputed", *slow("activations on host")))
@compiling()
def test_forwards_of_other_lengths_share_a_backward(named: str) -> None:
    found = []
    for made in (lambda model, backend: model, blocks_in_place):
        model = gpt()
        zhooks.attach(model, policy={"units": UNITS, **POLICIES[named]})
        made(model, "aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            inputs, targets = draw_tokens(torch.Generator().manual_seed(step), step, place()[0])
            loss = sum(next_token(model(inputs[:, :length]), targets[:, :length]) for length in (6, 6 - step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert found[1] == pytest.approx(found[0], abs=TOLERANCE)
    # One for the first length, one for any other.
    assert graphs() <= 2


@pytest.mark.slow
@on_ranks(2, named=("recomputed", *slow("stage 0", "activations on host", "bf16")), limit_s=600.0)
@compiling()
def test_code_that_inductor_generates_trains_as_python_does(named: str) -> None:
    policy = {"units": UNITS, **POLICIES[named]}
    expected = uncompiled(policy)
    model = gpt()
    zhooks.attach(model, policy=policy)
    blocks_in_place(model, "inductor")
    # Fused operations round less often: a loss in bf16 may be two units in the last place away, each up to 1/128 of it.
    assert train(model) == pytest.approx(expected, rel=2 / 128 if named == "bf16" else 1e-5)
    assert (graphs(), breaks()) == (1, [])
