"""What a rank holds at the end of backward: the report against the table's formula, and against every storage there is.

pytest runs it, on one, two and four ranks. Of the operating system it asks only what is resident.
"""

from __future__ import annotations

import gc
import re
import resource
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import zhooks
from offload.text import counted
from tests.support.on_ranks import on_ranks, place
from tests.support.waiting import soon

STAGES = (0, 1, 2, 3)
WIDTH, LAYERS = 64, 3
# A multiple of every rank's alignment up to four ranks: no padding.
PSI = LAYERS * (WIDTH * WIDTH + WIDTH)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def policy_of(stage: int, precision: str, **more: object) -> dict[str, object]:
    policy: dict[str, object] = {"stage": stage, "units": {"min_numel": 0}, **more}
    return policy if precision == "fp32" else {**policy, "precision": {"param": precision}}


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).float().sum().backward()
    # Reading a gradient ends the backward for certain.
    assert next(model.parameters()).grad is not None


def trained(stage: int, precision: str, **more: object) -> tuple[nn.Module, zhooks.Attachment, torch.optim.Optimizer]:
    """A model after a step and one more backward, its attachment and its optimizer."""
    model = build()
    attachment = zhooks.attach(model, policy=policy_of(stage, precision, **more))
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward(model)
    made.step()
    made.zero_grad()
    backward(model)
    return model, attachment, made


def by_the_table(stage: int, precision: str, world: int) -> dict[str, int]:
    """Bytes of each row: fp32 masters, fp32 gradients and Adam's two moments; compute in the policy's dtype."""
    compute = 4 if precision == "fp32" else 2
    shard = PSI if stage == 0 else PSI // world
    master = 0 if precision == "fp32" or stage == 3 else 4 * shard
    parameter = 4 * shard if stage == 3 else compute * PSI
    return {"parameter": parameter, "gradient": 4 * shard, "optimizer": 8 * shard + master}


def storages(skip: set[int]) -> dict[int, int]:
    """Bytes of every distinct storage that a tensor of this process holds, by identity."""
    gc.collect()
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if isinstance(thing, Tensor) and not isinstance(thing, zhooks.ShardedTensor) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                if storage._cdata not in skip:
                    found[storage._cdata] = storage.nbytes()
    return found


@on_ranks(1, 2, 4, precision=("fp32", "bf16"))
def test_rows_equal_the_table_to_the_byte_at_the_end_of_backward(precision: str) -> None:
    for stage in STAGES:
        _, attachment, optimizer = trained(stage, precision)
        report = attachment.memory()
        rows = {row.what: row for row in report.rows}
        wanted = by_the_table(stage, precision, place()[1])
        assert {what: row.formula for what, row in rows.items()} == wanted, stage
        assert {what: row.nbytes for what, row in rows.items()} == wanted, stage
        assert report.nbytes == report.formula == sum(wanted.values())
        assert {row.tier for row in report.rows} == {"device"}
        assert optimizer.state
        attachment.detach()


@on_ranks(1, 2, case=((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")))
def test_rows_and_transient_lines_account_for_every_storage_there_is(case: tuple[int, str]) -> None:
    earlier = set(storages(set()))
    # Over p2p: the rings of the shared-memory transport are the transport's.
    model, attachment, optimizer = trained(*case, comm={"transport": "p2p"})
    # Step counters are one number a parameter, not state to partition.
    counters = {state["step"].untyped_storage()._cdata for state in optimizer.state.values()}
    report = attachment.memory()
    told = report.nbytes + sum(report.transient.values())
    # A thread of Gloo lets go of the flags it has sent a moment after the step that sent them.
    assert soon(lambda: sum(storages(earlier | counters).values()) == told), (told, storages(earlier | counters))
    assert model is attachment.model


@on_ranks(1, 2, stage=STAGES)
def test_before_any_step_there_are_neither_gradients_nor_states(stage: int) -> None:
    model = build()
    attachment = zhooks.attach(model, policy=policy_of(stage, "fp32"))
    rows = {row.what: (row.nbytes, row.formula) for row in attachment.memory().rows}
    parameter = PSI * 4 // (place()[1] if stage == 3 else 1)
    assert rows == {"parameter": (parameter, parameter), "gradient": (0, 0), "optimizer": (0, 0)}


@on_ranks(1, 2)
def test_what_host_memory_is_said_to_hold_is_within_its_budget_and_what_ranks_share_is_beside_it() -> None:
    model, world = build(), place()[1]
    tiers = {"parameter": {"tier": "host"}, "gradient": {"tier": "host"}, "budget": {"host": "2 MiB"}}
    attachment = zhooks.attach(model, policy=policy_of(3, "fp32", **tiers, comm={"transport": "shm" if world > 1 else "auto"}))
    backward(model)
    report = attachment.memory()
    rings = report.transient["message rings"]
    assert 0 < report.by_tier["host"] <= 2 << 20 and (rings > 2 << 20) == (world > 1)
    (rest,) = [row for row in report.rest if row.what == "rest of the process"]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert rest.nbytes is not None and rest.nbytes <= resident - rings // 2, "what is shared is not unexplained, too"
    said = " ".join(str(report).split())
    row = re.search(r"message rings: .* no \[budget\] counts it", said)
    assert (row is not None and "; shared by the ranks" in said) == (world > 1)


@on_ranks(2, stage=(1, 2, 3))
def test_several_optimizers_are_all_counted(stage: int) -> None:
    model = build()
    attachment = zhooks.attach(model, policy=policy_of(stage, "fp32"))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), lr=0.01),
        torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.01, momentum=0.9),
    ]
    backward(model)
    for optimizer in optimizers:
        optimizer.step()
    (row,) = [row for row in attachment.memory().rows if row.what == "optimizer"]
    assert row.nbytes == row.formula == (8 + 4 + 4) * PSI // LAYERS // 2


