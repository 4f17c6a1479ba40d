"""zprof.recording.tracker: every torch storage to the byte, beside the allocator's own records and torch's MemTracker."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity import run
from tests.parity.cells import Cell
from tests.support.ranks import Pool
from tests.support.zoo import ZOO
from tests.support.zprof_ledgers import Both, Ledger, compare, two_layers
from zprof.recording.tracker import Tracker

pytestmark = pytest.mark.usefixtures("alone")


def train_plainly(name: str, steps: int = 2) -> None:
    specimen = ZOO[name]
    model = specimen.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        specimen.loss(model, specimen.batch(step, 0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_attached(name: str) -> Both:
    """One rank's training of a cell."""
    torch.set_num_threads(1)
    return compare(lambda: (run.train(name), None)[1])


def mostly_slow(values: list[Any], kept: Callable[[int], bool]) -> list[Any]:
    marks = [[] if kept(number) else [pytest.mark.slow] for number in range(len(values))]
    return [pytest.param(value, marks=mark, id=str(value)) for value, mark in zip(values, marks, strict=True)]


MODELS = list(ZOO)
ATTACHED = [
    Cell(model=model, stage=stage, optimizer="adamw", precision=precision, tier=tier).name
    for number, model in enumerate(MODELS)
    for stage, precision in ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"))
    for tier in ("device", "host")
]
TWO_RANKS = [Cell(model=model, stage=stage, world=2, optimizer="adamw").name for model in MODELS for stage in (0, 1, 2, 3)]


# ---- to the byte


@pytest.mark.parametrize("name", mostly_slow(MODELS, lambda number: number % 3 == 1))
def test_the_peak_of_plain_training_equals_the_allocators_sum_of_live_storages(name: str) -> None:
    both = compare(lambda: train_plainly(name))
    assert both.equal and not both.lost, both


@pytest.mark.parametrize("name", mostly_slow(ATTACHED, lambda number: number in (0, 10, 20, 30)))
def test_the_peak_under_zhooks_equals_the_allocators_sum_of_live_storages(name: str, ranks1: Pool) -> None:
    (both,) = ranks1.run("tests.zprof.test_alloc:train_attached", name=name)
    assert both.equal and not both.lost, both


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_the_peak_on_two_ranks_equals_the_allocators_sum_of_live_storages(name: str, ranks2: Pool) -> None:
    found = ranks2.run("tests.zprof.test_alloc:train_attached", name=name)
    assert all(both.equal for both in found), found


@pytest.mark.parametrize("name", mostly_slow(MODELS, lambda number: number % 4 == 2))
def test_the_peak_equals_that_of_torchs_mem_tracker(name: str, ranks1: Pool) -> None:
    # On a rank: MemTracker leaves what it saw alive, and the peaks of other tests would count it.
    ((found, expected),) = ranks1.run("tests.zprof.test_alloc:peaks_of_one_step", name=name)
    assert found == expected > 0


def peaks_of_one_step(name: str) -> list[int]:
    gc.collect()
    return [peak_of_one_step(name, watch) for watch in (watch_with_zprof, watch_with_mem_tracker)]


def peak_of_one_step(name: str, watch: Callable[[Callable[[], object], nn.Module, Any, Any], int]) -> int:
    specimen = ZOO[name]
    model = specimen.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = specimen.batch(0, 0, 1)

    def step() -> None:
        specimen.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return watch(step, model, optimizer, batch)


def watch_with_mem_tracker(step: Callable[[], object], model: nn.Module, optimizer: Any, batch: Any) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch)
    with tracker:
        step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def watch_with_zprof(step: Callable[[], object], model: nn.Module, optimizer: Any, batch: Any) -> int:
    marks: list[int] = []
    ledger = Ledger()
    tracker = Tracker(ledger.storages)
    tracker.start()
    marks.append(len(ledger.levels))
    step()
    tracker.close()
    # Other tests' tensors may be alive; MemTracker was shown only these.
    tensors = [*model.parameters(), *model.buffers(), *batch]
    own = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    levels = ledger.levels[marks[0] - 1 :]
    peak: int = max(levels) - levels[0] + sum(own.values())
    return peak


def resized() -> None:
    kept = torch.empty(100)
    kept.untyped_storage().resize_(0)
    kept.untyped_storage().resize_(800)
    kept.resize_(1000)
    empty = torch.empty(0)
    empty.resize_(50)
    torch.empty(7).set_(kept.untyped_storage())
    torch.add(torch.ones(9), 1, out=torch.empty(0))


def foreign() -> None:
    torch.from_numpy(np.zeros(100)) + 1
    torch.frombuffer(bytearray(64), dtype=torch.float32) * 2


def transformed() -> None:
    def total(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin().sum()

    torch.vmap(total, (0, None))(torch.randn(4, 8), torch.randn(8, 8))
    torch.func.grad(total)(torch.randn(8), torch.randn(8, 8))
    torch.func.jacrev(total)(torch.randn(8), torch.randn(8, 8))


def recomputed() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    # Not its generator's states: see Note: [What is counted].
    checkpoint(two_layers(), x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    checkpoint(two_layers(), x, use_reentrant=True, preserve_rng_state=False).sum().backward()


def autocasted() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        two_layers()(torch.randn(4, 8)).float().sum().backward()


def without_grad() -> None:
    with torch.inference_mode():
        two_layers()(torch.randn(4, 8))
    with torch.no_grad():
        two_layers()(torch.randn(4, 8))


def sparse() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2, 2])).sum().backward()
    torch.optim.SparseAdam(embedding.parameters()).step()
    torch.eye(5).to_sparse() @ torch.randn(5, 5)


def twice_differentiated() -> None:
    x = torch.randn(8, requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    grad.sum().backward()


def with_a_closure() -> None:
    model, x = two_layers(), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)


def functional() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    F.relu(torch.randn(4, 8) @ weight).sum().backward()
    optimizer.step()


def in_groups() -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.randn(3, 8)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def copied() -> None:
    model = two_layers()
    model(torch.randn(2, 8)).sum().backward()
    other = copy.deepcopy(model)
    other(torch.randn(2, 8))
    model.half().float().load_state_dict(other.state_dict())


SCRIPTS = [
    resized, foreign, transformed, recomputed, autocasted, without_grad, sparse, twice_differentiated, with_a_closure,
    functional, in_groups, copied,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized", "ignore:Sparse CSR")
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_ledger_equals_the_allocators_sum_when_storages_are(script: Callable[[], None]) -> None:
    both = compare(script)
    assert both.equal and not both.lost, both
