"""Times of the device: what its streams did is recorded when they did it, and reports tell that from what the host queued."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zprof
from offload.events import HERE, Bus, During, KnownTime
from tests.support import forked
from tests.support.streams import Paper
from tests.support.virtual import on_virtual
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import DEVICE_LANES, HEADER, on_device, rows_of, sample_rows, write_trace
from zprof.analysis.analysis import Analysis
from zprof.analysis.following import RunFollower
from zprof.recording import collectives, lanes
from zprof.recording.recorder import Recorder
from zprof.rows import Row, RowKind
from zprof.show.pages.timeline import timeline
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

MS = 1_000_000
#: What an event's 32 bits may take away of a time.
NEAR = 1000


class OnPaper:
    """A recording of what a bus says of streams on paper."""

    def __init__(self, folder: Path) -> None:
        self.paper = Paper()
        self.paper.host_ns = time.perf_counter_ns()
        self.bus = Bus(self.paper.now_ns, self.paper.clock)
        self.recorder = Recorder(folder / "run.zprof", nvml="off").start()
        self.recorder.note("device", {"device": "cuda:0"})
        self.recorder.note("policy", {"text": "{}"})
        self.bus.attach(self.recorder)
        # The first mark waits for its base, which later ones do not.
        self.bus.instant("ready", "warm", at=HERE)

    def span(self, what: str, key: str, lasts_ms: float, nbytes: int = 0) -> Callable[[], None]:
        """Queue a span; what is returned lets the device do it, in that time."""
        self.bus.begin(what, key, nbytes, at=HERE)
        release = self.paper.hold(self.paper.current())
        self.bus.end(what, key, nbytes, at=HERE)

        def done() -> None:
            self.paper.host_ns += round(lasts_ms * MS)
            release()

        return done

    def file(self) -> list[tuple[int, str, str]]:
        """What is in the file by now."""
        self.recorder.flush()
        trace = Trace.open(self.recorder.path)
        found = [(row.kind, row.what, row.key) for row in rows_of(trace) if row.kind != RowKind.COUNTER]
        trace.close()
        return found


@pytest.fixture
def on_paper(tmp_path: Path) -> Iterator[OnPaper]:
    made = OnPaper(tmp_path)
    yield made
    made.recorder.close()


def test_what_the_host_queued_is_recorded_at_once_and_what_the_device_did_when_it_has(on_paper: OnPaper) -> None:
    done = [on_paper.span("compute", "u", 5), on_paper.span("wait gather", "v", 30)]
    waits = on_paper.paper.waits
    assert [row for row in on_paper.file() if "ready" not in row[1]] == [
        (kind, f"queued {what}", key)
        for what, key in (("compute", "u"), ("wait gather", "v"))
        for kind in (RowKind.BEGIN, RowKind.END)
    ]
    for each in done:
        each()
    on_paper.span("compute", "later", 1)()
    assert on_paper.paper.waits == waits, "nobody waits for a stream"
    spans = [what for kind, what, _ in on_paper.file() if kind == RowKind.SPAN]
    assert spans == ["ready", "compute", "wait gather"], "the last is written when somebody looks again, or at the end"
    on_paper.recorder.close()
    with zprof.open(on_paper.recorder.path) as run:
        lasted = {(span.what, span.key): span.end_s - span.begin_s for span in run.spans("compute", "wait *", "queued *")}
        assert lasted["compute", "u"] == pytest.approx(0.005, abs=1e-6)
        assert lasted["wait gather", "v"] == pytest.approx(0.03, abs=1e-6)
        assert lasted["queued compute", "u"] == lasted["queued wait gather", "v"] == 0
        assert {span.lane for span in run.spans("compute")} == {"compute"} and ("compute", "later") in lasted
        assert "CUDA" not in run.unseen["exposed.percent"], "it is the step that is missing"


def test_a_span_that_says_when_a_stream_did_it_has_those_times_and_its_lane(on_paper: OnPaper) -> None:
    bus, begun_ns = on_paper.bus, on_paper.paper.host_ns + 7 * MS
    bus.begin("gather", "u", 64, at=HERE)
    begin, end = (KnownTime("gather over shard", begun_ns + late_ns) for late_ns in (0, MS))
    bus.end("gather", "u", 64, at=During(begin, end))
    bus.begin("stash", "v", 32, at=HERE)
    bus.end("stash", "v", 32, at=During(None, KnownTime("copy d2h", on_paper.paper.host_ns + 2 * MS)))
    on_paper.recorder.close()
    with zprof.open(on_paper.recorder.path) as run:
        gather, stash = (next(run.spans(what)) for what in ("gather", "stash"))
        assert gather.end_s - gather.begin_s == pytest.approx(1e-3, abs=1e-9) and gather.lane == "gather over shard"
        assert stash.end_s - stash.begin_s == pytest.approx(2e-3, abs=1e-5) and (stash.lane, stash.nbytes) == ("copy d2h", 32)


def test_a_wait_of_a_stream_that_computes_nothing_is_hidden(on_paper: OnPaper) -> None:
    with on_paper.paper.using(on_paper.paper.side("gather")):
        on_paper.span("wait fetch", "block", 20)()
    on_paper.span("wait gather", "u", 10)()
    on_paper.span("step", "AdamW", 1)()
    on_paper.recorder.close()
    analysis = Analysis.of(Trace.open(on_paper.recorder.path), spans=("hidden wait *",))
    assert analysis.table.of("hidden wait fetch").duration_ns.tolist() == [pytest.approx(20 * MS, abs=NEAR)]
    assert not len(analysis.table.of("wait fetch")) and len(analysis.table.of("wait gather"))


def test_what_the_device_has_not_come_to_at_the_end_is_counted(on_paper: OnPaper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_LONGEST_S", 0.05)
    on_paper.span("compute", "done", 1)()
    done = [on_paper.span("compute", f"u{number}", 1) for number in range(3)]
    on_paper.recorder.close()
    trace = Trace.open(on_paper.recorder.path)
    assert trace.notes("lanes")[-1].body == {"lanes": ["compute"], "untimed": {}, "unknown": 3}
    assert [row.key for row in rows_of(trace) if row.kind == RowKind.SPAN and row.what == "compute"] == ["done"]
    for each in done:
        each()


def test_a_device_that_fails_leaves_its_spans_unmeasured_and_the_run_alone(on_paper: OnPaper, zprof: Zprof) -> None:
    on_paper.span("wait gather", "u", 3)()
    late = on_paper.span("wait gather", "v", 3)
    on_paper.paper.fault = True
    on_paper.bus.begin("compute", "u", at=HERE)
    on_paper.bus.end("compute", "u", at=HERE)
    on_paper.recorder.close()
    on_paper.paper.fault = False
    late()
    covered = Analysis.of(Trace.open(on_paper.recorder.path)).covered
    assert str(covered.queued("wait")) == str(covered.queued("wait gather")) == "not measured on CUDA: the device failed"
    assert covered.queued("reduce") is None, "of what there was none nothing is unknown"
    told = json.loads(zprof("report", on_paper.recorder.path, "--json").stdout)["runs"][0]
    assert told["waits"] is None and told["measures"]["exposed.percent"] is None


def test_what_a_captured_stream_is_given_has_no_time_and_takes_none_away(on_paper: OnPaper) -> None:
    on_paper.paper.captures = True
    on_paper.bus.begin("compute", "captured", at=HERE)
    on_paper.bus.end("compute", "captured", at=HERE)
    on_paper.paper.captures = False
    on_paper.span("compute", "u", 2)()
    on_paper.recorder.close()
    analysis = Analysis.of(Trace.open(on_paper.recorder.path))
    compute = analysis.table.of("compute")
    assert [compute.strings[key] for key in compute.key] == ["u"] and analysis.covered.queued("compute") is None


# What readers make of it.


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    """A run on a CPU, and the same where the host queued it and a GPU did it later."""
    rows = list(sample_rows(level="alloc"))
    here = write_trace(tmp_path / "cpu.zprof", rows)
    there = write_trace(tmp_path / "gpu.zprof", on_device(rows), notes={"lanes": DEVICE_LANES}, device="cuda:0")
    return here, there


def test_a_gpus_times_say_what_a_cpus_do(twins: tuple[Path, Path], zprof: Zprof) -> None:
    here, there = (json.loads(zprof("report", path, "--json").stdout)["runs"][0] for path in twins)
    for part in ("steps", "waits", "tiers", "next"):
        assert here.get(part) == there.get(part), part
    assert here["measures"].keys() == there["measures"].keys()
    different = {name for name, value in here["measures"].items() if value != there["measures"][name]}
    assert not different
    assert there["measures"]["exposed.ms_per_step"] > 0 and there["rates"]
    assert "not measured on CUDA" not in zprof("report", twins[1]).stdout


def test_without_lanes_the_same_rows_are_not_measured(tmp_path: Path, zprof: Zprof) -> None:
    path = write_trace(tmp_path / "old.zprof", sample_rows(level="alloc"), device="cuda:0")
    assert "not measured on CUDA" in zprof("report", path).stdout
    told = json.loads(zprof("report", path, "--json").stdout)["runs"][0]
    assert (told["waits"], told["measures"]["exposed.percent"]) == (None, None) and told["measures"]["step.median_ms"] > 0


def test_memory_belongs_to_the_step_that_the_host_was_in(twins: tuple[Path, Path]) -> None:
    late, early = (Analysis.of(Trace.open(path)) for path in reversed(twins))
    assert late.steps.count == early.steps.count and late.steps.duration_ns.tolist() == early.steps.duration_ns.tolist()
    assert (late.steps.bounds - early.steps.bounds == 3 * MS).all()
    assert (late.steps.issued == early.steps.bounds).all() and (early.steps.issued == early.steps.bounds).all()
    found = [{tier: (at.time_ns, at.nbytes) for tier, at in each.moments(3).items()} for each in (late, early)]
    assert found[0] == found[1] and late.grown == early.grown


def test_steps_whose_end_the_device_did_not_come_to_are_left_out(twins: tuple[Path, Path], tmp_path: Path) -> None:
    rows = list(rows_of(Trace.open(twins[1])))
    last = max(at for at, row in enumerate(rows) if row.kind == RowKind.SPAN and row.what == "step")
    path = write_trace(tmp_path / "killed.zprof", rows[:last], notes={"lanes": DEVICE_LANES}, device="cuda:0")
    steps = Analysis.of(Trace.open(path)).steps
    assert steps.count == 4 and len(steps.issued) == 4
    no_steps = [row for row in rows if row.kind != RowKind.SPAN or row.what not in ("step", "update")]
    path = write_trace(tmp_path / "none.zprof", no_steps, notes={"lanes": DEVICE_LANES}, device="cuda:0")
    steps = Analysis.of(Trace.open(path)).steps
    assert (steps.count, steps.source) == (5, "step"), "as the host queued them"


def test_perfetto_has_a_track_for_each_stream_beside_those_of_threads(twins: tuple[Path, Path], zprof: Zprof) -> None:
    assert zprof("export", twins[1], "--format", "perfetto", "-o", "out.json").exit_code == 0
    events = json.loads(Path("out.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    by_track: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] == "X":
            by_track.setdefault(names[event["tid"]], set()).add(event["cat"])
    assert {"forward", "backward", "wait gather", "step"} <= by_track["compute"]
    assert {"queued forward", "queued gather"} <= by_track["thread 0"] and not by_track["thread 0"] & by_track["compute"]
    assert by_track["gather"] == {"gather"} and by_track["disk read"] == {"disk read"}


def test_a_timeline_has_lanes_of_what_the_device_did_and_of_what_the_host_queued(twins: tuple[Path, Path]) -> None:
    data = timeline([Trace.open(twins[1])])
    lanes = {lane["name"]: lane for lane in data["runs"][0]["lanes"]}
    assert {"passes", "exposed waits", "gathers", "reductions", "updates", "queued by the host"} <= lanes.keys()
    assert set(lanes["queued by the host"]["whats"]) >= {"queued forward", "queued wait gather"}
    assert data["units"]["waited"] > 0 and not any("not measured" in note for note in data["notes"])


def test_a_run_that_is_followed_has_the_devices_waits_and_rates(twins: tuple[Path, Path]) -> None:
    seen = []
    for path in twins:
        follower = RunFollower(path)
        seen.append(follower.look())
        follower.close()
    here, there = seen
    assert there.unmeasured is None and there.steps == here.steps and there.step_ms == here.step_ms
    assert there.exposed_ms == pytest.approx(here.exposed_ms) and [unit.name for unit in there.waiting]
    assert there.bandwidth.keys() == here.bandwidth.keys()


def test_a_trace_that_was_thinned_out_keeps_the_devices_steps_and_passes(tmp_path: Path) -> None:
    rows = on_device(sample_rows(steps=150, units=12, level="alloc"))
    whole = Analysis.of(Trace.open(write_trace(tmp_path / "whole.zprof", rows, notes={"lanes": DEVICE_LANES})))
    writer = Writer(tmp_path / "run.zprof", HEADER, limit=1 << 17)
    for at in range(0, len(rows), 512):
        writer.rows(rows[at : at + 512])
        writer.flush()
    writer.note("lanes", DEVICE_LANES)
    writer.close()
    found = Analysis.of(Trace.open(writer.path))
    assert found.trace.dropped > len(rows) // 3
    for part in ("bounds", "issued"):
        assert getattr(found.steps, part).tolist() == getattr(whole.steps, part).tolist()
    for what in ("forward", "backward"):
        assert found.table.of(what).begin_ns.tolist() == whole.table.of(what).begin_ns.tolist()
    assert len(found.table.of("compute")) < len(whole.table.of("compute"))


def test_rows_of_lanes_with_impossible_times_are_refused_in_a_line(tmp_path: Path, zprof: Zprof) -> None:
    changes: list[dict[str, Any]] = [{"ident": (1 << 62) - 1}, {"nbytes": 1 << 48}, {"nbytes": -1}]
    for number, change in enumerate(changes):
        row = Row(RowKind.SPAN, "wait gather", "u", 0, 2_000_000_000, 1 << 20, 5)._replace(**change)
        path = write_trace(tmp_path / f"{number}.zprof", [row], notes={"lanes": {"lanes": [3, None] * 4000, "untimed": []}})
        result = zprof("report", path)
        assert result.exit_code == 1 and "record the run again" in result.stderr and result.stderr.count("\n") == 1
    odd = {"lanes": {"lanes": 7, "untimed": {"wait gather": 3}}}
    path = write_trace(tmp_path / "odd.zprof", sample_rows(steps=1), notes=odd)
    assert zprof("report", path).exit_code == 0


# Simulations.


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.empty(2048, 4096, device="virtual")).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Heard:
    """What a machine gave its streams from the first step on, in nanoseconds since then."""

    def __init__(self, folder: str, **given: Any) -> None:
        import zhooks
        from zprof.recording.simulated import SimulatedRecorder

        self._zero_s: float | None = None
        self.all: list[tuple[str, str, int, int]] = []
        path = Path(folder) / "plan.zprof"
        recorder = SimulatedRecorder(path, hardware="h100", kind="gpu", world=16, argv=())

        @contextmanager
        def follow(machine: Any) -> Iterator[None]:
            machine.listeners.append(self)
            self.machine = machine
            with recorder.follow(machine):
                yield
            machine.listeners.remove(self)

        def step(*args: Any) -> None:
            self._zero_s = self.machine.now if self._zero_s is None else self._zero_s
            trains(*args)

        self.found = zhooks.simulate(build, recorder.stepping(step), world=16, steps=3, follow=follow, **given)
        recorder.close({})
        self.analysis = Analysis.of(Trace.open(path), spans=None)

    def happened(self, happening: Any) -> None:
        if self._zero_s is not None:
            zero_ns = round(self._zero_s * 1e9)
            begin_ns, end_ns = (round(at * 1e9) - zero_ns for at in (happening.begin, happening.end))
            self.all.append((happening.what, happening.stream.name, begin_ns, end_ns))

    def recorded(self, moment: Any, stream: Any) -> None: ...
    def awaited(self, moment: Any, stream: Any) -> None: ...
    def kept(self, access: Any, stream: Any) -> None: ...
    def allocated(self, address: int, nbytes: int, index: int, stream: Any) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...

    def on_streams(self, what: str) -> list[tuple[str, int, int]]:
        """(key, begin, end) of what the machine's streams were given under that name."""
        begins = f"{what} "
        return sorted((name.removeprefix(begins), begin, end) for name, _, begin, end in self.all if name.startswith(begins))

    def spans(self, what: str) -> list[tuple[str, int, int]]:
        """The same of the trace."""
        table = self.analysis.table.of(what)
        keys = [table.strings[key] for key in table.key]
        return sorted(zip(keys, table.begin_ns.tolist(), table.end_ns.tolist(), strict=True))


