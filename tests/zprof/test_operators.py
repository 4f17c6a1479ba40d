"""Operators of chosen steps are those of torch.profiler, on the trace's clock, and belong to modules, passes and steps."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import zprof
from tests.support import forked
from tests.support.torches import not_with_2_8
from zprof.analysis.operators import Operators
from zprof.cli import main
from zprof.recording import operators as recording
from zprof.recording.kineto import Session
from zprof.recording.schedule import Schedule
from zprof.trace.reader import Trace

STEPS = 8


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        # Of other tests of this process: where a function was compiled no FLOPs are counted.
        dynamo.counters.clear()
    return tmp_path


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4))


def train(net: nn.Module, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(net: nn.Module | None = None, steps: int = STEPS, **options: Any) -> zprof.Run:
    with zprof.record("run.zprof", level="ops", force=True, nvml="off", **options):
        train(model() if net is None else net, steps)
    return zprof.open("run.zprof")


def found_in(run: zprof.Run) -> Operators:
    found = run.operators()
    assert found is not None, run.unseen["ops.self_ms"]
    return found


def text_of(*words: str) -> str:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def by_name(rows: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Of what torch.profiler saw, too: calls and time of each name.

    As it does, an operator that is all that one of its own name did is no other call.
    """
    found: dict[str, tuple[int, float]] = {}
    children = Counter(rows["parent"].tolist())
    columns = (rows[key].tolist() for key in ("name", "kind", "duration_s", "parent"))
    for name, kind, took, parent in zip(*columns, strict=True):
        again = parent >= 0 and rows["name"][parent] == name and children[parent] == 1
        if kind != "module" and not again:
            calls, time = found.get(name, (0, 0.0))
            found[name] = calls + 1, time + took
    return found


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sessions of torch.profiler that were opened."""
    kept: list[Any] = []
    original = Session.__init__

    def init(self: Session, *args: Any) -> None:
        original(self, *args)
        kept.append(self._profile)

    monkeypatch.setattr(Session, "__init__", init)
    return kept


def test_calls_and_times_are_those_that_torch_profiler_says_of_the_same_session(sessions: list[Any]) -> None:
    run = recorded()
    [session] = [each for each in sessions if each.profiler is not None]
    theirs = {each.key: each for each in session.key_averages() if each.key != "zprof: clock"}
    ours = by_name(run.ops())
    assert ours.keys() == theirs.keys()
    for name, (calls, took) in ours.items():
        assert calls == theirs[name].count
        # Within 2 %, or what rounding to our clock costs each.
        assert took == pytest.approx(theirs[name].cpu_time_total / 1e6, rel=0.02, abs=2e-9 * calls), name
    table = {row.name: row for row in found_in(run).by("op")}
    assert {name: 3 * row.calls for name, row in table.items()} == {name: each.count for name, each in theirs.items()}
    own: defaultdict[str, float] = defaultdict(float)
    columns = run.ops()
    for name, kind, took in zip(columns["name"], columns["kind"], columns["self_s"], strict=True):
        own[name] += took if kind != "module" else 0.0
    for name, each in theirs.items():
        if name.startswith("Optimizer.step"):
            continue  # The last was open when the session ended, which torch gives no time of its own.
        assert own[name] == pytest.approx(each.self_cpu_time_total / 1e6, rel=0.02, abs=5e-9 * ours[name][0]), name


def test_operators_are_counted_once_though_storages_are_followed_in_other_steps() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        for _ in range(3):
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = {each.key: each.count for each in theirs.key_averages() if each.key.startswith("aten::")}
    ours = {name: calls for name, (calls, _) in by_name(recorded().ops()).items() if name.startswith("aten::")}
    assert ours == expected


def test_each_operator_belongs_to_a_module_a_pass_and_a_step() -> None:
    columns = recorded().ops()
    found: Counter[tuple[str, str, int]] = Counter()
    for name, module, doing, step in zip(*(columns[key] for key in ("name", "module", "pass", "step")), strict=True):
        if name == "aten::addmm" or name == "aten::mm":
            found[module, doing, step] += 1
    linears = ["0.up", "0.down", "1.up", "1.down", "2"]
    for step in (3, 4, 5):
        for path in linears:
            assert found.pop((path, "forward", step)) == 1
            # The first one's input needs no gradient.
            assert found.pop((path, "backward", step)) == (1 if path == "0.up" else 2)
    assert not found
    modules = {name for name, kind in zip(columns["name"], columns["kind"], strict=True) if kind == "module"}
    assert modules == {"Sequential", "0", "1", *linears}
    steps = [module for doing, module in zip(columns["pass"], columns["module"], strict=True) if doing == "step"]
    assert steps and set(steps) == {""}


def test_a_backwards_node_names_the_operator_that_made_it_and_gradients_their_module() -> None:
    columns = recorded().ops()
    for name, kind, cause, module in zip(*(columns[key] for key in ("name", "kind", "cause", "module")), strict=True):
        if kind == "node" and name.endswith("AddmmBackward0"):
            assert columns["name"][cause] == "aten::addmm" and columns["module"][cause] == module
            assert columns["pass"][cause] == "forward"
    adding = {module for name, module in zip(columns["name"], columns["module"], strict=True) if "AccumulateGrad" in name}
    assert adding == {"0.up", "0.down", "1.up", "1.down", "2"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_computes_again_is_recomputed(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x.requires_grad_(), use_reentrant=reentrant)

    columns = recorded(Net()).ops()
    ran = Counter(
        (module, doing) for name, module, doing in zip(columns["name"], columns["module"], columns["pass"], strict=True)
        if name == "aten::addmm"
    )  # fmt: skip
    assert ran[("block.up", "forward")] == ran[("block.up", "recompute")] == 3


def test_operators_lie_in_the_steps_and_modules_of_the_traces_own_clock() -> None:
    run = recorded()
    columns, spans = run.ops(), list(run.spans("step"))
    assert len(spans) == STEPS
    error_s = found_in(run).shown.error_ns / 1e9
    assert 0 < error_s < 0.1
    for name, begin, took, step in zip(*(columns[key] for key in ("name", "begin_s", "duration_s", "step")), strict=True):
        if name == "aten::_foreach_add_":
            assert spans[step].begin_s - error_s <= begin and begin + took <= spans[step].end_s + error_s
    parents = columns["parent"]
    for row, parent in enumerate(parents):
        if parent >= 0:
            assert columns["begin_s"][parent] <= columns["begin_s"][row] + 1e-12
            assert columns["where"][parent] == columns["where"][row]


def test_steps_that_are_asked_for_are_recorded_in_windows_of_their_own() -> None:
    run = recorded(ops_steps="1:2,4:7")
    first, second = found_in(run).windows
    assert (first.title, second.title) == ("step 1", "steps 4 to 6")
    assert set(run.ops()["step"]) >= {1, 4, 5, 6}
    assert not set(run.ops()["step"]) & {0, 2, 3, 7}
    text = text_of("report", "run.zprof")
    assert "operators of step 1" in text and "also recorded: steps 4 to 6" in text
    assert "storages made in step 1: not followed" in text and "storages made in steps 4 to 6: not followed" in text


def test_bytes_of_other_steps_are_as_at_level_alloc() -> None:
    run = recorded()
    gc.collect()
    with zprof.record("alloc.zprof", level="alloc", nvml="off"):
        train(model())
    other = zprof.open("alloc.zprof")
    assert run.level == "ops" and Trace.open(Path("run.zprof")).header.level == "alloc"
    for category in ("parameter", "gradient", "activation"):
        mine, theirs = run.peak("device", category, step=7), other.peak("device", category, step=7)
        assert mine is not None and theirs is not None and mine.nbytes == theirs.nbytes > 0, category
    assert other.unseen["ops.self_ms"] == "not recorded: operators are at --level ops"


@pytest.mark.parametrize("what", ["inference", "all"])
def test_bytes_of_storages_that_were_never_followed_are_not_seen(what: str) -> None:
    net = model()
    with zprof.record("run.zprof", level="ops", ops_steps="all" if what == "all" else None, nvml="off"):
        if what == "all":
            train(net)
        else:
            with torch.inference_mode():
                for _ in range(STEPS):
                    net(torch.ones(8, 16))
    run = zprof.open("run.zprof")
    assert run.peak("device") is None and "storages were not followed, which at level ops begins" in run.unseen["device.peak"]
    assert "device: nothing: storages were not followed" in text_of("report", "run.zprof")


def test_a_torch_without_what_a_window_takes_records_storages_as_at_level_alloc(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(**options: Any) -> None:
        raise TypeError(f"found {options.keys()}")

    monkeypatch.setattr("zprof.recording.kineto._ExperimentalConfig", lacks)
    with pytest.warns(RuntimeWarning, match="operators are not recorded, not with torch"):
        run = recorded()
    assert "not with torch" in run.unseen["ops.self_ms"]
    peak = run.peak("device", "activation", step=1)
    assert peak is not None and peak.nbytes > 0


@not_with_2_8("it compiles again whenever a recording looks on")
def test_a_compiled_model_is_compiled_once() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net: Any = torch.compile(model(), backend=backend, fullgraph=True)
    try:
        run = recorded(net, steps=12, ops_steps="1:2,4:6,8:10")
    finally:
        torch._dynamo.reset()
    assert len(graphs) == 1
    assert [window.title for window in found_in(run).windows] == ["step 1", "steps 4 to 5", "steps 8 to 9"]
    assert Counter(run.ops()["name"].tolist())["aten::addmm"] == 5 * 5
    # Nor do hooks that count FLOPs come and go.
    assert "torch.compile has compiled part of it" in run.unseen["flops.per_step"]


def test_a_leak_is_found_beside_recorded_operators() -> None:
    kept = []
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with zprof.record("run.zprof", level="ops", nvml="off"):
        for _ in range(12):
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.ones(1 << 14))
    grown = zprof.open("run.zprof").growth()
    assert grown and grown[0].per_step > 1 << 14


def test_the_script_may_use_torch_profiler_itself() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own: list[int] = []
    with zprof.record("run.zprof", level="ops", ops_steps="2:6,8:9", nvml="off"):
        for step in range(10):
            if step == 4:
                mine = profile(activities=[ProfilerActivity.CPU])
                mine.start()
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                mine.stop()
                own.append(sum(each.count for each in mine.key_averages() if each.key == "aten::addmm"))
    assert own == [5 * 3]
    found = found_in(zprof.open("run.zprof"))
    [window] = found.windows
    assert window.title == "steps 2 to 3" and window.why == recording._SCRIPTS_OWN
    assert "the script uses torch.profiler itself" in text_of("report", "run.zprof")


def test_torch_profiler_of_another_thread_is_not_disturbed() -> None:
    net = model()
    seen: list[int] = []

    def other() -> None:
        with profile(activities=[ProfilerActivity.CPU]) as mine:
            net(torch.ones(8, 16))
        seen.append(sum(each.count for each in mine.key_averages() if each.key == "aten::addmm"))

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with zprof.record("run.zprof", level="ops", nvml="off"):
        for step in range(STEPS):
            if step == 4:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
    assert seen == [5]
    assert found_in(zprof.open("run.zprof")).shown.title == "step 3"


def test_threads_that_python_starts_have_a_track_of_their_own() -> None:
    net, other = model(), nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with zprof.record("run.zprof", level="ops", nvml="off"):
        for _ in range(STEPS):
            thread = threading.Thread(target=lambda: other(torch.ones(2, 16)), name="loader")
            thread.start()
            thread.join()
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
    columns = zprof.open("run.zprof").ops()
    threads = {where for where, name in zip(columns["where"], columns["name"], strict=True) if name == "aten::addmm"}
    assert len(threads) >= 2


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_forwards_count_where_no_optimizer_steps(guard: Any) -> None:
    net = model().eval()
    with zprof.record("run.zprof", level="ops", nvml="off"), guard():
        for _ in range(STEPS):
            net(torch.ones(8, 16))
    run = zprof.open("run.zprof")
    found = found_in(run)
    assert found.shown.title == "forwards 3 to 5"
    columns = run.ops()
    passes = {doing for doing, name in zip(columns["pass"], columns["name"], strict=True) if name == "aten::addmm"}
    assert passes == {"evaluation"}
    assert Counter(columns["name"])["aten::addmm"] == 5 * 3


def test_a_script_without_steps_or_forwards_is_told_what_records_it() -> None:
    with zprof.record("run.zprof", level="ops", nvml="off"):
        torch.ones(3).add(1)
    why = zprof.open("run.zprof").unseen["ops.self_ms"]
    assert "neither an optimizer step nor a module's forward" in why and "--ops-steps" in why
    assert why in text_of("report", "run.zprof").replace("\n", " ")
    with zprof.record("all.zprof", level="ops", ops_steps="all", nvml="off"):
        torch.ones(3).add(1)
    found = found_in(zprof.open("all.zprof"))
    assert found.shown.title == "the recording" and found.shown.why == "the recording ended"
    assert "aten::add" in {row.name for row in found.by("op")}
    assert zprof.open("all.zprof").unseen["ops.self_ms"] == "the recorded operators do not cover a whole step"


def test_a_window_that_takes_too_long_is_ended_by_a_thread_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LONGEST_S", 0.2)
    monkeypatch.setattr(recording, "_BEAT_S", 0.1)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with zprof.record("run.zprof", level="ops", ops_steps="1:100000", nvml="off") as recorder:
        part = next(each for each in recorder._parts if isinstance(each, recording.Operators))
        steps = 0
        while part._window is not None or steps < 3:
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        for _ in range(3):
            net(torch.ones(8, 16)).square().mean().backward()
            optimizer.step()
    run = zprof.open("run.zprof")
    assert found_in(run).shown.why == "0 s had passed"
    # Storages are followed again.
    peak = run.peak("device", "activation", step=len(run.steps) - 1)
    assert peak is not None and peak.nbytes > 0


def test_only_so_many_events_of_a_window_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_EVENTS", 100)
    run = recorded()
    found = found_in(run)
    assert len(found.shown.events) == 100 and found.shown.left_out > 100
    assert "operators of the steps are not in the trace" in run.unseen["ops.self_ms"]
    assert "events are not in the trace" in text_of("report", "run.zprof")


FORKS = """
import os, sys, torch, zprof
from torch import nn
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with zprof.record("run.zprof", level="ops", nvml="off"):
    for step in range(8):
        if step == 4:
            pid = os.fork()
            if pid == 0:
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                from torch.profiler import profile
                with profile() as mine:
                    net(torch.ones(2, 4))
                os._exit(7 if any(each.key == "aten::addmm" for each in mine.key_averages()) else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("done")
"""


def test_a_child_forked_in_a_window_works_and_the_window_goes_on(folder: Path) -> None:
    done = forked.python("-c", FORKS, at=folder)
    assert (done.returncode, done.stdout) == (0, "7\ndone\n"), done.stderr
    assert "USDT" not in done.stderr
    assert found_in(zprof.open("run.zprof")).shown.title == "steps 3 to 5"


def test_the_lines_that_called_operators_are_the_users() -> None:
    columns = recorded(ops_stack=True).ops()
    lines = {line for name, line in zip(columns["name"], columns["line"], strict=True) if name == "aten::relu"}
    assert len(lines) == 1 and "test_operators.py" in lines.pop()


def test_the_report_says_what_took_the_step_by_operator_and_by_module() -> None:
    recorded()
    text = text_of("report", "run.zprof")
    assert "operators of steps 3 to 5, per step" in text and "aten::addmm" in text and "FLOP/s" in text
    assert "the host was in operators" in text
    by_module = text_of("report", "run.zprof", "--by", "module")
    assert "operators of steps 3 to 5" in by_module
    body = json.loads(text_of("report", "run.zprof", "--by", "op", "--json"))
    ran = body["runs"][0]["operators"]
    rows = {row["name"]: row for row in ran["rows"]}
    assert rows["aten::addmm"]["calls"] == 5 and rows["aten::addmm"]["flops_per_s"] > 0
    assert body["by"] == "category" and ran["by"] == "op"
    measures = body["runs"][0]["measures"]
    assert measures["ops.self_ms"] == pytest.approx(ran["in_operators_ns"] / 1e6)
    assert measures["gpu.idle_percent"] is None


def test_runs_are_compared_by_operator() -> None:
    recorded()
    Path("run.zprof").rename("before.zprof")
    recorded(nn.Sequential(model(), nn.Linear(4, 4)))
    text = text_of("diff", "before.zprof", "run.zprof")
    assert "time of a step, by operator" in text
    body = json.loads(text_of("diff", "before.zprof", "run.zprof", "--json"))
    found = {each["name"]: each for each in body["operators"]}
    assert (found["aten::addmm"]["a_calls"], found["aten::addmm"]["b_calls"]) == (5, 6)


def test_a_schedule_that_is_none_is_refused_by_name() -> None:
    for word in ("5", "5:5", "6:3", "3:6,5:9", "-1:2", ""):
        with pytest.raises(ValueError, match="ops_steps: expected steps such as 10:13"):
            zprof.Recorder("x.zprof", level="ops", ops_steps=word)
    with pytest.raises(ValueError, match='expected "ops" with ops_steps'):
        zprof.Recorder("x.zprof", level="alloc", ops_steps="3:6")
    done = CliRunner().invoke(main, ["run", "--ops-steps", "3:6", "x.py"])
    assert done.exit_code == 2 and "--ops-steps: expected --level ops" in done.output
    assert str(Schedule.of("3:6, 8:9")) == "3:6,8:9" and str(Schedule.of("all")) == "all"


def test_columns_make_a_table_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    run = recorded()
    table = pandas.DataFrame(run.ops())
    assert len(table) == len(found_in(run).shown.events)
    products = table[(table.name == "aten::addmm") & (table.step == 4)]
    assert list(products.module) == ["0.up", "0.down", "1.up", "1.down", "2"]


def damaged(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("first", "count", "names", "columns"):
        yield {name: value for name, value in body.items() if name != key}
    yield body | {"count": 1 << 40}
    yield body | {"names": ["x"] * (1 << 20)}
    for column in body["columns"]:
        yield body | {"columns": body["columns"] | {column: [0, b"\xff" * (body["count"] * 8)]}}
        yield body | {"columns": body["columns"] | {column: [1 << 60, b""]}}
        yield body | {"columns": body["columns"] | {column: [-5, b""]}}
    for track in (5, -1):
        yield body | {"columns": body["columns"] | {"track": [track, b""]}}


@pytest.mark.slow
def test_notes_that_were_forged_are_one_line(folder: Path) -> None:
    from tests.support.zprof_traces import sample_rows, write_trace

    recorded()
    trace = Trace.open(folder / "run.zprof")
    windows = [note.body for note in trace.notes("operators")]
    [body] = [note.body for note in trace.notes("operator events")][:1]
    for number, wrong in enumerate(damaged(body)):
        path = write_trace(folder / f"{number}.zprof", list(sample_rows(steps=2, units=1)), notes={
            "operators": windows[-1], "operator events": wrong,
        })  # fmt: skip
        text = text_of("report", str(path))
        assert "cannot be read" in text or "operators of" in text
