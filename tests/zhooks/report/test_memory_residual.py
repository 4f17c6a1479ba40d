"""Activations, kept gradients and nobody's memory in ``attachment.memory()``: against counts made by hand, and the formulas.

pytest runs it, on one and two ranks.  What the model states hold is tests/zhooks/report/test_memory.py's.
"""

from __future__ import annotations

import gc
import json
import mmap
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.formulas import Layers
from tests.support.on_ranks import on_ranks
from tests.support.residual_gpt import BATCH, HEADS, HIDDEN, LAYERS, SEQ, attached, backward, forward, made
from tests.support.waiting import soon

SBH = BATCH * SEQ * HIDDEN * 4
#: Layer norms keep a mean and a deviation a token.
STATS = 2 * BATCH * SEQ * 4
SCORES = BATCH * HEADS * SEQ * SEQ * 4
#: By hand, in fp32 and without dropout: the inputs of both norms (2), what the norms gave to qkv and up (2), copies of q, k
#: and v (3), the input of proj (1), that of gelu (4) and what it gave (4); the softmax's result; two norms' figures.
BLOCK = 16 * SBH + SCORES + 2 * STATS
#: The tokens, the last norm's input and figures, what it gave to the head.
AROUND = BATCH * SEQ * 8 + 2 * SBH + STATS


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    """Other tests listen to every attachment of this process: leave none."""
    yield
    while made:
        made.pop().detach()


def rows(attachment: Any) -> dict[tuple[str, str], tuple[int | None, int | None, int | None]]:
    return {(row.what, row.tier): (row.nbytes, row.formula, row.peak) for row in attachment.memory().residual}


@on_ranks(2, stage=(0, 3))
def test_what_a_forward_saves_is_counted_to_the_byte_and_given_back_by_backward(stage: int) -> None:
    attachment = attached(stage)
    assert rows(attachment) == {("activations", "device"): (None, None, None)}
    saved, formula = LAYERS * BLOCK + AROUND, 12 * LAYERS * SBH
    for _ in range(2):
        out = forward(attachment)
        assert rows(attachment) == {("activations", "device"): (saved, formula, saved)}
        backward(attachment, out)
        assert rows(attachment) == {("activations", "device"): (0, formula, saved)}
    # 16 of hidden instead of 12: this model keeps gelu's input and copies of q, k and v; with the scores 17 in all.
    assert 16 / 12 < saved / formula < 18 / 12


@on_ranks(2, stage=(0, 3))
def test_recomputed_units_keep_their_inputs_and_one_units_values_at_a_time(stage: int) -> None:
    attachment = attached(stage, checkpoint="unit")
    attachment.memory()
    inputs = LAYERS * SBH
    for _ in range(2):
        out = forward(attachment)
        found = rows(attachment)
        assert found["activation inputs", "device"] == (inputs, inputs, inputs)
        # Norm and head are units too; what they save is their inputs, or nothing more than that and two figures a token.
        now = found["activations", "device"][0]
        assert now is not None and now <= AROUND
        assert found["recomputed", "device"][0] == 0
        backward(attachment, out)
        found = rows(attachment)
        assert [row[0] for row in found.values()] == [0, 0, 0]
        assert found["activation inputs", "device"][2] == inputs
        again = found["recomputed", "device"][2]
        # All of a block but its input, and at most what its second forward made beside it.
        assert again is not None and BLOCK - SBH <= again <= BLOCK + 2 * SBH


@on_ranks(1, way=("host", "disk", "host-unit"))
def test_a_tier_takes_them_and_the_device_keeps_none(way: str) -> None:
    tier, _, unit = way.partition("-")
    inputs = LAYERS * SBH
    with tempfile.TemporaryDirectory() as folder:
        attachment = attached(3, disk=folder, tier=tier, min_bytes=0, checkpoint=unit or "none")
        attachment.memory()
        out = forward(attachment)
        found = rows(attachment)
        now, formula, peak = found["activations", tier]
        name = "activation inputs" if unit else "activations"
        assert found[name, "device"][:2] == (0, 0)
        assert formula == (inputs if unit else 12 * LAYERS * SBH)
        assert now is not None and now == peak
        # Whole pages, and storages of which at least half was saved.
        assert (inputs if unit else LAYERS * BLOCK) <= now <= (2 * inputs if unit else 2 * (LAYERS * BLOCK + AROUND))
        backward(attachment, out)
        del out
        # A disk's worker may still be writing what was dropped unread.
        assert soon(lambda: rows(attachment)["activations", tier] == (0, formula, peak))
        made.pop().detach()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_peak_is_that_of_the_last_step(tier: str) -> None:
    attachment = attached(tier=tier, min_bytes=0)
    attachment.memory()
    peaks = []
    for batch in (2 * BATCH, BATCH):
        backward(attachment, forward(attachment, batch))
        peaks.append(rows(attachment)["activations", tier][2] or 0)
    assert peaks[1] == LAYERS * BLOCK + AROUND or tier == "host"
    # Twice the tokens hold twice as much, up to whole pages.
    assert abs(peaks[0] - 2 * peaks[1]) < 0.05 * peaks[0]