@on_virtual()
def test_a_simulations_transfers_and_waits_are_those_of_its_streams() -> None:
    with tempfile.TemporaryDirectory() as folder:
        heard = Heard(folder)
        assert not heard.found.races
        for what in ("gather", "reduce"):
            assert len(heard.spans(what)) > 10 and heard.spans(what) == heard.on_streams(what)
        # The device stands still in each wait, for as long as the simulation says that communication is exposed.
        busy = sorted((begin, end) for _, stream, begin, end in heard.all if stream == "compute")
        for _, begin, end in heard.spans("wait gather") + heard.spans("wait reduce"):
            assert not any(begin < over and start < end for start, over in busy)
        exposed_ns = heard.analysis.stalls.per_step_ns.tolist()
        assert exposed_ns[-1] == pytest.approx(heard.found.exposed_s * 1e9, abs=20) and exposed_ns[-1] > 0
        assert heard.analysis.steps.warm.duration_ns[-1] == pytest.approx(heard.found.step_s * 1e9, rel=0.02)


@on_virtual()
def test_a_simulations_bandwidths_are_bytes_over_the_time_that_the_hardware_takes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        heard = Heard(folder)
        rates = {rate.verb: rate for rate in heard.analysis.rates}
        for verb, kind in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
            table = heard.analysis.table.of(verb)
            taken_s = sum(heard.machine.costs.collective(kind, range(16), nbytes) for nbytes in table.nbytes.tolist())
            assert rates[verb].bytes_per_s == pytest.approx(int(table.nbytes.sum()) / taken_s, rel=1e-4)


