"""The policy that is found: it fits, it is what ``simulate`` says of it; where nothing fits the least that would is named."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.hardware import Hardware
from offload.policy import Policy
from offload.text import as_duration, as_size, parse_size
from offload.tier import Tier
from tests.support.slow import slow
from tests.support.virtual import on_virtual
from zhooks import AttachError, BudgetError, SimulationError
from zhooks.simulate import Proposals, find_policy, simulate

WIDTH, BLOCKS, ROWS = 512, 3, 2048
BF16 = {"precision": {"param": "bf16"}, "units": {"names": ["?"]}}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    )
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.empty(ROWS, WIDTH, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def divided(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batch: int = 32, accumulation: int = 1) -> None:
    for _ in range(accumulation):
        model(torch.empty(micro_batch * ROWS // 32, WIDTH, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def found(change: Any = step, **given: Any) -> Proposals:
    return find_policy(build, change, **{"world": 8, "policy": BF16, "most": 8, **given})


@cache
def free_of_bounds() -> Proposals:
    """Several tests look at the same."""
    return found()


@on_virtual()
def test_each_policy_found_is_what_a_simulation_says_of_it() -> None:
    proposals = free_of_bounds()
    assert len(proposals.best) == 5
    first = proposals.best[0]
    again = simulate(build, step, world=8, policy=first.policy)
    assert again.step_s == pytest.approx(first.simulation.step_s, rel=1e-9)
    assert again.device.nbytes == pytest.approx(first.memory.device, rel=0.2)
    busy = sum(first.busy.get(each, 0.0) for each in ("compute", "update"))
    assert busy == pytest.approx(again.compute_s)


@on_virtual()
def test_the_policy_is_written_with_its_reasons_and_loads_back() -> None:
    proposals = found(device=80 << 20)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.toml"
        path.write_text(proposals.policy_text())
        loaded = Policy.load(path)
        assert loaded == proposals.best[0].policy
        text = path.read_text()
    assert re.search(r"^# does not fit: [^:]*: needs [^:]*device [^:]* of 80 MiB", text, re.MULTILINE)
    assert simulate(build, step, world=8, policy=loaded).device.nbytes <= 80 << 20


@on_virtual(share=(0.7, *slow(0.9)))
def test_less_memory_of_the_device_moves_states_away_or_recomputes(share: float) -> None:
    free = free_of_bounds().best[0]
    bound = int(free.memory.device * share)
    tight = found(device=bound)
    assert all(each.memory.device <= bound for each in tight.best)
    assert tight.best[0].simulation.step_s >= free.simulation.step_s * 0.995
    assert tight.best[0].policy != free.policy


@pytest.mark.slow
@on_virtual()
def test_where_nothing_fits_the_least_memory_that_would_is_named_by_tier() -> None:
    with pytest.raises(BudgetError) as raised:
        found(device=1 << 20)
    said = str(raised.value)
    least = re.findall(r"needs (?:at least )?([\d.]+ \w+) on the device", said)
    assert len(least) == 3, "the least with each further tier"
    # The least that it names with the host does.
    at_least = parse_size(least[1])
    assert found(device=int(at_least * 1.01)).best[0].memory.device <= at_least * 1.01


@on_virtual()
def test_tiers_that_are_not_there_are_not_used() -> None:
    proposals = found(host=0, disk=0, device=80 << 20)
    assert all(each.memory.host == each.memory.disk == 0 for each in proposals.best)


@on_virtual()
def test_a_step_that_lets_its_batch_be_divided_is_divided_where_activations_do_not_fit() -> None:
    whole = found(divided)
    assert whole.best[0].candidate.batch is not None and whole.best[0].candidate.batch.micro_batch == 32
    tight = found(divided, device=60 << 20, host=0, disk=0)
    batch = tight.best[0].candidate.batch
    assert batch is not None and batch.micro_batch * batch.accumulation == 32 and batch.micro_batch < 32
    assert f"micro_batch = {batch.micro_batch}" in tight.policy_text()


@pytest.mark.slow
@on_virtual()
def test_where_nothing_fits_a_step_of_many_samples_is_simulated_by_its_first_micro_batches() -> None:
    called: list[int] = []

    def many(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batch: int = 1 << 15, accumulation: int = 1) -> None:
        called.append(accumulation)
        divided(model, optimizer, micro_batch=micro_batch, accumulation=accumulation)

    with pytest.raises(BudgetError, match=r"micro-batch 512 x 64\)"):
        found(many, device=1 << 20, most=2)
    assert max(called) <= 8


@on_virtual()
def test_what_a_few_micro_batches_hold_is_what_many_do() -> None:
    def held(times: int, **policy: Any) -> int:
        change = lambda *made: divided(*made, micro_batch=1, accumulation=times)  # noqa: E731
        return simulate(build, change, world=8, policy={**BF16, **policy}, check_races=False).device.nbytes

    away = {"gradient": {"tier": "host"}, "optimizer": {"tier": "host"}}
    for policy in ({"stage": 2}, {"stage": 3, "activation": {"checkpoint": "unit"}}, {"stage": 3, **away}):
        assert held(2, **policy) == held(5, **policy)


@on_virtual()
def test_a_batch_that_can_be_divided_needs_defaults_that_say_how_large_it_is() -> None:
    with pytest.raises(SimulationError, match=r"expected defaults of at least 1"):
        found(lambda model, optimizer, micro_batch=0, accumulation=1: None)


@on_virtual()
def test_several_nodes_may_hold_replicas_of_shards() -> None:
    slow = Hardware.of("h100").replaced(network={"latency": "2 ms", "short_latency": "2 ms"})
    proposals = found(world=32, hardware=slow, keep=1, most=6)
    best = proposals.best[0]
    assert best.mesh == {"replicate": 4, "shard": 8} and "Attach over a mesh" in proposals.policy_text()
    again = simulate(build, step, world=32, hardware=slow, mesh=best.mesh, policy=best.policy)
    assert again.step_s == pytest.approx(best.simulation.step_s, rel=1e-9)


@on_virtual()
def test_the_text_says_memory_a_tier_what_takes_longest_and_what_the_links_must_carry() -> None:
    proposals = free_of_bounds()
    said, first = str(proposals), proposals.best[0]
    assert as_duration(first.simulation.step_s * 1e9, digits=4) in said and as_size(first.memory.on(Tier.DEVICE)) in said
    assert re.search(rf" {first.binds}$", said, re.MULTILINE) and "longest: what a step spends the most time on" in said
    assert all(len(line) <= 100 for line in [*said.splitlines(), *proposals.policy_text().splitlines()])
    assert re.search(r"gathers, over links: .* FLOP per byte; needs .* GB/s, has .* GB/s", re.sub(r"\s+", " ", said))
    needs = first.bandwidths()["gather"]
    assert needs.needed == pytest.approx(needs.nbytes / first.busy["compute"])
    told = proposals.as_dict()
    assert len(told["best"]) == 5 and Policy.of(told["best"][0]["policy"]) == first.policy


@on_virtual(tier=("device", "disk"), nbytes=(-1, 1 << 60))
def test_memory_that_the_hardware_has_not_is_refused(tier: str, nbytes: int) -> None:
    with pytest.raises(SimulationError, match=rf"expected {tier} from 0 to the .* that h100 has, found"):
        found(**{tier: nbytes})


@on_virtual()
def test_a_build_that_returns_no_module_is_refused() -> None:
    with pytest.raises(AttachError, match=r"expected a torch\.nn\.Module, found int"):
        find_policy(lambda: 3, step)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
@on_virtual()
def test_memory_that_is_left_holds_a_share_of_the_states_of_the_quickest() -> None:
    def wide() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)])
        return model, torch.optim.AdamW(model.parameters())

    def small(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.empty(64, 2048, device="virtual")).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # Masters and states are 384 MiB, of which the device has no room for all.
    proposals = find_policy(wide, small, policy=BF16, device=360 << 20, disk=0)
    best = proposals.best[0]
    assert best.candidate.device_share > 0 and best.memory.device <= 360 << 20
    alike = next(each.seconds for each in proposals.ranking.fits if not each.candidate.device_share)
    assert best.simulation.step_s < alike
    assert Policy.of(best.policy).optimizer.device_share == best.candidate.device_share
    assert simulate(wide, small, policy=best.policy).step_s == pytest.approx(best.simulation.step_s, rel=1e-9)


@on_virtual()
def test_a_share_that_the_policy_keeps_counts_where_states_are_off_the_device_alone() -> None:
    keeps = {**BF16, "optimizer": {"tier": "host", "device_share": 0.3}}
    proposals = found(policy=keeps, most=2)
    assert [each.policy.optimizer.device_share for each in proposals.best] == [
        0.0 if each.policy.optimizer.tier == "device" else 0.3 for each in proposals.best
    ]
