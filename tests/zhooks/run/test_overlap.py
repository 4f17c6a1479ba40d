"""Communication and copies overlap with compute: what the streams of the asynchronous accelerator did, in its own time.

A unit's forward is 24 sines between two matrix products: longer than its gather, its reduction or its copy. The products say
where it begins and ends. Times follow from the accelerator's costs, so they are the same on every machine.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, on_accelerators, place
from tests.support.schedules import native
from tests.support.slow import slow

UNITS, SINES, DIM = 6, 24, 32
CELLS = ("parameter", "gradient", "optimizer")


class Row(NamedTuple):
    """What one stream did at one time."""

    device: int
    stream: int
    name: str
    start_us: float
    end_us: float


class Block(nn.Module):
    def __init__(self, sines: int) -> None:
        super().__init__()
        self.first, self.last, self.sines = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), sines

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.sines):
            x = x.sin()
        return self.last(x)


@contextmanager
def training(sines: int, path: Path, clip: bool = False, **policy: Any) -> Iterator[Callable[[], None]]:
    """A step of training under ``policy``, called three times already: the order of units is known."""
    device = f"accel:{native().current_device()}"
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(sines) for _ in range(UNITS))).to(device)
    units = {"classes": ["Block"], "min_numel": 0}
    attachment = zhooks.attach(net, policy={"units": units, "disk": {"path": str(path)}, **policy})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.ones(4, DIM, device=device, requires_grad=True)

    def step() -> None:
        net(x).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    yield step
    attachment.detach()


def traced(step: Callable[[], None]) -> list[Row]:
    native().set_tracing(True)
    step()
    torch.accelerator.synchronize()
    native().set_tracing(False)
    return [row for row in (Row(*one) for one in native().take_trace()) if row.device == native().current_device()]


@on_accelerators(2, tier=("device", "host"))
def test_gathers_and_copies_of_the_next_unit_begin_before_the_compute_of_this_one_ends(tier: str) -> None:
    placed: dict[str, Any] = {cell: {"tier": tier} for cell in CELLS}
    with folder() as path, training(SINES, path, stage=3, **placed) as step:
        rows = traced(step)
    forward = [row.end_us for row in rows if row.name == "addmm"][1::2]
    # Two products a layer, of the gradients of its weight and of its input.
    backward = [row.end_us for row in rows if row.name == "mm"][3::4]
    assert len(forward) == len(backward) == UNITS
    for name in ("all_gather", "copy h2d") if tier == "host" else ("all_gather",):
        begun = [row.start_us for row in rows if row.name == name]
        ahead, back = [at for at in begun if at < forward[-1]], [at for at in begun if forward[-1] <= at < backward[-1]]
        assert len(ahead) == UNITS
        assert all(following < ends for following, ends in zip(ahead[1:], forward, strict=False)), (name, ahead, forward)
        # The last units of a forward are kept for its backward, which gathers the others.
        kept = UNITS - len(back)
        assert 0 < kept <= 2
        over = backward[kept - 1 :]
        assert all(following < ends for following, ends in zip(back, over, strict=False)), (name, back, over)
    reductions = [row for row in rows if row.name == "reduce_scatter"]
    assert len(reductions) == UNITS
    last = max(row.end_us for row in rows if row.name == "mm")
    assert all(row.end_us < last for row in reductions[:-1])
    compute = next(row.stream for row in rows if row.name == "mm")
    assert all(row.stream != compute for row in reductions)


#: What may rest on a tier at each stage.
PLACED = {0: CELLS, 1: CELLS[2:], 2: CELLS[1:], 3: CELLS}
#: How often the host waits for the accelerator in a step, by tier and clipping, at stage 0 to 3; docs/architecture.md has it.
#: On disk it depends on when requests end: twice what was seen.
HOST_WAITS = {
    ("device", False): (0, 0, 0, 0),
    ("device", True): (0, 0, 0, 0),
    ("host", False): (24, 12, 18, 24),
    ("host", True): (42, 12, 36, 42),
    ("disk", False): (104, 56, 80, 104),
    ("disk", True): (220, 56, 144, 168),
}


#: A tier and a stage; those of a default run, and the others.
HELD_TO = (("device", 3), ("host", 2))
MORE_HELD_TO = tuple((tier, stage) for tier in ("device", "host", "disk") for stage in PLACED if (tier, stage) not in HELD_TO)


@on_accelerators(2, placed=(*HELD_TO, *slow(*MORE_HELD_TO)), clip=(*slow(False), True))
def test_the_host_waits_for_the_accelerator_no_more_often_in_a_step_than_is_written_down(
    placed: tuple[str, int], clip: bool
) -> None:
    tier, stage = placed
    cells = {cell: {"tier": tier} for cell in PLACED[stage]}
    with folder() as path, training(1, path, clip, stage=stage, **cells) as step:
        native().reset_host_waits()
        step()
        found = sum(native().host_waits().values())
        torch.accelerator.synchronize()
    assert found <= HOST_WAITS[tier, clip][stage], found


@on_accelerators(2, clip=(False, True))
def test_a_host_goes_through_a_whole_step_before_another_rank_begins_it(clip: bool) -> None:
    rank, _ = place()
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"a step without waiting {clip}"
    for stage in (1, 3):
        with folder() as path, training(1, path, clip, stage=stage) as step:
            for number in range(2):
                if rank == 1:
                    store.wait([f"{key} {stage} {number}"], timedelta(seconds=60))
                step()
                if rank == 0:
                    store.set(f"{key} {stage} {number}", "")
            torch.accelerator.synchronize()


def _kernels_of_clipping(net: nn.Module) -> Counter[str]:
    """How often each kernel runs while gradients are clipped, but for those of torch's two list operations."""
    native().set_tracing(True)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    torch.accelerator.synchronize()
    native().set_tracing(False)
    rows = [Row(*one) for one in native().take_trace()]
    lists = ("linalg_vector_norm", "mul", "poison")
    return Counter(row.name for row in rows if row.device == native().current_device() and row.name not in lists)