@on_virtual()
def test_a_simulations_copies_and_disk_requests_are_those_of_its_streams() -> None:
    policy = {"optimizer": {"tier": "host"}, "parameter": {"tier": "disk"}, "activation": {"tier": "host", "min_bytes": "1KiB"}}
    with tempfile.TemporaryDirectory() as folder:
        heard = Heard(folder, policy=policy)
        assert not heard.found.races
        copied = sorted(times for name, stream, *times in heard.all if name == "copy" and stream.startswith("stream "))
        spans = sorted([begin, end] for what in ("copy h2d", "copy d2h") for _, begin, end in heard.spans(what))
        issue_ns = heard.machine.costs.issue * 1e9 + 1
        ends = {end for _, end in copied}
        assert len(spans) == len(copied) > 20
        for begin, end in spans:
            assert end in ends and any(0 <= start - begin <= issue_ns for start, over in copied if over == end)
        for what in ("disk read", "disk write"):
            times = sorted(times for name, _, *times in heard.all if name == what)
            assert times and sorted([begin, end] for _, begin, end in heard.spans(what)) == times
        table = heard.analysis.table
        assert {"stash", "unstash", "wait unstash"} <= {table.strings[what] for what in table.what}


# Scripts without zhooks.


def launches(folder: str) -> None:
    """Collectives of this rank, as if a GPU made them: its stream comes to each mark 10 ms after the one before."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    device = SimpleNamespace(now=time.perf_counter_ns(), lane="compute")

    def here() -> KnownTime:
        device.now += 10 * MS
        return KnownTime(device.lane, device.now, beside=False)

    patched = pytest.MonkeyPatch()
    patched.setattr(collectives, "here", here)
    patched.setattr(collectives, "_on_gpu", lambda value: True)
    try:
        for lane in ("compute", "compute 2"):
            device.lane = lane
            recorder = Recorder(Path(folder) / f"{lane}.zprof", nvml="off").listen()
            recorder.note("device", {"device": "cuda:0"})
            work = dist.all_reduce(torch.ones(8), async_op=True)
            assert work is not None
            work.wait()
            # What torch's NCCL group gives for one that the stream of the caller has made itself.
            watch = collectives._shared.watch
            assert watch is not None
            begun = watch._begin("all_gather", None, (torch.ones(4),))
            assert begun is not None
            watch._started(begun, (torch.ones(4), None))
            recorder.close()
    finally:
        patched.undo()
        if started:
            dist.destroy_process_group()


def test_collectives_on_a_gpu_take_as_long_as_its_stream_stands_still(tmp_path: Path) -> None:
    # In a process of its own: what hangs in torch is one a process, and others may record in that of the ranks.
    done = forked.python("-c", f"from {__name__} import launches; launches({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    analysis = Analysis.of(Trace.open(tmp_path / "compute.zprof"))
    waits, whole = analysis.table.of("wait collective"), analysis.table.of("collective")
    # Between two marks; of one that ran on the stream itself all of it.
    assert waits.duration_ns.tolist() == [10 * MS, 10 * MS]
    assert sorted(whole.duration_ns.tolist()) == [10 * MS, 20 * MS] and whole.nbytes.max() == 32
    assert analysis.covered.waits() is None
    # Streams of the script's own are waited for by events that nobody sees.
    covered = Analysis.of(Trace.open(tmp_path / "compute 2.zprof")).covered
    assert str(covered.waits()) == "not measured on CUDA: the script orders its streams itself, which is not seen"
    assert covered.queued("collective") is None


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; streams on paper hold what they can show")
def test_spans_are_those_of_torchs_profiler_within_2_percent(tmp_path: Path) -> None:
    import zhooks

    width = 4096
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]).cuda()
    attachment = zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(4096, width, device="cuda")

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, zprof.record(tmp_path / "run.zprof"):
        for number in range(5):
            with torch.profiler.record_function(f"step {number}"):
                step()
            torch.cuda.synchronize()
    attachment.detach()
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("step ")
    )
    with zprof.open(tmp_path / "run.zprof") as run:
        forwards, steps = list(run.spans("forward")), list(run.spans("step"))
        assert len(forwards) == len(steps) == 5 and run.measures["exposed.percent"] >= 0
        by_zprof = [over.end_s - begun.begin_s for begun, over in zip(forwards, steps, strict=True)]
    # The profiler's kernels between two waits of the host are one step's.
    starts = [0, *(at for at in range(1, len(kernels)) if kernels[at][0] - kernels[at - 1][1] > 1000), len(kernels)]
    by_profiler = [(kernels[stop - 1][1] - kernels[start][0]) / 1e6 for start, stop in itertools.pairwise(starts)]
    assert sorted(by_profiler)[2] == pytest.approx(sorted(by_zprof)[2], rel=0.02)
