"""A recorded run asked from Python: the same figures as the commands print, absent where they say "not recorded"."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import zprof
from tests.support.zprof_traces import MIB, SHARD, WHOLE, sample_rows, write_trace
from zprof.cli import main
from zprof.rows import TraceError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def whole(path: str = "run.zprof", *, level: str = "alloc", **header: Any) -> Path:
    return write_trace(Path(path), sample_rows(level=level), level=level, **header)


def command(*words: str) -> Any:
    return json.loads(CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False).stdout)["runs"][0]


def test_a_run_says_what_ran() -> None:
    whole()
    told = command("report", "run.zprof")
    with zprof.open("run.zprof") as run:
        assert (run.rank, run.world, run.level, run.device, run.host) == (0, 1, "alloc", told["device"], told["host"])
        assert (list(run.argv), run.duration_s, run.damage) == (told["argv"], told["duration_s"], None)
        assert run.not_recorded == told["not_recorded"] and run.simulated == ""
        assert repr(run) == "<zprof.Run 'run.zprof': rank 0 of 1, level alloc>"


@pytest.mark.parametrize("step", [None, 0, 3])
def test_bytes_are_those_of_the_report(step: int | None) -> None:
    whole()
    at = () if step is None else ("--at", f"step:{step}")
    run = zprof.open("run.zprof")
    for by in ("category", "module", "unit"):
        told = command("report", "run.zprof", "--by", by, *at)["tiers"]
        assert set(run.tiers) == set(told)
        for tier in run.tiers:
            peak = run.peak(tier, step=step)
            assert peak is not None
            assert (peak.nbytes, peak.time_s) == (told[tier]["bytes"], told[tier]["at_s"])
            assert peak.step == told[tier]["step"] or tier != "device"
            assert list(run.held(peak, by=by, tier=tier).items()) == list(told[tier]["groups"].items())
    assert str(run.peak("device", step=0)) == "164 MiB at 0.021 s, in step 0"


def test_bytes_at_any_time_and_of_one_category() -> None:
    whole()
    run = zprof.open("run.zprof")
    assert run.held() == run.held(run.peak()), "the peak, where no time is given"
    assert run.held(0.0) == {} and run.held(run.duration_s)["parameter"] == 8 * SHARD
    parameters = run.peak("device", "parameter")
    assert parameters is not None and parameters.nbytes == 8 * SHARD + WHOLE
    assert run.held(parameters)["parameter"] == parameters.nbytes


def test_curves_reach_the_peak_and_sum_to_what_is_held() -> None:
    whole()
    run = zprof.open("run.zprof")
    curves, peak = run.curves(), run.peak()
    assert peak is not None
    total = np.sum(list(curves.held.values()), axis=0)
    assert total.max() == peak.nbytes and set(curves.held) >= {"parameter", "activation"}
    assert (np.diff(curves.time_s) >= 0).all() and 0 <= curves.time_s[0] <= curves.time_s[-1] <= run.duration_s
    at = int(total.argmax())
    assert {name: int(level[at]) for name, level in curves.held.items() if level[at]} == run.held(peak)
    assert set(run.curves(by="module").held) == {f"model.layers.{number}" for number in range(8)}


def test_time_is_steps_and_spans() -> None:
    whole()
    run, told = zprof.open("run.zprof"), command("report", "run.zprof")
    steps = run.steps
    assert steps.shape == (5, 2) == (told["steps"]["count"], 2)
    assert float(np.median((steps[1:, 1] - steps[1:, 0]) * 1e3)) == pytest.approx(told["measures"]["step.median_ms"])
    waits = list(run.spans("wait *"))
    assert {span.what for span in waits} == {"wait gather"} or all(span.what.startswith("wait ") for span in waits)
    gathers = list(run.spans("gather"))
    assert len(gathers) == next(rate["count"] for rate in told["rates"] if rate["verb"] == "gather")
    assert {span.nbytes for span in gathers} == {WHOLE} and all(0 <= span.begin_s <= span.end_s for span in gathers)
    assert [span.begin_s for span in gathers] == sorted(span.begin_s for span in gathers)
    assert len(list(run.spans())) > len(gathers) + len(waits) and list(run.spans("no such")) == []


def test_measures_and_what_was_not_seen_are_those_of_check() -> None:
    whole(level="events")
    run, told = zprof.open("run.zprof"), command("check", "run.zprof")
    assert run.measures == {name: value for name, value in told["measures"].items() if value is not None}
    assert run.unseen == told["unseen"] and run.unseen
    assert not run.measures.keys() & run.unseen.keys()


def test_what_was_not_seen_is_none_and_not_zero() -> None:
    whole(level="events")
    run = zprof.open("run.zprof")
    assert run.peak("device", "activation") is None and run.peak("device", "parameter") is not None
    assert any(line.startswith("device: no ") and "activation" in line for line in run.not_recorded)
    write_trace(Path("plain.zprof"), [], level="events", zhooks=False)
    plain = zprof.open("plain.zprof")
    assert plain.peak() is None and plain.peak("disk") is None
    assert plain.tiers == () and plain.held() == {} and plain.steps.shape == (0, 2)
    assert any(line.startswith("device: nothing") for line in plain.not_recorded)


def test_what_was_sampled_is_given_with_its_times() -> None:
    whole()
    run = zprof.open("run.zprof")
    assert "rss" in run.sampled
    ((time_s, values),) = run.samples("rss").values()
    assert len(time_s) == len(values) and values.max() > MIB and run.samples("no such") == {}


def test_a_rank_of_several_is_chosen() -> None:
    for rank in range(3):
        whole(f"run.{rank}.zprof", rank=rank, world=3)
    assert zprof.open(".", rank=2).rank == 2
    assert zprof.open("run.1.zprof").rank == 1
    with pytest.raises(TraceError, match=r"^\.: expected one rank, found 3; choose one, such as rank=0$"):
        zprof.open(".")
    with pytest.raises(TraceError, match=re.escape("found ranks 0, 1, 2")):
        zprof.open(Path(), rank=5)


def test_bad_input_says_what_was_expected() -> None:
    whole()
    Path("other.zprof").write_bytes(b"no trace")
    run = zprof.open("run.zprof")
    for wrong in (
        lambda: run.peak("gpu"),
        lambda: run.peak("device", "weights"),
        lambda: run.peak(step=5),
        lambda: run.peak(step=-1),
        lambda: run.held(by="colour"),  # type: ignore[arg-type]
        lambda: run.curves(tier="gpu"),
    ):
        with pytest.raises(ValueError, match="expected one of"):
            wrong()
    for path in ("other.zprof", "missing.zprof"):
        with pytest.raises(TraceError, match=path):
            zprof.open(path)


def test_a_torn_trace_is_read_as_far_as_it_goes() -> None:
    body = whole().read_bytes()
    Path("torn.zprof").write_bytes(body[: len(body) * 2 // 3])
    run = zprof.open("torn.zprof")
    assert run.peak() is not None
    assert run.damage is not None and run.damage.startswith("ends inside a chunk")


def test_a_closed_run_says_so() -> None:
    whole()
    with zprof.open("run.zprof") as run:
        assert run.measures["step.count"] == 5
    assert run.rank == 0 and run.measures["step.count"] == 5
    for asked in (run.peak, run.held, run.curves, lambda: list(run.spans())):
        with pytest.raises(TraceError, match=r"run\.zprof: expected an open run, found a closed one"):
            asked()
