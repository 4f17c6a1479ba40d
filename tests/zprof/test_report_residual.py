"""The residual states in ``zprof report``: from traces with and without what zhooks counts, and from a real run.

pytest runs it.  What the counts themselves are worth is tests/zhooks/report/test_memory_residual.py's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import zprof
from offload.formulas import Layers
from tests.support.residual_gpt import attached, backward, forward, made
from tests.support.zprof_traces import HEADER, MIB, sample_rows, write_trace
from zprof.bench import store as bench_store
from zprof.cli import main
from zprof.rows import Row, RowKind, placed

LAYERS = Layers(4, 2, 1024, 256, 2, heads=8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_store, "bench_path", lambda: tmp_path / "bench.json")
    return tmp_path


def told(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["report", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["runs"][0]["residual"]


def shown(*arguments: str) -> list[str]:
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def rows(found: Any) -> dict[tuple[str, str], tuple[int | None, int | None, int | None, str | None]]:
    keys = ("bytes", "peak_bytes", "formula_bytes", "seen_by")
    return {(row["name"], row["tier"]): tuple(row[key] for key in keys) for row in found["rows"]}


def counted(*, host: int = 0) -> list[Row]:
    """Two steps: 6 and 4 MiB of inputs, 2 and 3 of the rest, a unit's ring, and ``host`` bytes away."""
    now = HEADER.mono_ns
    made = [Row(RowKind.COUNTER, placed("communication", "host"), "message rings", MIB, now + 1)]
    for inputs, other in ((6, 2), (4, 3)):
        made += [Row(kind, "forward", "m", 0, now := now + 100) for kind in (RowKind.BEGIN, RowKind.END)]
        for key, nbytes in (("inputs", inputs), ("other", other)):
            made.append(Row(RowKind.COUNTER, "saved for backward", key, nbytes * MIB, now := now + 100))
        if host:
            made.append(Row(RowKind.COUNTER, placed("activation", "host"), "blocks.0", host, now := now + 100))
        for key in ("inputs", "other"):
            made.append(Row(RowKind.COUNTER, "saved for backward", key, 0, now := now + 100))
        made += [Row(kind, "step", "AdamW", 0, now := now + 100) for kind in (RowKind.BEGIN, RowKind.END)]
    return made


def write(layers: Layers, **more: Any) -> None:
    write_trace(Path("run.zprof"), counted(**more), notes={"activation": {"text": layers.text()}})


def test_what_zhooks_counted_stands_beside_the_formula() -> None:
    write(LAYERS)
    found = told("run.zprof")
    formula = 12 * 4 * 2 * 1024 * 256 * 2
    assert rows(found) == {
        ("activations", "device"): (8 * MIB, 8 * MIB, formula, "zhooks"),
        ("buffers", "host"): (MIB, MIB, None, "ledger"),
    }
    assert (found["formula"]["saved_bytes"], found["formula"]["count"]) == (formula, 4)
    assert found["formula"]["korthikanti_bytes"] == LAYERS.korthikanti_nbytes
    lines = shown("run.zprof")
    assert "activations device 8 MiB 8 MiB 48 MiB zhooks" in lines
    given = "4 layers, batch 2, seq 1024, hidden 256, 2 bytes"
    assert f"estimate of activations (ZeRO paper): 12 x hidden x batch x seq x layers: {given}" in lines
    assert any(line.startswith("in 16 bits, with dropout, Korthikanti et al. (arXiv:2205.05198) estimate ") for line in lines)


def test_activations_that_zhooks_counted_are_not_called_unseen_where_their_inputs_were_not_told_apart() -> None:
    layers = Layers(4, 2, 1024, 256, 2, checkpoint="unit")
    without = [row for row in counted() if row.key != "inputs"]
    write_trace(Path("run.zprof"), without, notes={"activation": {"text": layers.text()}})
    found = rows(told("run.zprof"))
    assert found["activations", "device"] == (3 * MIB, 3 * MIB, None, "zhooks")
    assert found["of which inputs of recomputed units", "device"][3] is None
    assert not any("were not seen" in line for line in shown("run.zprof"))


def test_a_step_has_its_own_peak() -> None:
    write(LAYERS)
    assert [rows(told("run.zprof", "--at", f"step:{step}"))["activations", "device"][:2] for step in (0, 1)] == [
        (8 * MIB, 8 * MIB),
        (7 * MIB, 8 * MIB),
    ]


def test_recomputed_units_divided_ones_and_tiers_have_their_formulas() -> None:
    inputs = 4 * 2 * 1024 * 256 * 2
    write(Layers(4, 2, 1024, 256, 2, tp=2, checkpoint="unit", partition="tp"))
    found = rows(told("run.zprof"))
    assert found["activations", "device"] == (8 * MIB, 8 * MIB, None, "zhooks")
    assert found["of which inputs of recomputed units", "device"] == (6 * MIB, 6 * MIB, inputs // 2, "zhooks")
    Path("run.zprof").unlink()
    write(Layers(4, 2, 1024, 256, 2, tier="host"), host=5 * MIB)
    found = rows(told("run.zprof"))
    assert found["activations", "device"][2] == 0
    assert found["activations", "host"] == (5 * MIB, 5 * MIB, 12 * inputs, "ledger")


@pytest.mark.parametrize("level", ["events", "alloc"])
def test_traces_of_earlier_versions_still_read(level: str) -> None:
    write_trace(Path("run.zprof"), sample_rows(level=level), level=level)
    found = told("run.zprof")
    assert found["formula"] is None
    seen = rows(found)["activations", "device"]
    assert seen == ((None, None, None, None) if level == "events" else (seen[0], seen[1], None, "ledger"))
    assert ("residual states" in shown("run.zprof")) == (level == "alloc")


@pytest.mark.parametrize("text", ["", "nonsense", '{"count": -1}', LAYERS.text().replace("1024", '"x"'), 7])
def test_a_strangers_note_is_no_formula(text: object) -> None:
    write_trace(Path("run.zprof"), counted(), notes={"activation": {"text": text}})
    assert told("run.zprof")["formula"] is None


def test_a_formula_without_counts_says_what_to_record() -> None:
    write_trace(Path("run.zprof"), sample_rows(), notes={"activation": {"text": LAYERS.text()}})
    assert "activations were not seen: record with --level alloc" in shown("run.zprof")


def test_a_recorded_run_reports_what_memory_says() -> None:
    attachment = attached(3, checkpoint="unit")
    made.remove(attachment)
    attachment.memory()
    optimizer = torch.optim.SGD(attachment.model.parameters(), lr=0.1)
    with attachment.observe(zprof.Recorder("run.zprof")):
        for _ in range(2):
            out = forward(attachment)
            kept = {row.what: row.nbytes for row in attachment.memory().residual}
            backward(attachment, out)
            optimizer.step()
    found = rows(told("run.zprof"))
    inputs = found["of which inputs of recomputed units", "device"]
    assert inputs[0] == inputs[1] == inputs[2] == kept["activation inputs"]
    assert found["activations", "device"][0] == sum(kept.values())
    attachment.detach()


def test_the_formula_is_of_one_forward_however_many_steps_were_recorded() -> None:
    attachment = attached(3)
    made.remove(attachment)
    optimizer = torch.optim.SGD(attachment.model.parameters(), lr=0.1)
    with attachment.observe(zprof.Recorder("run.zprof")):
        for _ in range(4):
            backward(attachment, forward(attachment))
            optimizer.step()
    assert told("run.zprof")["formula"]["count"] == len(attachment.model.blocks)
    attachment.detach()
