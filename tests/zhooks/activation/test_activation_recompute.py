"""Units that are recomputed: which ones, how often, beside every other kind of checkpoint, and what stays in memory.

pytest runs it.  It never asks for other tiers in general: tests/zhooks/activation/test_activation.py trains under all of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zhooks
from offload.errors import CapabilityError
from tests.support.activation_nets import Block, Net, built, step_of
from tests.support.inside import runtime_of
from tests.support.paths import ROOT
from tests.support.values import same
from zhooks.activation import recompute

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "activation": {"checkpoint": "unit"}}
HOST: dict[str, Any] = {"units": {"min_numel": 0}, "activation": {"checkpoint": "unit", "tier": "host", "min_bytes": 0}}
BOTH = pytest.mark.parametrize("policy", [POLICY, HOST], ids=["device", "host"])


class Runs:
    """How often something ran: no attribute of a module, which a second forward finds as the first did."""

    runs = 0


class Counting(Block):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Runs()

    @property
    def runs(self) -> int:
        return self.counted.runs

    @runs.setter
    def runs(self, number: int) -> None:
        self.counted.runs = number

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
        self.runs += 1
        return super().forward(x, scale, shift=shift)


class Around(Net):
    """Calls its blocks by ``call``."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], block: Callable[[], nn.Module] = Counting) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.leave(x)


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=True)
    return out


class Within(Counting):
    """Checkpoints a part of itself."""

    reentrant = False

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
        self.runs += 1
        part = checkpoint(lambda given: self.drop(F.gelu(self.enter(given))), x, use_reentrant=self.reentrant)
        return x + self.leave(part)


class WithinReentrant(Within):
    reentrant = True


def pair(call: Callable[[nn.Module, Tensor], Tensor], policy: dict[str, Any], block: Any = Counting, stage: int = 3) -> Any:
    """The plain model, the same one attached, and the attachment."""
    torch.manual_seed(1)
    plain = Around(call, block)
    torch.manual_seed(1)
    model = Around(call, block)
    return plain, model, zhooks.attach(model, policy=policy | {"stage": stage})


def runs(model: Any) -> list[int]:
    return [block.runs for block in model.blocks]


@BOTH
def test_every_block_runs_twice_a_step_and_once_where_nothing_is_differentiated(policy: dict[str, Any]) -> None:
    plain, model, attachment = pair(plainly, policy)
    assert same(step_of(model, 0), step_of(plain, 0))
    assert runs(model) == [2, 2, 2]
    with torch.no_grad():
        model(torch.randn(5, 6))
    assert runs(model) == [3, 3, 3]
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values())) is False  # one evaluation more
    step_of(model, 1)
    assert runs(model) == [4, 4, 4]


@BOTH
@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("call", [checkpointed, reentrant])
def test_a_users_checkpoint_around_a_block_is_left_to_itself(call: Any, policy: dict[str, Any], stage: int) -> None:
    plain, model, attachment = pair(call, policy, stage=stage, block=Still)
    for number in range(2):
        assert same(step_of(model, number), step_of(plain, number))
    expected = runs(plain) if call is checkpointed else [3 * 2] * 3
    assert runs(model) == expected
    attachment.detach()


