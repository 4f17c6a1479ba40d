"""A script of Accelerate whose ``Accelerator`` is ours: what it trains, saves and loads, held to Accelerate's own.

pytest runs it, on one rank and on two. The oracle is ``accelerate.Accelerator`` in a world of one that sees all batches.
"""

from __future__ import annotations

import copy
import gc
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zhooks
from tests.support.compiling import breaks, compiling, graphs
from tests.support.launched import launched
from tests.support.on_ranks import folder, hooks_left, on_ranks, place
from tests.support.slow import slow
from tests.support.torches import not_with_2_8

accelerate = pytest.importorskip("accelerate")

STEPS = 4


class Script:
    """The loop of Accelerate's own pages; one accumulation step is two batches a rank, so that plain sees twice as many."""

    def __init__(self, accelerator: Any, accumulate: int) -> None:
        torch.manual_seed(0)
        self.accelerator, self.accumulate = accelerator, accumulate
        model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        made = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 12, generator=made), torch.randint(3, (64,), generator=made))
        loader = DataLoader(data, batch_size=2)
        self.model, self.optimizer, self.loader, self.schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def train(self, first: int, stop: int) -> None:
        """The steps from ``first`` up to ``stop``."""
        for number, (samples, classes) in enumerate(self.loader):
            if not first * self.accumulate <= number < stop * self.accumulate:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(samples), classes))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        """The whole parameters.  Collective."""
        model: Any = self.accelerator.unwrap_model(self.model)
        return [p.full_tensor() if isinstance(p, zhooks.ShardedTensor) else p.detach().clone() for p in model.parameters()]


def plain(steps: int, **options: Any) -> list[Tensor]:
    """What Accelerate alone makes of the same batches, in this process."""
    with launched() as (_, world):
        pass
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2 * world, **options)
    script = Script(accelerator, 2 * world)
    # A schedule steps once a rank where Accelerate prepared it.
    script.schedule.scheduler.step = _times(script.schedule.scheduler.step, world)
    script.train(0, steps)
    values = script.values()
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return values


def _times(step: Any, world: int) -> Any:
    def several() -> None:
        for _ in range(world):
            step()

    return several


def ours(policy: dict[str, Any] | None = None, **options: Any) -> Script:
    from zhooks.integrations.accelerate import Accelerator

    return Script(Accelerator(cpu=True, gradient_accumulation_steps=2, zhooks=policy, **options), 2)


POLICIES = (
    {"stage": 3, "units": {"min_numel": 0}},
    {"stage": 2},
    {"stage": 1},
    {"stage": 3, "parameter": {"tier": "host"}, "optimizer": {"tier": "host"}},
)


@on_ranks(1, 2, limit_s=120.0, policy=POLICIES)
def test_a_script_trains_what_it_trains_under_accelerate_alone(policy: dict[str, Any]) -> None:
    expected = plain(STEPS)
    with launched():
        script = ours(policy)
        script.train(0, STEPS)
        for value, other in zip(script.values(), expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@not_with_2_8("what accelerate compiles runs uncompiled when attached")
@on_ranks(2, limit_s=120.0, regional=(False, *slow(True)))
@compiling()
def test_a_script_that_asks_for_compilation_trains_the_same_by_compiled_blocks(regional: bool) -> None:
    expected = plain(STEPS)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    with launched():
        script = ours({"units": {"min_numel": 0}}, dynamo_plugin=plugin)
        script.train(0, STEPS)
        assert graphs() > 0
        assert breaks() == []
        for value, other in zip(script.values(), expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@on_ranks(1, 2, limit_s=120.0)
def test_autocast_that_accelerate_was_asked_for_is_around_the_attached_model() -> None:
    expected = plain(STEPS, mixed_precision="bf16")
    without = plain(STEPS)
    with launched():
        script = ours(mixed_precision="bf16")
        script.train(0, STEPS)
        for value, other in zip(script.values(), expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4)
        assert any(not torch.equal(value, other) for value, other in zip(script.values(), without, strict=True))


@on_ranks(1, 2, limit_s=120.0)
def test_a_saved_state_goes_on_as_if_nothing_had_been_between() -> None:
    with launched(), folder() as path:
        script = ours()
        script.train(0, 2)
        script.accelerator.save_state(str(path / "state"))
        rate = script.schedule.get_last_lr()
        script.train(2, 4)
        through = script.values()
        script.accelerator.load_state(str(path / "state"))
        assert script.schedule.get_last_lr() == rate
        script.train(2, 4)
        for value, other in zip(script.values(), through, strict=True):
            assert torch.equal(value, other)


@on_ranks(2, limit_s=120.0)
def test_a_folder_without_shards_is_refused_on_every_rank_before_anything_is_loaded() -> None:
    with launched(), folder() as path:
        script = ours()
        script.train(0, 1)
        before = script.values(), script.schedule.get_last_lr()
        with pytest.raises(zhooks.CheckpointError, match=r"a checkpoint that attachment\.save\(\) wrote, found nothing there"):
            script.accelerator.load_state(str(path))
        assert all(torch.equal(*pair) for pair in zip(script.values(), before[0], strict=True))
        assert script.schedule.get_last_lr() == before[1]


@on_ranks(1, 2, limit_s=120.0)
def test_the_model_is_saved_whole_by_rank_0() -> None:
    with launched() as (rank, _), folder() as path:
        script = ours()
        script.train(0, 1)
        state = script.accelerator.get_state_dict(script.model)
        assert bool(state) == (rank == 0)
        script.accelerator.save_model(script.model, str(path / "model"))
        script.accelerator.wait_for_everyone()
        values = script.values()
        saved = load_file(path / "model" / "model.safetensors")
        assert len(saved) == len(values)
        for name, value in zip(dict(script.model.named_parameters()), values, strict=True):
            assert torch.equal(saved[name], value)
            assert rank or torch.equal(state[name], value)


@on_ranks(2, limit_s=120.0)
def test_hooks_on_saving_are_given_the_models_and_on_rank_0_whole_weights() -> None:
    with launched() as (rank, _), folder() as path:
        script = ours()
        seen: list[Any] = []

        def hook(models: list[nn.Module], weights: list[dict[str, Tensor]], where: str) -> None:
            seen.append((models, [sum(value.numel() for value in each.values()) for each in weights]))
            weights.clear()

        script.accelerator.register_save_state_pre_hook(hook)
        script.accelerator.register_load_state_pre_hook(lambda models, where: models.clear())
        script.train(0, 1)
        before = script.values()
        script.accelerator.save_state(str(path / "state"))
        whole = sum(value.numel() for value in before)
        assert seen == [([script.model], [whole if rank == 0 else 0])]
        script.train(1, 2)
        script.accelerator.load_state(str(path / "state"))
        assert all(torch.equal(*pair) for pair in zip(script.values(), before, strict=True))


@on_ranks(2, limit_s=120.0)
def test_hooks_that_leave_the_models_to_accelerate_change_nothing_of_what_is_saved() -> None:
    with launched(), folder() as path:
        script = ours()
        script.accelerator.register_save_state_pre_hook(lambda models, weights, where: None)
        script.accelerator.register_load_state_pre_hook(lambda models, where: None)
        script.train(0, 1)
        before = script.values()
        script.accelerator.save_state(str(path / "state"))
        script.train(1, 2)
        script.accelerator.load_state(str(path / "state"))
        assert all(torch.equal(*pair) for pair in zip(script.values(), before, strict=True))


@on_ranks(1)
def test_an_optimizer_that_has_stepped_goes_with_the_model_it_holds() -> None:
    from zhooks.integrations.accelerate import Accelerator

    with launched():
        models = [nn.Linear(3, 2), nn.Linear(2, 3)]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, model.in_features)).sum().backward()
            optimizer.step()
        prepared = Accelerator(cpu=True).prepare(*models, *optimizers)
        for optimizer in prepared[2:]:
            states = [state["exp_avg"] for state in optimizer.state.values()]
            assert len(states) == 2 and all(isinstance(state, zhooks.ShardedTensor) for state in states)