class Shares(nn.Module):
    """Saves two views of one storage, a buffer, a parameter and a leaf of the user's."""

    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("fixed", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x + 1).chunk(2, 1)
        return left.sin() * right.exp() * self.fixed * self.scale


def test_a_storage_is_counted_once_and_what_somebody_owns_not_at_all() -> None:
    attachment = attached(3, Shares)
    attachment.memory()
    x = torch.ones(4, 16, requires_grad=True)
    out = attachment.model(x)
    # The sum that both halves are views of; the results of sin and exp, their product with the buffer, 4 x 8 each.
    assert rows(attachment)["activations", "device"][0] == 4 * 16 * 4 + 3 * (4 * 8 * 4)
    del out
    gc.collect()
    assert rows(attachment)["activations", "device"][0] == 0


def hooks_inside(attachment: Any) -> bool:
    seen = []
    handle = attachment.model.blocks[0].up.register_forward_hook(
        lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
    )
    forward(attachment)
    handle.remove()
    return bool(seen[0])


def test_nothing_is_counted_until_it_is_asked_for() -> None:
    attachment = attached(0)
    assert not hooks_inside(attachment)
    with attachment.observe(zhooks.Recorder()):
        # To be watched brings no hooks into a forward.
        assert not hooks_inside(attachment)
    text = str(attachment.memory())
    words = " ".join(text.split())
    assert "activations were not counted so far, because that takes hooks in every forward. They are from now on" in words
    [row] = [line for line in text.splitlines() if line.startswith("activations  ")]
    assert row.split()[:3] == ["activations", "device", "-"] and row.endswith(" -")
    assert hooks_inside(attachment)


@on_ranks(2)
def test_the_first_step_is_counted_where_forwards_have_hooks_anyway() -> None:
    attachment = attached(3)
    backward(attachment, forward(attachment))
    backward(attachment, forward(attachment, 2 * BATCH))
    report = attachment.memory()
    [row] = [row for row in report.residual if row.what == "activations"]
    assert row.nbytes is None and row.peak is not None and row.peak > 0
    assert report.by_tier["device"] >= report.nbytes + row.peak
    assert "are those of the first step" in str(report)
    backward(attachment, forward(attachment, 2 * BATCH))
    [later] = [row for row in attachment.memory().residual if row.what == "activations"]
    assert later.nbytes == 0 and later.peak is not None and later.peak > 1.5 * row.peak


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: y.square().sum())(x)
        out: Tensor = self.inner(slope)
        return out


def test_a_forward_that_cannot_be_counted_says_why_and_runs_again() -> None:
    attachment = attached(0, Functional)
    attachment.memory()
    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        attachment.model(torch.ones(2, 4))
    assert "it is off again: repeat the forward" in caught.value.__notes__[0]
    attachment.model(torch.ones(2, 4)).sum().backward()
    assert "activations are not counted: the forward uses torch.func" in " ".join(str(attachment.memory()).split())
    attachment.model(torch.ones(2, 4)).sum().backward()