class Still(Counting):
    """Without running statistics, which torch's own checkpoint would move twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)  # type: ignore[assignment]


@BOTH
@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("block", [Within, WithinReentrant])
def test_a_block_may_checkpoint_a_part_of_itself(block: Any, policy: dict[str, Any], stage: int) -> None:
    plain, model, attachment = pair(plainly, policy, block, stage)
    for number in range(2):
        assert same(step_of(model, number), step_of(plain, number))
    attachment.detach()


@BOTH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_whole_model_may_be_checkpointed(use_reentrant: bool, policy: dict[str, Any]) -> None:
    plain, model, attachment = pair(plainly, policy, Still)

    def step(net: nn.Module, number: int) -> list[Tensor]:
        torch.manual_seed(number)
        x = torch.randn(5, 6, requires_grad=True)
        loss = checkpoint(net, x, use_reentrant=use_reentrant).square().mean()
        loss.backward()
        notes = [loss.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
        return notes

    for number in range(2):
        assert same(step(model, number), step(plain, number))
    attachment.detach()


@BOTH
def test_autocast_is_the_same_in_the_second_forward(policy: dict[str, Any]) -> None:
    plain, model, attachment = pair(plainly, policy, Still)
    for net in (plain, model):
        torch.manual_seed(4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(5, 6)).float().square().mean()
        loss.backward()
    grads = [[p.grad.clone() for p in net.parameters()] for net in (plain, model)]
    assert same(*grads)
    attachment.detach()


@BOTH
def test_a_shared_block_and_one_that_calls_itself_are_recomputed_call_by_call(policy: dict[str, Any]) -> None:
    class Recursive(Counting):
        depth = 0

        def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
            if self.depth < 2:
                self.depth += 1
                try:
                    x = self(x)
                finally:
                    self.depth -= 1
            return super().forward(x)

    def twice(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(block(x))
        return out

    plain, model, attachment = pair(twice, policy, Recursive)
    for number in range(2):
        assert same(step_of(model, number), step_of(plain, number))
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


@BOTH
def test_spectral_norm_moves_its_vectors_once(policy: dict[str, Any]) -> None:
    class Normed(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.utils.spectral_norm(self.enter)

    plain, model, attachment = pair(plainly, policy, Normed)
    for number in range(3):
        assert same(step_of(model, number), step_of(plain, number))
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))
    # The last weight is an attribute with a graph that leads back to the model: a cycle no collector sees.
    del model.enter.weight


def test_a_large_constant_buffer_is_not_copied_after_the_first_forward() -> None:
    class Masked(Counting):
        mask: Tensor
        bank: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(200, 200))
            self.register_buffer("bank", torch.zeros(200, 200))

        def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
            self.bank.add_(1)
            return super().forward(x) * self.mask[0, 0] + self.bank[0, 0]

    plain, model, attachment = pair(plainly, POLICY, Masked)
    for number in range(3):
        assert same(step_of(model, number), step_of(plain, number))
    modules = runtime_of(attachment).saved.recompute._modules.values()
    kept = {name for _, _, buffers, _ in modules for _, name in buffers._constant}
    assert kept == {"mask"}
    attachment.detach()
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_a_parameter_written_before_backward_is_plain_pytorchs_error() -> None:
    _, model, attachment = pair(plainly, POLICY)
    loss = model(torch.randn(5, 6)).sum()
    with torch.no_grad():
        model.blocks[1].enter.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    attachment.detach()


def sequentials() -> nn.Sequential:
    """Blocks without a class of their own, whose layers are units."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2)))


@pytest.mark.parametrize("build", [lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), sequentials])
def test_single_layers_are_not_run_twice_and_a_warning_says_that_this_saves_nothing(build: Callable[[], nn.Module]) -> None:
    with pytest.warns(UserWarning, match=r"found none in the Sequential.*Nothing is recomputed.*\[units\] names"):
        attachment = zhooks.attach(build(), policy=POLICY)
    assert runtime_of(attachment).saved.recompute is None
    attachment.detach()


def test_blocks_named_by_the_policy_are_recomputed_without_a_warning() -> None:
    attachment = zhooks.attach(sequentials(), policy={**POLICY, "units": {"min_numel": 0, "names": ["0", "1"]}})
    assert runtime_of(attachment).saved.recompute is not None
    attachment.detach()


def test_a_policy_applied_later_that_recomputes_nothing_warns_as_well() -> None:
    attachment = zhooks.attach(sequentials(), policy={"units": {"min_numel": 0}})
    with pytest.warns(UserWarning, match="Nothing is recomputed"):
        attachment.apply({"units": {"min_numel": 0}, "activation": {"checkpoint": "unit"}})
    attachment.detach()


