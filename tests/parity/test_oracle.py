"""The oracle and the zoo against first principles: the oracle must be right before anything is held to it.

pytest runs it.
It never needs zhooks; one test trains with torch's DistributedDataParallel on two real ranks.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parity import oracle
from tests.parity.cells import Cell
from tests.parity.closeness import BF16, BF16_REDUCED, EXACT, FP16, REORDERED, differences, tolerance_of
from tests.parity.oracle import CLIP_NORM, OPTIMIZERS, SEED, STEPS, Record, snapshot
from tests.parity.run import gather
from tests.support.ranks import Pool
from tests.support.slow import slow
from tests.support.zoo import ZOO

MODELS = sorted(ZOO)
#: Unlike each other: dense, with tied weights, routed, and of one layer used many times.
FEW = ("mlp", "tied", "mixture", "recursion")
FEW_BY_DEFAULT = [*FEW, *slow(*(name for name in MODELS if name not in FEW))]


@pytest.mark.parametrize("model", MODELS)
def test_at_world_one_the_oracle_is_the_plain_loop(model: str) -> None:
    cell = Cell(model=model, optimizer="adamw")
    plain = ZOO[model].build(SEED)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    record = Record()
    for step in range(STEPS):
        loss = ZOO[model].loss(plain, ZOO[model].batch(step, 0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append([loss.item()])
    record.final = snapshot(plain)
    assert differences(record, oracle.train(cell), EXACT) == []


# Not for batch statistics, and not where the ranks' rows do not join.
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("conv", "mixture", "bag")])
def test_the_gradient_of_the_ranks_is_the_gradient_of_the_joined_batch(model: str) -> None:
    specimen, cell = ZOO[model], Cell(model=model, world=2)
    replicas = oracle.Ranks(net := specimen.build(SEED), cell)
    for rank in range(2):
        replicas.backward(specimen, 0, rank, scale=1.0)
    replicas.reduce()
    plain = specimen.build(SEED)
    joined = tuple(torch.cat(parts) for parts in zip(*(specimen.batch(0, rank, 2) for rank in range(2)), strict=True))
    specimen.loss(plain, joined).backward()
    for p, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_clipping_acts_at_every_step_of_every_model(model: str, world: int) -> None:
    assert min(oracle.train(Cell(model=model, world=world, clip="clipped")).norms) > 1.5 * CLIP_NORM


@pytest.mark.parametrize("model", [name for name in MODELS if name != "conv"])
@pytest.mark.parametrize("precision", ["bf16", "bf16reduce", "fp16"])
def test_the_low_precision_oracle_is_near_the_full_precision_one_but_not_it(model: str, precision: str) -> None:
    cell = Cell(model=model, world=2, precision=precision)
    low, full = oracle.train(cell), oracle.train(replace(cell, precision="fp32"))
    assert differences(low, full, EXACT)
    base = FP16 if precision == "fp16" else BF16
    wide = replace(base, loss=4 * base.loss, drift=8 * base.drift, rounding=20 * base.rounding)
    assert differences(low, full, wide) == []


@pytest.mark.parametrize("fault", ["unclipped", "once"])
@pytest.mark.parametrize("model", MODELS)
def test_the_tolerances_see_a_missing_clip_and_a_missing_micro_step(model: str, fault: str) -> None:
    right = Cell(model=model, world=2, clip="clipped", accumulation="twice")
    wrong = replace(right, clip=fault) if fault == "unclipped" else replace(right, accumulation=fault)
    expected = oracle.train(right)
    found = replace(oracle.train(wrong), losses=expected.losses, norms=expected.norms)
    assert differences(found, expected, BF16)


class Reversed(oracle.Ranks):
    """The same numbers added in another order."""

    def reduce(self) -> None:
        self._grads.reverse()
        super().reduce()


class LostRank(oracle.Ranks):
    """Planted: zeros take the place of one rank's gradients."""

    def reduce(self) -> None:
        self._grads[1] = [None if grad is None else torch.zeros_like(grad) for grad in self._grads[1]]
        super().reduce()


class LostMicroStep(oracle.Ranks):
    """Planted: every other backward's gradients are lost."""

    lost = True

    def reduce(self) -> None:
        self.lost = not self.lost
        if self.lost:
            self._grads = [[None for _ in rank] for rank in self._grads]
        super().reduce()