@on_ranks(2, tier=("device", "host"))
def test_gradients_hold_what_the_table_says_before_and_after_zero_grad(tier: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    policy = {"stage": 2, "gradient": {"tier": tier}}
    attachment = zhooks.attach(model, policy=policy)
    model(torch.ones(2, 64)).sum().backward()
    (before,) = [row for row in attachment.memory().rows if row.what == "gradient"]
    assert before.nbytes == before.formula > 0
    model.zero_grad()
    (after,) = [row for row in attachment.memory().rows if row.what == "gradient"]
    assert (after.nbytes, after.formula) == (0, 0)
    attachment.detach()


def test_the_rest_of_the_process_grows_with_what_nobody_told_of() -> None:
    attachment = attached()

    def rest() -> int:
        (row,) = attachment.memory().rest
        assert (row.what, row.tier) == ("rest of the process", "host")
        return int(row.nbytes or 0)

    def counted() -> bool:
        before = rest()
        # Pages of the system: an allocation could be given memory that this process freed and kept.
        with mmap.mmap(-1, 96 << 20) as foreign:
            torch.frombuffer(foreign, dtype=torch.uint8).fill_(1)
            return abs(rest() - before - len(foreign)) < 32 << 20

    assert soon(counted), "while the system takes no other pages of this process away"


def test_the_report_is_readable_names_the_formula_and_says_what_to_do() -> None:
    attachment = attached()
    attachment.memory()
    out = forward(attachment, 16 * BATCH)
    report = attachment.memory(heads=HEADS)
    lines, words = str(report).splitlines(), " ".join(str(report).split())
    figures = (16 * LAYERS * BLOCK + 16 * AROUND, 16 * 12 * LAYERS * SBH)
    held, formula = (f"{nbytes / 2**20:,.2f} MiB" for nbytes in figures)
    (line,) = [line for line in lines if line.startswith("activations  ") and " device " in line]
    assert line.split()[:8] == ["activations", "device", *held.split(), *formula.split(), *held.split()]
    assert f"layers: {LAYERS} layers, batch {16 * BATCH}, seq {SEQ}, hidden {HIDDEN}, 4 bytes" in words
    assert "in 16 bits, with dropout and 2 heads, Korthikanti et al. (arXiv:2205.05198) estimate " in words
    assert words.endswith('set [activation] checkpoint = "unit", or tier = "host"')
    assert report.by_tier["device"] == report.nbytes + figures[0]
    assert json.loads(json.dumps(asdict(report)))["residual"][0]["nbytes"] == figures[0]
    assert out is not None


def test_the_total_says_whether_it_has_the_activations_in_it() -> None:
    attachment = attached(0)
    backward(attachment, forward(attachment))
    before = attachment.memory()
    assert "\ntotal of model states and buffers, without activations: device " in str(before)
    assert before.by_tier["device"] == before.nbytes
    backward(attachment, forward(attachment))
    after = attachment.memory()
    assert "\ntotal of model states and buffers, with activations at their peak: device " in str(after)
    assert after.by_tier["device"] == after.nbytes + LAYERS * BLOCK + AROUND


@on_ranks(2)
def test_a_forward_that_is_not_counted_leaves_the_formula_of_the_last_one_that_was() -> None:
    attachment = attached(3)
    with attachment.observe(zhooks.Recorder()):
        backward(attachment, forward(attachment, 2 * BATCH))
    backward(attachment, forward(attachment))
    saved, formula = 2 * (LAYERS * BLOCK + AROUND), 2 * 12 * LAYERS * SBH
    assert rows(attachment) == {("activations", "device"): (None, formula, saved)}


def test_without_layers_that_repeat_there_is_no_formula_and_it_says_so() -> None:
    attachment = attached(3, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    attachment.memory()
    attachment.model(torch.ones(2, 4)).sum().backward()
    assert rows(attachment)["activations", "device"][1] is None
    words = " ".join(str(attachment.memory()).split())
    assert "no estimate of activations, because no units repeat with an input [batch, " in words
    with pytest.raises(ValueError, match="heads must be a number of attention heads"):
        attachment.memory(heads=0)


def test_observers_hear_the_levels_and_once_what_repeats() -> None:
    attachment = attached(3, checkpoint="unit")
    attachment.memory()
    recorder = zhooks.Recorder()
    with attachment.observe(recorder):
        for _ in range(2):
            backward(attachment, forward(attachment))
        forward(attachment)
    said = [event.nbytes for event in recorder.events if (event.what, event.key) == ("saved for backward", "inputs")]
    # At the beginning and the end of a forward, and at the end of its backward.
    assert said == [*[0, LAYERS * SBH, 0] * 2, 0, LAYERS * SBH]
    (about,) = [event for event in recorder.events if event.what == "activation"]
    found = Layers.read(about.key)
    assert found is not None
    assert (found.count, found.batch, found.seq, found.hidden, found.checkpoint) == (LAYERS, BATCH, SEQ, HIDDEN, "unit")


def test_the_formulas_are_the_papers() -> None:
    # ZeRO, section 3.2: 1.5 B parameters (hidden 1600, 48 layers), 1K tokens, batch 32: about 60 GB in 16 bits.
    gpt2 = Layers(48, 32, 1024, 1600, 2, heads=25)
    assert 59e9 < gpt2.saved_nbytes < 61e9
    s, b, h, a = 1024, 32, 1600, 25
    assert gpt2.korthikanti_nbytes == 48 * s * b * (34 * h + 5 * a * s)
    divided = Layers(48, 32, 1024, 1600, 2, heads=24, tp=4, checkpoint="unit", partition="tp")
    assert divided.korthikanti_nbytes == 48 * s * b * (10 * h + 24 * h // 4 + 5 * 24 * s // 4)
    assert divided.kept_nbytes == 48 * 2 * s * b * h // 4
    assert Layers.read(divided.text()) == divided
    for text in ("", "[1]", "{}", divided.text().replace("1024", "-1"), divided.text().replace('"unit"', "3"), None):
        assert Layers.read(text) is None


def test_no_python_code_runs_where_what_autograd_kept_is_dropped() -> None:
    """There an interrupt would be lost: the interpreter drops what is raised in a finalizer."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    attachment = zhooks.attach(model)
    attachment.memory()
    model(torch.ones(2, 64)).sum().backward()
    loss = model(torch.ones(2, 64)).sum()
    ran: list[str] = []
    # What others left to the collector is not to be finalized here.
    gc.disable()
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        del loss
    finally:
        sys.setprofile(None)
        gc.enable()
    assert not ran
    attachment.detach()