def test_lower_precision_gives_the_second_forward_what_the_first_was_given() -> None:
    class Doubled(Still):
        def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
            self.runs += 1
            assert scale is not None
            assert scale.dtype == torch.float32, "an input of the block was cast"
            return x + self.leave(F.gelu(self.enter(x)) * scale.to(x.dtype))

    def scaled(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(x, torch.full((1,), 1.5))
        return out

    def users(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, torch.full((1,), 1.5), use_reentrant=False)
        return out

    for call in (scaled, users):
        _, model, attachment = pair(call, POLICY | {"precision": {"param": "bf16"}}, Doubled)
        step_of(model, 0)
        assert runs(model) == [2, 2, 2]
        attachment.detach()


def test_an_interrupt_in_mid_forward_leaves_no_hooks() -> None:
    plain, model = built(), built()
    attachment = zhooks.attach(model, policy=POLICY)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for net in (plain, model):
        handle = net.blocks[1].norm.register_forward_hook(interrupt)
        torch.manual_seed(5)
        with pytest.raises(KeyboardInterrupt):
            net(torch.randn(5, 6))
        handle.remove()
    assert same(step_of(model, 0), step_of(plain, 0))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    attachment.detach()


def test_a_torch_whose_checkpoint_is_called_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", lambda fn, *args: iter(()))
    model = built()
    with pytest.raises(CapabilityError, match=r"torch\.utils\.checkpoint in the model"):
        zhooks.attach(model, policy=POLICY)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_transformers_own_gradient_checkpointing_is_left_to_itself() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    for enabled in (False, True):
        torch.manual_seed(0)
        plain = transformers.GPT2LMHeadModel(config)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        for net in (plain, model):
            net.train()
            if enabled:
                # Renamed in transformers 5.
                getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)()
        attachment = zhooks.attach(model, policy=HOST)
        tokens = torch.arange(12).view(1, 12)
        notes = []
        for net in (plain, model):
            torch.manual_seed(3)
            loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
            notes.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
        assert same(*notes)
        attachment.detach()


MEMORY = """
import sys, torch, zhooks
from tests.support.inside import runtime_of
from torch import nn
sys.path.insert(0, "benchmarks")
from measure import restart_peak, rss_nbytes

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.GELU())
        self.layers = nn.Sequential(*layers)
    def forward(self, x):
        return x + self.layers(x)

torch.set_num_threads(1)
model = nn.Sequential(*(Block() for _ in range(8)))
activation = {activation}
policy = {{"units": {{"classes": ["Block"]}}, "activation": activation, "disk": {{"path": sys.argv[1]}}}}
attachment = zhooks.attach(model, policy=policy)
x = torch.randn(1 << 14, 64)
model(x[:64]).sum().backward()
restart_peak()
before = rss_nbytes()
loss = model(x).sum()
stash = runtime_of(attachment).saved.stash
if stash is not None:
    stash.flush()
restart_peak()
sys.stdout.write(str(rss_nbytes() - before))
loss.backward()
attachment.detach()
"""
#: Bytes of one activation of the model above, and how many of them plain autograd keeps: 8 a block of 8.
ONE = (1 << 14) * 64 * 4