class WrongWorld(oracle.Ranks):
    """Planted: sums are divided by half the number of ranks."""

    def reduce(self) -> None:
        right, self._cell = self._cell, replace(self._cell, world=self._cell.world // 2)
        super().reduce()
        self._cell = right


def train_as(ranks: type[oracle.Ranks], cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Record:
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "Ranks", ranks)
        return oracle.train.__wrapped__(cell)


def in_four_ranks(model: str, optimizer: str) -> Cell:
    return Cell(model=model, stage=0, world=4, accumulation="twice", optimizer=optimizer, transport="stock")


@pytest.mark.parametrize("model", FEW_BY_DEFAULT)
def test_the_order_in_which_ranks_are_added_moves_no_model_by_more_than_rounding(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = replace(REORDERED, loss=REORDERED.loss / 7, drift=REORDERED.drift / 7, rounding=REORDERED.rounding / 7)
    for optimizer in ("sgd", "adamw", "adagrad"):
        cell = in_four_ranks(model, optimizer)
        assert differences(train_as(Reversed, cell, monkeypatch), oracle.train(cell), tight) == [], optimizer


# AdamW is the hardest to tell: the size of a gradient all but cancels in its step.
@pytest.mark.parametrize("fault", [LostRank, LostMicroStep, WrongWorld])
@pytest.mark.parametrize("model", FEW_BY_DEFAULT)
def test_the_widest_tolerance_of_full_precision_sees_what_is_lost_or_wrongly_averaged(
    model: str, fault: type[oracle.Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    for optimizer in ("adamw", "adagrad"):
        cell = in_four_ranks(model, optimizer)
        assert tolerance_of(cell) == REORDERED
        expected = oracle.train(cell)
        found = replace(train_as(fault, cell, monkeypatch), losses=expected.losses)
        assert differences(found, expected, REORDERED), optimizer


@pytest.mark.parametrize("fault", [LostRank, LostMicroStep, WrongWorld])
@pytest.mark.parametrize("model", FEW)
def test_the_widest_tolerance_of_all_sees_what_is_lost_or_wrongly_averaged(
    model: str, fault: type[oracle.Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(in_four_ranks(model, "sgd"), precision="bf16reduce")
    assert tolerance_of(cell) == BF16_REDUCED
    expected = oracle.train(cell)
    found = replace(train_as(fault, cell, monkeypatch), losses=expected.losses)
    assert differences(found, expected, BF16_REDUCED)


@pytest.mark.parametrize("precision", ["fp32", "bf16reduce"])
def test_no_sync_changes_the_order_of_additions_at_stages_0_and_1_alone(precision: str) -> None:
    for stage in (0, 1, 2, 3):
        quiet = Cell(stage=stage, precision=precision, world=2, accumulation="twicequiet")
        lines = differences(oracle.train(quiet), oracle.train(replace(quiet, accumulation="twice")), EXACT)
        assert bool(lines) == (stage < 2)


def test_a_mixture_trains_experts_on_one_rank_alone_and_leaves_the_others_untouched() -> None:
    specimen, cell = ZOO["mixture"], Cell(model="mixture", world=2)
    model = specimen.build(SEED)
    replicas = oracle.Ranks(model, cell)
    for rank in range(2):
        replicas.backward(specimen, 0, rank, scale=1.0)
    replicas.reduce()
    assert [expert[0].weight.grad is not None for expert in model.experts] == [True, True, False, False]


def test_batch_norm_statistics_are_rank_zeros_own() -> None:
    alone, together = (oracle.train(Cell(model="conv", world=world)).final["0.1.running_mean"] for world in (1, 2))
    assert torch.allclose(alone, together, atol=0.05)
    assert not alone.equal(together), "later steps differ, as the other rank's gradients have come in"


@pytest.mark.parametrize("model", [name for name in MODELS if name != "mixture"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamwfused"])
def test_distributed_data_parallel_agrees_with_the_oracle(model: str, optimizer: str, ranks2: Pool) -> None:
    cell = Cell(model=model, stage=0, world=2, optimizer=optimizer, accumulation="twicequiet", clip="clipped")
    found = gather(ranks2.run("tests.parity.test_oracle:train_by_replicas", name=cell.name))
    assert differences(found, oracle.train(cell), REORDERED) == []


def train_by_replicas(name: str) -> Record:
    """DistributedDataParallel's own training of the cell: the loop of run.py, on replicas."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    cell = Cell.parse(name)
    rank, specimen = dist.get_rank(), ZOO[cell.model]
    model = specimen.build(SEED + rank)
    with warnings.catch_warnings():
        # torch 2.13 wants another spelling, which older releases do not have.
        warnings.simplefilter("ignore", FutureWarning)
        replica = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = OPTIMIZERS[cell.optimizer](model.parameters())
    record = Record(start=_on_rank_zero(model, rank))
    for step in range(STEPS):
        with replica.no_sync():
            record.losses.append([_micro_step(replica, specimen.batch(2 * step, rank, 2), cell)])
        record.losses.append([_micro_step(replica, specimen.batch(2 * step + 1, rank, 2), cell)])
        record.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    record.final = _on_rank_zero(model, rank)
    return record


def _micro_step(model: nn.Module, batch: tuple[Tensor, ...], cell: Cell) -> float:
    loss = ZOO[cell.model].loss(model, batch)
    (loss / cell.micro_steps).backward()
    return loss.item()


def _on_rank_zero(model: nn.Module, rank: int) -> dict[str, Tensor]:
    return snapshot(model) if rank == 0 else {}
