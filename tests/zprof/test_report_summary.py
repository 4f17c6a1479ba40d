"""What ``zprof report`` says first: figures of the report in plain words, and what to do where something should be done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof.rows import Row, RowKind, placed


def reported(zprof: Zprof, *words: str) -> dict[str, Any]:
    result = zprof("report", *words, "--json")
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def said(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["about"]: each for each in report["summary"]}


def policy(**budget: object) -> dict[str, dict[str, Any]]:
    return {"policy": {"text": json.dumps({"budget": budget})}}


def test_the_text_begins_with_the_summary_that_programs_get(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    report = reported(zprof, "run.zprof")
    assert [each["about"] for each in report["summary"]][:4] == ["step", "waits", "device", "host"]
    lines = zprof("report", "run.zprof").stdout.splitlines()
    begin, end = lines.index("in short") + 1, lines.index("held at the peak, by category") - 1
    width = max(len(each["about"]) for each in report["summary"])
    told = []
    for each in report["summary"]:
        told.append(f"{each['about']:<{width}}  {each['figure']}: {each['what']}")
        told += [f"{'':<{width}}  remedy: {each['remedy']}"] if each["remedy"] else []
    assert lines[begin:end] == told


def test_every_figure_is_one_of_the_report(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc", notes=policy(host=1 << 30))
    report = reported(zprof, "run.zprof")
    run, found = report["runs"][0], said(report)
    assert found["step"]["figure"] == f"{run['measures']['step.median_ms']:.1f} ms"
    assert found["step"]["what"].startswith("the median of 4 of 5 steps, without the first; the slowest took ")
    assert found["waits"]["figure"] == f"{run['measures']['exposed.percent']:.1f} %"
    first = run["waits"][0]
    assert f"mostly for {first['what']} {first['unit']}, " in found["waits"]["what"]
    assert found["waits"]["act"] and found["waits"]["remedy"] == run["remedies"][0]
    assert found["device"]["figure"] == f"{round(run['tiers']['device']['bytes'] / MIB)} MiB"
    assert "activation 116 MiB" in found["device"]["what"] and "in step 0" in found["device"]["what"]
    assert found["device"]["what"].endswith("headroom not known: no [budget] was set")
    assert found["host"]["what"].endswith("[budget] 1 GiB: 952 MiB left")


def test_a_budget_that_the_peak_is_over_is_something_to_act_on(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc", notes=policy(host=64 * MIB))
    host = said(reported(zprof, "run.zprof"))["host"]
    assert host["act"] and host["what"].endswith("[budget] 64 MiB: 8 MiB over it")


def test_message_rings_are_shown_and_in_no_budget(zprof: Zprof) -> None:
    rows = list(sample_rows(level="alloc"))
    rings = Row(RowKind.COUNTER, "communication on host", "message rings", 33 * MIB, rows[0].time_ns)
    write_trace(Path("run.zprof"), [rings, *rows], level="alloc", notes=policy(host=80 * MIB))
    host = said(reported(zprof, "run.zprof"))["host"]
    assert host["figure"] == "105 MiB" and "communication 33 MiB" in host["what"]
    assert not host["act"] and host["what"].endswith("[budget] 80 MiB: 8 MiB left")


def test_what_a_gpu_has_is_that_of_its_hardware_profile(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc", device="cuda:0")
    unknown = "headroom not known: no [budget] was set and no hardware profile of this GPU is known"
    assert said(reported(zprof, "run.zprof"))["device"]["what"].endswith(unknown)
    report = reported(zprof, "run.zprof", "--hardware", "h100")
    memory = report["runs"][0]["tiers"]["device"]["memory_bytes"]
    assert memory > 79 << 30 and report["runs"][0]["tiers"]["host"]["memory_bytes"] is None
    assert "the device has " in said(report)["device"]["what"] and said(report)["device"]["what"].endswith(" left")


def test_what_a_simulated_gpu_has_is_known_and_a_trace_names_no_file(zprof: Zprof) -> None:
    Path("mine.toml").write_text("x")
    for simulated, known in (("h100", True), ("mine.toml", False)):
        path = Path(f"{simulated}.zprof")
        write_trace(path, sample_rows(level="alloc"), level="alloc", device="h100", simulated=simulated)
        assert (reported(zprof, str(path))["runs"][0]["tiers"]["device"]["memory_bytes"] is not None) is known


def test_what_the_allocator_reserved_is_not_left(zprof: Zprof) -> None:
    rows = [*sample_rows(level="alloc"), Row(RowKind.COUNTER, "cuda reserved", "cuda:0", 100 << 30, 2_000_000_000)]
    write_trace(Path("run.zprof"), rows, level="alloc", device="cuda:0")
    device = said(reported(zprof, "run.zprof", "--hardware", "h100"))["device"]
    assert device["act"] and device["what"].endswith(" more than that")


def test_what_was_not_seen_is_said_so_and_is_never_nothing(zprof: Zprof) -> None:
    held = (Row(RowKind.ALLOC, placed("other", "device"), "x", MIB, 1_000_000_000 + number, 0, number) for number in range(3))
    write_trace(Path("run.zprof"), held, level="alloc")
    report = reported(zprof, "run.zprof")
    found = said(report)
    assert (found["step"]["figure"], found["waits"]["figure"]) == ("none", "not seen")
    assert found["step"]["what"] == report["runs"][0]["unseen"]["step.median_ms"]
    assert found["device"]["figure"] == "3 MiB"


def growing() -> Iterator[Row]:
    """A step a second, each of which keeps a MiB."""
    for step in range(8):
        at_ns = (step + 1) * 1_000_000_000
        yield Row(RowKind.BEGIN, "step", "AdamW", 0, at_ns)
        yield Row(RowKind.END, "step", "AdamW", 0, at_ns + 1000)
        yield Row(RowKind.ALLOC, placed("other", "device"), "(outside modules)", MIB, at_ns + 2000, 0, step)


def test_a_leak_is_named_with_what_it_costs_a_step(zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), growing(), level="alloc")
    grew = said(reported(zprof, "run.zprof"))["growth"]
    assert grew["act"] and grew["figure"] == "1 MiB per step" and "(outside modules)" in grew["what"]
    assert grew["remedy"].startswith("a leak, unless it is kept on purpose")


def slow_loader() -> Iterator[Row]:
    """Steps of a second, of which the loop waits 600 ms for its data."""
    for step in range(5):
        at_ns = (step + 1) * 1_000_000_000
        yield Row(RowKind.BEGIN, "step", "AdamW", 0, at_ns)
        yield Row(RowKind.END, "step", "AdamW", 0, at_ns + 1000)
        yield Row(RowKind.BEGIN, "wait data", "Numbers", 0, at_ns + 2000)
        yield Row(RowKind.END, "wait data", "Numbers", 0, at_ns + 600_002_000)


def test_a_loop_that_waits_for_its_data_is_something_to_act_on(zprof: Zprof) -> None:
    loader = {"name": "Numbers", "workers": 0, "batch": 4, "prefetch": None, "persistent": False, "pinned": False}
    note = {"loaders": {"loaders": [loader], "cores": 4}}
    write_trace(Path("run.zprof"), slow_loader(), level="alloc", zhooks=False, notes=note)
    report = reported(zprof, "run.zprof")
    waits = said(report)["waits"]
    assert waits["act"] and waits["figure"] == "60.0 %" and "mostly for data Numbers, 600 ms per step" in waits["what"]
    assert waits["remedy"] == report["runs"][0]["data"]["advice"][0] != ""


def test_of_several_ranks_one_is_spoken_of_and_named(zprof: Zprof) -> None:
    for rank in range(2):
        rows = sample_rows(steps=3, units=4 + 2 * rank)
        write_trace(Path(f"run.{rank}.zprof"), rows, rank=rank, world=2)
    found = said(reported(zprof, "run.0.zprof", "run.1.zprof"))
    assert all(found[about]["what"].startswith("rank 1: ") for about in ("step", "waits", "device"))