def grown(activation: dict[str, Any], folder: Path) -> float:
    """How many activations a forward leaves in memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(activation=activation), str(folder)],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / ONE


@pytest.mark.slow
def test_disk_and_recomputation_bound_what_a_forward_leaves_in_memory(tmp_path: Path) -> None:
    plain = grown({}, tmp_path)
    assert plain > 7 * 8
    # The slabs of staging stay.
    assert grown({"tier": "disk", "min_bytes": 1 << 20}, tmp_path) < plain / 3
    assert grown({"checkpoint": "unit"}, tmp_path) < 8 + 8
    assert grown({"checkpoint": "unit", "tier": "disk", "min_bytes": 1 << 20}, tmp_path) < 8 + 8


class Encoder(Net):
    """Has a method beside its forward that calls blocks."""

    def encode(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


#: Each is given rows of 8.
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "method": lambda model, x: model.encode(x[:, :6]),
    "block": lambda model, x: model.blocks[0](x),
    "twice": lambda model, x: model.blocks[0](model.blocks[0](x)),
    "and the model": lambda model, x: model(x[:, :6]) + model.encode(x[:, :6]).sum(),
}
ON_HOST: dict[str, Any] = {"tier": "host"}
PLACED: tuple[dict[str, Any], ...] = (
    *({"stage": stage} for stage in range(4)),
    {"stage": 3, "parameter": ON_HOST, "gradient": ON_HOST, "optimizer": ON_HOST},
    {"stage": 3, "parameter": {"tier": "disk"}},
)


@pytest.mark.parametrize("call", CALLS)
def test_units_that_are_called_without_the_models_forward_are_recomputed_on_every_tier(call: str) -> None:
    for placed in PLACED:
        for activation in (POLICY, HOST):
            torch.manual_seed(0)
            model, plain = Encoder(), Encoder()
            plain.load_state_dict(model.state_dict())
            x = torch.randn(5, 8)
            attachment = zhooks.attach(model, policy=activation | placed)
            for _ in range(2):
                for each in (model, plain):
                    torch.manual_seed(1)
                    CALLS[call](each, x).square().mean().backward()
            attachment.detach()
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert (found.grad is None) == (expected.grad is None)
                if found.grad is not None and expected.grad is not None:
                    assert torch.equal(found.grad, expected.grad)


class Remembers(nn.Module):
    """Its output depends on what earlier calls left: ``how`` says in which kind of attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.out = how, nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
        self.state: Any = None
        self.seen: list[Tensor] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        made, state = self.inner(x[:, None], self.state if self.how == "state" else None)
        self.state = tuple(each.detach() for each in state)
        self.seen.append(x.detach())
        self.loss = x.square().mean()
        if self.how == "list":
            x = x + sum(self.seen)
        out: Tensor = self.out(made[:, 0] + x * (self.count if self.how == "count" else 1))
        return out


class Writes(Remembers):
    def __init__(self) -> None:
        super().__init__("")
        self.total = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().mean(0))
        return super().forward(x + self.total)


@pytest.mark.parametrize("how", ["state", "list", "count", ""])
def test_what_a_forward_changes_on_its_module_is_as_it_was_in_the_second_forward(how: str) -> None:
    for stage in (0, 3):
        nets: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(nn.Sequential(Remembers(how), Remembers(how)))
        model, plain = nets
        attachment = zhooks.attach(model, policy=POLICY | {"stage": stage, "units": {"classes": ["Remembers"]}})
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            for each in nets:
                each(x).square().mean().backward()
        assert [each.count for each in model] == [each.count for each in plain] == [3, 3]
        attachment.detach()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)


def test_a_forward_that_writes_a_tensor_of_its_module_in_place_is_refused() -> None:
    model = nn.Sequential(Writes(), Writes())
    attachment = zhooks.attach(model, policy=POLICY | {"units": {"classes": ["Writes"]}})
    with pytest.raises(zhooks.ShardedOpError, match=r"Unit 0.*wrote the tensor total of a module in place"):
        model(torch.ones(4, 8))
    attachment.detach()
    model(torch.ones(4, 8)).sum().backward()


def test_a_second_forward_finds_the_random_numbers_of_a_device_that_torchs_checkpoint_does_not_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A generator of its own stands for the device's."""
    generator = torch.Generator()

    class Dropping(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
            return super().forward(x, scale, shift=shift) * torch.rand(x.shape, generator=generator)

    def gradients(policy: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        generator.manual_seed(1)
        model = nn.Sequential(Dropping(), Dropping())
        attachment = zhooks.attach(model, policy=policy)
        x = torch.randn(3, 8, requires_grad=True)
        model(x).square().sum().backward()
        found = [param.grad.full_tensor() for param in model.parameters()]
        attachment.detach()
        return [*found, torch.rand(2, generator=generator)]

    monkeypatch.setattr(recompute, "checkpoint_keeps_generator", lambda device, given: False)
    monkeypatch.setattr(recompute, "random_state", lambda device: generator.get_state())
    monkeypatch.setattr(recompute, "set_random_state", lambda device, state: generator.set_state(state))
    policy = {"units": {"classes": ["Dropping"], "min_numel": 0}}
    wanted = gradients(policy)
    again = gradients({**policy, "activation": {"checkpoint": "unit"}})
    assert all(map(torch.equal, wanted, again))