@on_accelerators(2)
def test_clipping_launches_no_kernel_a_parameter_beyond_torchs_own_lists() -> None:
    device = f"accel:{native().current_device()}"
    found = []
    for blocks in (2, 6):
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(blocks))).to(device)
        net = copy.deepcopy(plain)
        attachment = zhooks.attach(net, policy={"stage": 3, "units": {"min_numel": 0}})
        for one in (plain, net):
            one(torch.ones(4, 8, device=device)).square().mean().backward()
        torch.accelerator.synchronize()
        native().take_trace()
        found.append((_kernels_of_clipping(net), _kernels_of_clipping(plain)))
        attachment.detach()
    (few, _), (many, plains) = found
    assert few == many
    assert (many - plains).total() <= 8, many - plains


#: In chunks: the gradients of two units and a half may wait for their reductions.
CHUNKS = {"comm": {"buffer": "1 KiB"}, "schedule": {"max_reductions": 4}}


@on_accelerators(2, policy=({}, CHUNKS), stage=(1, 2))
def test_compute_of_a_backward_waits_for_no_reduction(policy: dict[str, Any], stage: int) -> None:
    with folder() as path, training(SINES, path, stage=stage, **policy) as step:
        rows = traced(step)
    products = [row for row in rows if row.name == "mm"]
    first, last = products[0], products[-1]
    compute = [row for row in rows if row.stream == first.stream and first.start_us <= row.start_us <= last.start_us]
    reductions = [row for row in rows if row.name == "reduce_scatter" and row.start_us < last.start_us]
    # In a buffer of 1 KiB a matrix passes in chunks.
    assert len(reductions) >= (8 * UNITS if policy else UNITS) - 8
    assert all(row.stream != first.stream for row in reductions)
    assert all(after.start_us == before.end_us for before, after in itertools.pairwise(compute))