@on_ranks(1, 2)
def test_preparing_again_and_copies_and_detach_leave_one_attachment_and_no_trace() -> None:
    with launched():
        script = ours()
        accelerator, model = script.accelerator, script.model
        assert accelerator.prepare(model) is model and len(accelerator.attachments) == 1
        script.train(0, 1)
        average = copy.deepcopy(model)
        with average.no_sync():
            average(torch.randn(2, 12))
        assert accelerator.detach(model) is model
        assert not hooks_left(model) and not accelerator.attachments
        for module in model.modules():
            assert not {"no_sync", "_is_fsdp_managed_module", "_is_accelerate_prepared"} & vars(module).keys()


@on_ranks(1, 2)
def test_a_model_that_memory_is_freed_of_is_kept_by_nobody() -> None:
    with launched():
        script = ours()
        script.train(0, 1)
        gone = weakref.ref(script.model)
        accelerator = script.accelerator
        script.model, script.optimizer = accelerator.free_memory(script.model, script.optimizer)
        del script.schedule, script.loader
        gc.collect()
        assert gone() is None


def test_what_contradicts_the_policy_is_refused_and_both_are_named() -> None:
    from zhooks.integrations.accelerate import Accelerator

    with launched(), pytest.raises(zhooks.PolicyError, match=r'\[precision\] param = "fp16" .* mixed_precision = "bf16"'):
        Accelerator(cpu=True, mixed_precision="bf16", zhooks={"precision": {"param": "fp16"}})


def test_a_library_that_is_missing_or_too_old_is_named_with_the_command_that_installs_it() -> None:
    from zhooks.integrations.required import require

    with pytest.raises(zhooks.CapabilityError, match=r"not-there >= 1\.2, found none\. Run `pip install 'zhooks\[x\]'` "):
        require("x", "not-there", (1, 2))
    with pytest.raises(zhooks.CapabilityError, match=r"needs pytest >= 999\.0, found \d"):
        require("x", "pytest", (999, 0))


def test_the_policy_is_read_from_a_file(tmp_path: Path) -> None:
    from zhooks.integrations.accelerate import Accelerator

    (tmp_path / "policy.toml").write_text("stage = 2\n")
    with launched():
        assert Accelerator(cpu=True, zhooks=tmp_path / "policy.toml").policy.stage == 2


@on_ranks(1, 2, limit_s=180.0)
def test_a_signal_on_one_rank_alone_ends_the_script_on_all_after_the_step_in_a_state_that_goes_on() -> None:
    with folder() as path, launched() as (_, world):
        through = ours({"stage": 3})
        through.train(0, STEPS)
        expected = through.values()
        script = ours({"stage": 3})
        attachment = script.accelerator.attachment(script.model)
        attachment.catch_preemption()
        for step in range(STEPS):
            if step == 1 and place()[0] == world - 1:
                signal.raise_signal(signal.SIGTERM)
            script.train(step, step + 1)
            if attachment.preempted:
                script.accelerator.save_state(str(path))
                break
        assert step == 1
        attachment.detach()
        again = ours({"stage": 3})
        again.accelerator.load_state(str(path))
        again.train(step + 1, STEPS)
        assert all(torch.equal(value, other) for value, other in zip(again.values(), expected, strict=True))
