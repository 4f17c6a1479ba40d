"""A step predicted on hardware that is not there: bytes that are exact, times that follow from the profile, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.hardware import Hardware
from offload.virtual import ACCELERATOR, Machine
from tests.support.virtual import on_virtual
from zhooks.simulate import Simulation, simulate

WIDTH, BLOCKS, ROWS = 1024, 4, 4096
#: Two matrices a block.
NUMEL = 2 * BLOCKS * WIDTH * WIDTH
PRODUCT = 2 * ROWS * WIDTH * WIDTH


class Net(nn.Sequential):
    def __init__(self) -> None:
        def matrix() -> nn.Module:
            return nn.Linear(WIDTH, WIDTH, bias=False)

        super().__init__(*[nn.Sequential(matrix(), nn.GELU(), matrix(), nn.GELU()) for _ in range(BLOCKS)])


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.empty(ROWS, WIDTH, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def simulated(world: int = 8, change: Callable[[nn.Module, Any], None] = step, **given: Any) -> Simulation:
    policy = {"units": {"names": ["?"]}, "precision": {"param": "bf16"}, **given.pop("policy", {})}
    return simulate(build, change, world=world, policy=policy, **given)


@on_virtual()
def test_flops_are_those_of_the_matrix_products_once_forward_and_twice_backward() -> None:
    # The first layer's input needs no gradient.
    assert simulated().flops == PRODUCT * (3 * 2 * BLOCKS - 1)


@on_virtual(world=(2, 8, 64))
def test_traffic_is_two_gathers_and_a_reduction_of_the_parameters(world: int) -> None:
    found = simulated(world)
    ring = (world - 1) / world
    # Gathers in bf16, reductions in fp32; the last unit's second gather is saved.
    least, most = ring * (3 * NUMEL + 4 * NUMEL), ring * (4 * NUMEL + 4 * NUMEL) * 1.01
    assert least <= found.link_nbytes <= most
    assert (found.network_nbytes > 0) == (world > 8), "nodes of eight"


@on_virtual()
def test_who_follows_hears_the_machine_from_before_the_build_until_after_the_last_step() -> None:
    heard: list[str] = []

    @contextmanager
    def follow(machine: Machine) -> Iterator[None]:
        heard.append("begin" if not machine.held[ACCELERATOR] else "late")
        yield
        heard.append("end" if machine.held[ACCELERATOR] else "late")

    def raises(*given: Any) -> None:
        raise ZeroDivisionError

    simulated(change=lambda *given: (heard.append("step"), step(*given))[1], follow=follow)
    assert heard == ["begin", "step", "step", "end"]
    with pytest.raises(ZeroDivisionError):
        simulated(change=raises, follow=follow)
    assert heard[4:] == ["begin"], "left by the error itself"


@on_virtual()
def test_recomputation_takes_time_and_gives_memory() -> None:
    plain, recomputed = simulated(), simulated(policy={"activation": {"checkpoint": "unit"}})
    assert recomputed.compute_s > plain.compute_s
    assert recomputed.device.nbytes < plain.device.nbytes


@on_virtual()
def test_a_slow_network_shows_as_exposed_communication_and_nothing_else() -> None:
    from offload.hardware import Hardware

    fast = Hardware.of("h100")
    slow = fast.replaced(network={"bandwidth": "10 Gb/s"})
    quick, late = simulated(64, hardware=fast), simulated(64, hardware=slow)
    assert late.exposed_s > 10 * quick.exposed_s and late.step_s > quick.step_s
    assert late.compute_s == pytest.approx(quick.compute_s)


@on_virtual()
def test_states_on_the_host_are_held_there_and_not_on_the_device() -> None:
    host = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
    on_device, on_host = simulated(), simulated(policy=host)
    # Masters, gradients, and two states of AdamW.
    assert on_host.host.nbytes >= 4 * 4 * NUMEL // 8 and on_device.host.nbytes == 0
    assert on_host.step_s > on_device.step_s
    assert list(on_host.host.holders) == ["tiers"]
    assert on_device.device.holders["parameter"] >= 4 * NUMEL // 8
    assert sum(on_device.device.holders.values()) == on_device.device.nbytes


@on_virtual()
def test_it_reports_in_words_and_as_plain_values_and_finds_no_race() -> None:
    found = simulated()
    text, values = str(found), found.as_dict()
    assert "h100 x 8" in text and " per step (predicted, not measured)" in text and "device memory" in text
    assert values["races"] == [] and values["step_s"] == found.step_s > 0
    assert 0 < found.mfu < 1 and found.joules is not None


@on_virtual()
def test_axes_are_taken_in_any_order_and_by_all_names_that_attach_knows() -> None:
    outer, inner = simulated(16, mesh={"dp_replicate": 2, "dp_shard": 8}), simulated(16, mesh={"fsdp": 8, "replicate": 2})
    assert outer.device.holders == inner.device.holders
    # The innermost axis lies within a node.
    assert outer.network_nbytes < inner.network_nbytes, f"{outer.network_nbytes} {inner.network_nbytes}"


@on_virtual()
def test_a_policy_is_chosen_by_what_the_hardware_has_for_a_rank() -> None:
    # Parameters, gradients and states are 16 bytes a number, half of the device is left for activations.
    whole = 16 * NUMEL
    large = Hardware.of("h100").replaced(device={"memory": 4 * whole})
    small = Hardware.of("h100").replaced(device={"memory": whole // 2}, host={"memory": 16 * whole})
    on_device, on_host = (
        simulate(build, step, world=2, policy="auto", hardware=hardware) for hardware in (large, small)
    )
    assert on_device.host.nbytes == 0 and on_host.host.nbytes > 0
    assert on_host.device.nbytes < on_device.device.nbytes


@on_virtual()
def test_replicas_over_a_mesh_hold_more_and_send_less_between_nodes() -> None:
    sharded, replicated = simulated(16), simulated(16, mesh={"replicate": 2, "shard": 8})
    assert replicated.network_nbytes < sharded.network_nbytes
    # An all-reduce over two nodes sends half of what is summed twice: here each of the eight shards of the gradients.
    assert replicated.network_nbytes == pytest.approx(4 * NUMEL, rel=0.01)
    assert replicated.device.nbytes > sharded.device.nbytes


@on_virtual()
def test_what_cannot_be_simulated_is_refused_by_name_and_leaves_nothing_behind() -> None:
    def reads(model: nn.Module, optimizer: Any) -> None:
        loss: Tensor = model(torch.empty(ROWS, WIDTH, device="virtual")).float().mean()
        loss.item()

    with pytest.raises(zhooks.SimulationError, match=r"item\(\) at .*test_simulate.py:\d+ reads values"):
        simulated(change=reads)
    with pytest.raises(zhooks.SimulationError, match=r"'tp' and 'pp' over 8 ranks, found {'replicate': 3, 'shard': 8} over 24"):
        simulated(mesh={"replicate": 3, "shard": 8})
    for mesh in ({"shards": 8}, {"dp": 2, "shard": 4}, {}):
        with pytest.raises(zhooks.SimulationError, match=r"'tp', 'pp', each axis at most once|expected a mesh as sizes"):
            simulated(mesh=mesh)
    with pytest.raises(zhooks.SimulationError, match="expected a mesh without 'ep'"):
        simulated(mesh={"ep": 2, "dp": 4})
    with pytest.raises(zhooks.HardwareError, match="did you mean h100"):
        simulated(hardware="h1oo")
    with pytest.raises(zhooks.BudgetError, match="device"):
        simulated(policy={"budget": {"device": "1MiB"}})
    assert not torch.distributed.is_initialized()
    assert simulated(1).step_s > 0


@on_virtual()
def test_arguments_of_other_kinds_are_refused_by_name() -> None:
    given: Any
    for given in ({"world": True}, {"world": 2.0}, {"steps": "2"}):
        with pytest.raises(zhooks.SimulationError, match="expected at least one step of one rank, found steps = "):
            simulated(**given)
    for given in (8, {"shard": -8, "replicate": -1}, {"shard": 8.0}):
        with pytest.raises(zhooks.SimulationError, match=r"expected a mesh as sizes of axes, such as {'shard': 8}, found "):
            simulated(mesh=given)
    with pytest.raises(zhooks.SimulationError, match=r"expected that build returns a model.*, found NoneType"):
        zhooks.simulate(lambda: None, step)  # type: ignore[arg-type,return-value]
    for given in (3, True, b"backend:native"):
        with pytest.raises(zhooks.PolicyError, match=r"expected allocator to be a string as in PYTORCH_ALLOC_CONF .*, found "):
            simulated(allocator=given)
    with torch.device("meta"), pytest.raises(zhooks.SimulationError, match='CPU as torch\'s default device, found "meta"'):
        simulated()


@on_virtual()
def test_a_step_that_runs_nothing_on_the_device_is_refused_and_not_free() -> None:
    rows = iter([ROWS])

    def until_the_batches_end(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in rows:
            step(model, optimizer)

    with pytest.raises(zhooks.SimulationError, match="found that call 1 of 2 ran nothing on the device"):
        simulated(change=lambda model, optimizer: optimizer.zero_grad())
    with pytest.raises(zhooks.SimulationError, match="found that call 2 of 2 ran nothing on the device"):
        simulated(change=until_the_batches_end)


@on_virtual()
def test_the_same_simulation_twice_is_the_same() -> None:
    one, other = simulated(), simulated()
    assert one.as_dict() == other.as_dict()


@on_virtual()
def test_what_is_more_than_the_hardware_has_is_said_and_the_step_goes_on() -> None:
    plenty = simulated()
    assert plenty.fits and "does not fit" not in str(plenty) and plenty.as_dict()["fits"] is True
    least = plenty.device.nbytes
    small = Hardware.of("h100").replaced(device={"memory": least - (1 << 20)})
    found = simulated(hardware=small)
    assert not found.fits and found.device.nbytes == least and found.device_memory == least - (1 << 20)
    assert "does not fit: 1 MiB more than the" in str(found) and "of the device" in str(found)
    assert simulated(hardware=small.replaced(device={"memory": least})).fits


@on_virtual()
def test_what_python_calls_takes_the_host_s_time_where_the_profile_says_how_long() -> None:
    hardware = Hardware.of("h100")
    without, once, twice = (
        simulated(hardware=hardware.replaced(host={"call": call} if call else {})).host_s for call in (0, 1e-6, 2e-6)
    )
    assert without < once
    assert twice - without == pytest.approx(2 * (once - without), rel=0.01)