@on_ranks(2)
def test_partial_sums_that_wait_for_a_boundary_have_a_line_of_their_own() -> None:
    model = build()
    attachment = zhooks.attach(model, policy=policy_of(1, "fp32"))
    with attachment.no_sync():
        model(torch.ones(2, WIDTH)).sum().backward()
    report = attachment.memory()
    assert report.transient["partial gradients"] == 4 * PSI
    assert {row.what: row.nbytes for row in report.rows}["gradient"] == 0
    backward(model)
    assert attachment.memory().transient["partial gradients"] == 0


@on_ranks(2)
def test_gathered_units_have_a_line_of_their_own_and_go_when_released() -> None:
    model = build()
    attachment = zhooks.attach(model, policy=policy_of(3, "fp32"))
    with attachment.resident():
        assert attachment.memory().transient["gathered units"] == 4 * PSI
    assert attachment.memory().transient["gathered units"] == 0
    assert attachment.memory().nbytes == attachment.memory().formula == 4 * PSI // 2


@on_ranks(2, stage=STAGES)
def test_padding_is_held_and_counted(stage: int) -> None:
    model = nn.Linear(5, 3)
    attachment = zhooks.attach(model, policy=policy_of(stage, "fp32"))
    model(torch.ones(1, 5)).sum().backward()
    assert model.weight.grad is not None
    report = attachment.memory()
    assert report.nbytes == report.formula
    assert report.psi == 18
    rows = {row.what: row.nbytes for row in report.rows}
    # 15 + 3 elements, each parameter on 16 bytes, the whole a multiple of two ranks' 16 bytes: 24.
    assert rows["parameter"] == (24 * 4 // 2 if stage == 3 else 24 * 4)


@on_ranks(2, stage=STAGES)
def test_the_papers_figure_stands_beside_it(stage: int) -> None:
    world = place()[1]
    _, attachment, _ = trained(stage, "bf16")
    paper = {0: 16 * PSI, 1: 4 * PSI + 12 * PSI // world, 2: 2 * PSI + 14 * PSI // world, 3: 16 * PSI // world}[stage]
    report = attachment.memory()
    assert report.paper == paper
    text = str(report)
    words = " ".join(text.split())
    figure = f"the ZeRO paper counts {paper / 2**20:,.2f} MiB of model states at this stage, in mixed precision with Adam"
    assert f"{PSI:,} parameters over {counted(world, 'rank')}" in words and figure in words
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["parameter", "gradient", "optimizer"]


@on_ranks(2)
def test_every_row_of_the_printed_table_says_what_it_holds() -> None:
    model = nn.Sequential(build(), nn.Linear(WIDTH, WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"parameter": {"tier": "host"}, "optimizer": {"tier": "disk"}, "disk": {"path": folder}}
        activation = {"tier": "host", "checkpoint": "unit", "min_bytes": 0}
        ignore = {"units": {"min_numel": 0, "ignore": ["1"]}}
        attachment = zhooks.attach(model, policy={**tiers, "activation": activation, **ignore})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            report = attachment.memory()
            text = str(report).splitlines()
            others = [residue.what for residue in (*report.residual, *report.rest)]
            for name in (*(row.what for row in report.rows), *report.transient, *others):
                assert any(line.startswith(f"{name:<26}") for line in text), name
                assert any(re.match(rf"{re.escape(name)}: [a-zA-Z]", line) for line in text), name
            assert max(map(len, text)) <= 100
            backward(model)
            optimizer.step()
        assert {"ignored gradients", "ignored states", "staging"} <= set(report.transient)
        assert {"activation inputs", "recomputed"} <= {row.what for row in report.residual}
        attachment.detach()
