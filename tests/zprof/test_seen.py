"""What a recording could not see is absent: no measure, report, page or export shows 0, or a part, in its stead."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.inside import hush_earlier
from tests.support.ranks import Pool
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof import Recorder
from zprof.analysis.analysis import Analysis
from zprof.analysis.coverage import Unseen
from zprof.analysis.following import RunFollower
from zprof.analysis.measures import MEASURES, Value, measures, numbers
from zprof.rows import CATEGORIES, TIERS, Row, RowKind
from zprof.show.pages.timeline import peak_line, timeline
from zprof.show.report.findings import report
from zprof.trace.reader import Trace

SAMPLED = ("rss", "cgroup memory", "pinned", "cuda allocated", "cuda reserved", "nvml energy")


def rows_of_everything() -> Iterator[Row]:
    """A run of which every sampler answers; whatever a measure lacks then is for want of having seen it."""
    rows = list(sample_rows(steps=3, units=2, level="alloc"))
    begin, end = rows[0].time_ns, rows[-1].time_ns
    for at in range(11):
        when = begin + at * (end - begin) // 10
        rows += [Row(RowKind.COUNTER, what, "gpu0", (300 + at) * MIB, when) for what in SAMPLED]
    yield from sorted(rows, key=lambda row: row.time_ns)


def values_of(path: Path) -> dict[str, Value]:
    trace = Trace.open(path)
    return measures(Analysis.of(trace))


def peaks(tier: str, *categories: str) -> set[str]:
    return {f"{tier}.{category}.peak" for category in categories}


def every_peak(tier: str) -> set[str]:
    return {f"{tier}.peak"} | peaks(tier, *CATEGORIES)


ALWAYS = {"rss.peak", "rss.growth", "cgroup.peak", "pinned.peak", "cuda.allocated.peak", "cuda.reserved.peak"}
ALWAYS |= {"oom.count", "rows.dropped"}
STEPS = {name for name in MEASURES if name.startswith("step.")} | {"energy.joules_per_step"}
UPDATE = {"update.ms_per_step"}
# No loader was iterated in these.
WAITS = {name for name in MEASURES if name.startswith("exposed.") and not name.startswith("exposed.data")}
PASSES = {f"{name}.ms_per_step" for name in ("forward", "backward", "outside")}
RATES = {f"{name}.bytes_per_s" for name in ("gather", "reduce", "disk_read")}
AMOUNTS = {f"{name}.bytes_per_step" for name in ("gather", "reduce", "disk_read")}
PLACED = peaks("device", "parameter", "gradient", "optimizer", "communication")
NOT_BY_NAME = every_peak("device") - peaks("device", "communication")
TIMED = STEPS | UPDATE | WAITS | PASSES | RATES | AMOUNTS
THINNED = {"dropped": {"rows": 7, "spans": ["step"]}}

#: What was recorded how -> the measures that this can see, all of them; no other may show a number.
SEEN: dict[str, tuple[dict[str, Any], set[str]]] = {
    "events, a plain script": ({"level": "events", "zhooks": False}, ALWAYS | STEPS | UPDATE),
    "events, zhooks": ({"level": "events"}, ALWAYS | PLACED | every_peak("host") | every_peak("disk") | TIMED),
    "alloc, a plain script": (
        {"level": "alloc", "zhooks": False},
        ALWAYS | NOT_BY_NAME | every_peak("host") - peaks("host", "communication") | STEPS | UPDATE,
    ),
    "alloc, zhooks": ({"level": "alloc"}, ALWAYS | {name for tier in TIERS for name in every_peak(tier)} | TIMED),
    "stack, zhooks": ({"level": "stack"}, ALWAYS | {name for tier in TIERS for name in every_peak(tier)} | TIMED),
    "events, zhooks on a GPU": (
        {"level": "events", "device": "cuda:0"},
        ALWAYS | PLACED | peaks("host", "parameter", "gradient", "optimizer", "communication", "activation")
        | every_peak("disk") | STEPS | {"disk_read.bytes_per_s"} | AMOUNTS,
    ),
    "alloc, a plain script on a GPU": (
        {"level": "alloc", "zhooks": False, "device": "cuda:0"},
        ALWAYS | NOT_BY_NAME | every_peak("host") - peaks("host", "communication") | STEPS,
    ),
    "alloc, thinned out": (
        {"level": "alloc", "notes": THINNED},
        ALWAYS | {name for tier in TIERS for name in every_peak(tier)} | STEPS | UPDATE,
    ),
    "alloc, storages followed only at first": (
        {"level": "alloc", "zhooks": False, "notes": {"storages": {"why": "ValueError: x"}}},
        ALWAYS | STEPS | UPDATE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEEN)
def test_a_measure_is_a_number_only_where_its_recording_could_see_it(tmp_path: Path, case: str) -> None:
    header, seen = SEEN[case]
    values = values_of(write_trace(tmp_path / "run.zprof", rows_of_everything(), **header))
    assert list(values) == list(MEASURES)
    assert set(numbers(values)) == seen
    assert all(value.why for value in values.values() if isinstance(value, Unseen))


def test_what_the_cheap_level_shows_is_what_the_costly_one_does(tmp_path: Path) -> None:
    """One run, heard by two recorders: whatever bytes "events" has a number for, "alloc" has that number for."""
    import torch

    import zhooks

    def steps(model: torch.nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))

    for name in ("plain", "zhooks"):
        paths = {level: tmp_path / f"{name}.{level}.zprof" for level in ("events", "alloc")}
        one = model()
        # What other tests of this process have left attached would say what it holds.
        gc.collect()
        hush_earlier()
        recorders = [Recorder(path, level=level, nvml="off").listen() for level, path in paths.items()]  # type: ignore[arg-type]
        attachment = zhooks.attach(one) if name == "zhooks" else None
        steps(one)
        for recorder in recorders:
            recorder.close()
        if attachment is not None:
            attachment.detach()
        cheap, costly = (values_of(path) for path in paths.values())
        bytes_shown = [key for key in numbers(cheap) if key.partition(".")[0] in TIERS]
        assert bool(bytes_shown) == (name == "zhooks")
        for key in bytes_shown:
            value = costly[key]
            # The counters of steps, a few bytes each, belong to no unit.
            assert not isinstance(value, Unseen) and cheap[key] == pytest.approx(value, abs=256), key
        assert isinstance(cheap["device.peak"], Unseen) and not isinstance(costly["device.peak"], Unseen)


# What commands say.


@pytest.fixture
def plain(zprof: Zprof) -> Zprof:
    """A plain script, recorded at both levels; and the command line."""
    rows = [row for row in sample_rows(steps=3, units=2, level="alloc") if row.what in ("step", "rss", "activation on device")]
    write_trace(Path("alloc.zprof"), rows, zhooks=False)
    rows = [row for row in rows if row.what != "activation on device"]
    write_trace(Path("events.zprof"), rows, level="events", zhooks=False)
    return zprof


def test_a_limit_on_what_was_not_seen_fails_and_says_what_sees_it(plain: Zprof) -> None:
    result = plain("check", "events.zprof", "--max", "device.peak=1TiB", "--max", "rss.peak=1TiB", "--junit", "out.xml")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[0] == (
        "events.zprof: FAILED: device.peak is absent: not recorded at level events: record with --level alloc; "
        "asked for at most 1 TiB"
    )
    assert "events.zprof: ok: rss.peak" in result.stdout
    assert 'failures="1"' in Path("out.xml").read_text() and "device.peak is absent" in Path("out.xml").read_text()
    told = json.loads(plain("check", "events.zprof", "--min", "device.peak=0", "--json").stdout)
    assert told["ok"] is False
    assert (told["limits"][0]["value"], told["limits"][0]["ok"]) == (None, False)
    assert told["runs"][0]["measures"]["device.peak"] is None
    assert told["runs"][0]["unseen"]["device.peak"] == "not recorded at level events: record with --level alloc"
    assert plain("check", "alloc.zprof", "--max", "device.peak=1TiB").exit_code == 0


def test_on_a_gpu_what_the_host_only_queued_is_said_to_be_unmeasured(zprof: Zprof) -> None:
    write_trace(Path("gpu.zprof"), sample_rows(steps=3, units=2, level="events"), level="events", device="cuda:0")
    shown = zprof("report", "gpu.zprof").stdout
    assert "waiting was not measured on CUDA" in shown
    [gather] = [line for line in shown.splitlines() if line.strip().startswith("gather ")]
    assert gather.split()[3:7] == ["not", "measured", "on", "CUDA"], gather
    [run] = json.loads(zprof("report", "gpu.zprof", "--json").stdout)["runs"]
    rates = {rate["verb"]: rate for rate in run["rates"]}
    for verb in ("gather", "reduce"):
        assert rates[verb]["bytes"] > 0 and rates[verb]["why"].startswith("not measured on CUDA")
        assert [rates[verb][name] for name in ("busy_s", "bytes_per_s", "reached_bytes_per_s", "share_of_bench")] == [None] * 4
    assert rates["disk read"]["why"] is None and rates["disk read"]["bytes_per_s"] > 0
    assert run["waits"] is None
    assert run["unseen"]["exposed.ms_per_step"].startswith("not measured on CUDA")

    page = json.dumps(timeline([Trace.open("gpu.zprof")]))
    assert "exposed waits" not in page and "where the host queued them: not measured on CUDA" in page
    live = RunFollower(Path("gpu.zprof")).look()
    assert live.waited is None and "gather" not in live.bandwidth and "disk read" in live.bandwidth
    [seen] = json.loads(zprof("top", "--once", "--json", "gpu.zprof").stdout)["runs"]
    assert seen["waiting"] == [] and seen["unmeasured"].startswith("not measured on CUDA") and "gather" not in seen["bandwidth"]


def test_two_levels_are_not_compared_as_if_one_had_held_nothing(plain: Zprof) -> None:
    result = plain("diff", "alloc.zprof", "events.zprof")
    assert "-100" not in result.stdout
    assert any(line.split()[:1] == ["device.peak"] and line.split()[-1] == "absent" for line in result.stdout.splitlines())
    assert "held on device: recorded at different levels, so not compared" in result.stdout
    told = json.loads(plain("diff", "alloc.zprof", "events.zprof", "--json").stdout)
    changed = {change["name"]: change for change in told["changed"]}
    assert changed["device.peak"]["b"] is None and changed["device.peak"]["percent"] is None
    assert told["held_at_peak"] == {"category": [], "unit": []} and told["not_compared"]
    assert plain("diff", "alloc.zprof", "events.zprof", "--fail-on", "device.peak>+2%").exit_code == 3
    assert plain("diff", "events.zprof", "alloc.zprof", "--fail-on", "device.peak>1TiB").exit_code == 0


def test_exports_have_no_sample_of_what_was_not_seen(plain: Zprof) -> None:
    assert plain("export", "events.zprof", "--format", "prometheus", "-o", "out.prom").exit_code == 0
    text = Path("out.prom").read_text()
    assert "zprof_rss_peak_bytes" in text and "zprof_steps" in text
    assert "zprof_device" not in text and "zprof_exposed" not in text
    # Under zhooks a tier's sum is of what was placed, and called so.
    write_trace(Path("placed.zprof"), sample_rows(steps=2, units=2), level="events")
    assert plain("export", "placed.zprof", "--format", "perfetto", "-o", "out.json").exit_code == 0
    names = {event["name"] for event in json.loads(Path("out.json").read_text())["traceEvents"]}
    assert "device recorded" in names and "device total" not in names and "host total" in names
    assert plain("export", "placed.zprof", "--format", "speedscope", "-o", "out.scope").exit_code == 0
    profiles = [profile["name"] for profile in json.loads(Path("out.scope").read_text())["profiles"]]
    assert "rank 0: device bytes at the peak, without activation, temporary, other" in profiles
    assert plain("export", "placed.zprof", "--format", "tensorboard", "-o", "board").exit_code == 0
    events = next(Path("board").rglob("events.out*")).read_bytes()
    assert b"device/recorded bytes" in events and b"device/total bytes" not in events


def test_pages_say_what_is_missing(plain: Zprof) -> None:
    data = timeline([Trace.open("events.zprof")])
    assert data["units"]["waited"] == 0 and "under zhooks only" in data["units"]["unseen"]
    assert any("device: nothing: not recorded at level events" in line for line in data["report"]["not_recorded"])
    assert peak_line(data) == "no memory recorded"
    write_trace(Path("placed.zprof"), sample_rows(steps=2, units=2), level="events")
    data = timeline([Trace.open("placed.zprof")])
    assert data["units"]["waited"] > 0 and data["units"]["unseen"] is None
    assert " of what was recorded (" in peak_line(data)
    told = json.loads(plain("flamegraph", "placed.zprof", "--json").stdout)
    assert told["not_recorded"] == [
        "device: no activation, temporary, other: not recorded at level events: record with --level alloc"
    ]


def test_a_report_shows_no_zero_for_a_wait_nobody_saw(plain: Zprof) -> None:
    result = plain("report", "events.zprof")
    assert "waiting was not seen" in result.stdout and "waiting 0" not in result.stdout
    assert "device: nothing: not recorded at level events: record with --level alloc" in result.stdout
    told = json.loads(plain("report", "events.zprof", "--json").stdout)["runs"][0]
    assert (told["waits"], told["rates"], told["measures"]["exposed.ms_per_step"]) == (None, None, None)
    look = json.loads(plain("top", "-1", "--json", "events.zprof").stdout)["runs"][0]
    assert look["tiers"] == {"device": None, "host": None, "disk": None} and look["exposed_ms"] is None


def test_activations_that_zhooks_did_not_count_are_not_none(tmp_path: Path) -> None:
    rows = [*sample_rows(steps=2, units=2)]
    rows.append(Row(RowKind.COUNTER, "saved for backward", "other", 0, rows[-1].time_ns))
    write_trace(tmp_path / "run.zprof", rows, level="events")
    [row] = [row for row in report([tmp_path / "run.zprof"])["runs"][0]["residual"]["rows"] if row["name"] == "activations"]
    assert (row["bytes"], row["seen_by"]) == (None, None)


def test_a_run_without_an_end_keeps_no_limit(plain: Zprof) -> None:
    from tests.support.zprof_traces import HEADER
    from zprof.trace.writer import Writer

    writer = Writer(Path("killed.zprof"), HEADER)
    writer.rows(list(sample_rows(steps=2, units=2)))
    writer.flush()
    result = plain("check", "killed.zprof", "--max", "device.peak=1TiB")
    assert (result.exit_code, "has no end" in result.stderr) == (1, True)


def test_the_command_of_a_trace_cannot_steer_the_terminal(zprof: Zprof) -> None:
    rows = [row for row in sample_rows(steps=2, units=1) if row.what in ("step", "rss")]
    write_trace(Path("run.zprof"), rows, zhooks=False, level="events", argv=("\x1b[2Jtrain.py",))
    said = zprof("report", "run.zprof").stdout
    assert "\x1b" not in said and said.count("[2Jtrain.py") == 2, "as what ran, and in what to run next"


# What others shard.


def train(folder: str, wrapper: str) -> None:
    """Three steps of a small model, heard at both levels; the last rank comes late to each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    # What other tests of this process have left attached would say so, and their waits would be seen.
    gc.collect()
    hush_earlier()
    rank, world = dist.get_rank(), dist.get_world_size()
    recorders = [
        Recorder(f"{folder}/{wrapper}.{level}.{rank}.zprof", level=level, nvml="off").listen()
        for level in ("events", "alloc")
    ]
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        time.sleep(0.4 * rank)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for recorder in recorders:
        recorder.close()
    assert "zprof" not in (torch._C._distributed_c10d.Work.wait.__module__ or ""), "torch is left as it was"


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_waits_of_other_wrappers_name_the_late_rank_and_states_are_seen(tmp_path: Path, ranks2: Pool, wrapper: str) -> None:
    ranks2.run("tests.zprof.test_seen:train", folder=str(tmp_path), wrapper=wrapper)
    for level in ("events", "alloc"):
        told = report(sorted(tmp_path.glob(f"{wrapper}.{level}.*.zprof")))
        unit = "all_reduce" if wrapper == "ddp" else "all_gather"
        first, last = ({wait["unit"]: wait["ms_per_step"] for wait in run["waits"]} for run in told["runs"])
        assert first[unit] > last.get(unit, 0), (first, last)
        assert [slow["rank"] for slow in told["ranks"]["stragglers"]] == [1]
        [late] = [each for each in told["ranks"]["skew"] if each["key"] == unit]
        assert (late["what"], late["rank"]) == ("collective", 1)
        assert told["ranks"]["work_ms"]["1"] > 400, "it sleeps as long as that in each step"
    whole = 2 * 64 * 256 * 4
    own = whole if wrapper == "ddp" else whole // 2
    for path in sorted(tmp_path.glob(f"{wrapper}.alloc.*.zprof")):
        trace = Trace.open(path)
        analysis = Analysis.of(trace)
        assert analysis.covered.stopped == ""
        found, ledger = numbers(measures(analysis)), analysis.ledger
        assert (found["device.parameter.peak"], found["device.gradient.peak"]) == (whole, own)
        assert found["device.optimizer.peak"] == pytest.approx(2 * own, abs=64)
        # After the last step, long after the parameters were sharded.
        held = ledger.table(ledger.end_ns, "category", "device")
        assert held["parameter"] == own
