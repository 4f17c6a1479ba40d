"""What a GPU does belongs to the operator and module that launched it, and its idle time has a reason; of synthetic events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zprof
from tests.support.zprof_traces import HEADER, sample_rows
from zprof.analysis.operators import Operators
from zprof.cli import main
from zprof.recording.joining import Passage, joined
from zprof.recording.kineto import KERNEL, MEMCPY, OPERATOR, RUNTIME, Seen
from zprof.trace.operators import EVENTS, PASSES, WINDOW, Events, bodies, events_of
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

FORWARD, ENDS = PASSES.index("forward"), -1
THREAD, MS = 4321, 1_000_000
BEGIN = 2_000_000_000


def seen(*events: tuple[Any, ...]) -> Seen:
    """Of (name, kind, begin ms, end ms, id, linked, stream or None for the host)."""
    found = Seen(begin_ns=BEGIN, end_ns=BEGIN + 100 * MS)
    for name, kind, begin, end, ident, linked, stream in events:
        found.name.append(name)
        found.kind.append(kind)
        found.begin.append(BEGIN + int(begin * MS))
        found.end.append(BEGIN + int(end * MS))
        found.thread.append(1 if stream is None else 0)
        found.end_thread.append(1 if stream is None else 0)
        found.lane.append(THREAD if stream is None else stream)
        found.device.append(-1 if stream is None else 0)
        found.sequence.append(-1)
        found.forward_thread.append(0)
        found.scope.append(0)
        found.id.append(ident)
        found.linked.append(linked)
        found.line.append("")
    return found


#: A step of 20 ms: two products in blocks.0 and blocks.1, the second called late; a copy that was waited for.
STEP = seen(
    ("aten::linear", OPERATOR, 0.5, 2, 10, 0, None),
    ("aten::addmm", OPERATOR, 1, 2, 11, 0, None),
    ("cudaLaunchKernel", RUNTIME, 1.2, 1.4, 501, 11, None),
    ("aten::addmm", OPERATOR, 9, 10, 12, 0, None),
    ("cudaLaunchKernel", RUNTIME, 9.2, 9.4, 502, 12, None),
    ("aten::item", OPERATOR, 10.5, 16, 13, 0, None),
    ("aten::_local_scalar_dense", OPERATOR, 10.6, 15.9, 14, 0, None),
    ("cudaMemcpyAsync", RUNTIME, 10.7, 10.8, 503, 14, None),
    ("cudaStreamSynchronize", RUNTIME, 10.9, 15.8, 504, 14, None),
    ("aten::mul", OPERATOR, 17, 18, 15, 0, None),
    ("cudaLaunchKernel", RUNTIME, 17.2, 17.4, 505, 15, None),
    ("gemm<128>", KERNEL, 2, 5, 501, 11, 7),
    ("gemm<128>", KERNEL, 9.6, 12.6, 502, 12, 7),
    ("Memcpy DtoH", MEMCPY, 12.6, 15.6, 503, 14, 7),
    ("vectorized_mul", KERNEL, 17.6, 18.6, 505, 15, 20),
)
LOG = [
    Passage(BEGIN, THREAD, 0, "blocks.0.fc", FORWARD),
    Passage(BEGIN + 3 * MS, THREAD, 0, "blocks.0.fc", ENDS),
    Passage(BEGIN + 8 * MS, THREAD, 0, "blocks.1.fc", FORWARD),
    Passage(BEGIN + int(16.5 * MS), THREAD, 0, "blocks.1.fc", ENDS),
]


def write(path: Path, events: Events, tracks: Sequence[tuple[int, int]], *, end_ns: int = BEGIN + 20 * MS) -> Path:
    writer = Writer(path, replace(HEADER, device="cuda:0"))
    writer.rows(list(sample_rows(steps=2, units=1, start_ns=BEGIN - 100 * MS)))
    writer.note(WINDOW, {
        "window": 0, "begin_ns": BEGIN, "end_ns": end_ns, "counted": "step", "first": 3, "bounds": [BEGIN, end_ns], "why": "",
        "events": len(events), "left_out": 0, "stack": False, "followed": True, "error_ns": 500, "activities": ["CPU", "CUDA"],
        "tracks": [["stream", f"cuda:{device}", at] if device >= 0 else ["thread", "MainThread", 0] for device, at in tracks],
    })  # fmt: skip
    for body in bodies(events, 0):
        writer.note(EVENTS, body)
    writer.close()
    return path


@pytest.fixture
def run(tmp_path: Path) -> zprof.Run:
    events, tracks, left_out = joined(STEP, LOG)
    assert left_out == 0
    return zprof.open(write(tmp_path / "run.zprof", events, tracks))


def operators_of(run: zprof.Run) -> Operators:
    found = run.operators()
    assert found is not None, run.unseen["ops.self_ms"]
    return found


def test_a_kernel_belongs_to_the_call_operator_module_and_pass_that_launched_it(run: zprof.Run) -> None:
    columns = run.ops()
    kernels = np.flatnonzero(columns["name"] == "gemm<128>")
    kernels = kernels[np.argsort(columns["begin_s"][kernels])]
    for row, module in zip(kernels, ("blocks.0.fc", "blocks.1.fc"), strict=True):
        call = columns["cause"][row]
        assert (columns["name"][call], columns["name"][columns["parent"][call]]) == ("cudaLaunchKernel", "aten::addmm")
        assert (columns["module"][row], columns["pass"][row], columns["step"][row]) == (module, "forward", 3)
        assert (columns["where"][row], columns["stream"][row]) == ("cuda:0", 7)
        assert columns["device_s"][columns["parent"][call]] == pytest.approx(0.003)


def test_the_longest_kernels_say_what_launched_them(run: zprof.Run) -> None:
    [gemm, copy, mul] = operators_of(run).by("kernel")
    assert (gemm.name, gemm.calls, gemm.device_ns) == ("gemm<128>", 2, 6 * MS)
    assert gemm.mostly in ("aten::addmm, blocks.0.fc", "aten::addmm, blocks.1.fc")
    assert (copy.name, copy.mostly) == ("Memcpy DtoH", "aten::_local_scalar_dense, blocks.1.fc")
    assert (mul.name, mul.device_ns, mul.mostly) == ("vectorized_mul", 1 * MS, "aten::mul")
    modules = {row.name: row.device_ns for row in operators_of(run).by("module")}
    assert modules["blocks.0"] == 3 * MS and modules["blocks.1"] == 6 * MS


def test_an_idle_device_waits_for_the_host_by_the_module_that_called_late(run: zprof.Run) -> None:
    [idle] = operators_of(run).idle()
    # Before the first kernel, until blocks.1 calls, until the host has its answer, and behind the last.
    assert idle.idle_ns == pytest.approx((2 + 4.6 + 2 + 1.4) * MS)
    assert idle.reasons == pytest.approx({"launch": (2 + 4.6 + 1.4) * MS, "sync": 2 * MS, "device": 0})
    assert idle.modules["blocks.1"] == pytest.approx(4.6 * MS) and idle.modules["blocks.0"] == pytest.approx(2 * MS)
    assert run.measures["gpu.idle_percent"] == pytest.approx(50)
    assert run.measures["gpu.launch_bound_percent"] == pytest.approx(40)
    assert run.measures["gpu.busy_ms"] == pytest.approx(10)


def test_what_was_called_for_before_the_gap_waited_for_the_device(tmp_path: Path) -> None:
    events, tracks, _ = joined(
        seen(
            ("cudaLaunchKernel", RUNTIME, 1, 1.1, 501, 0, None),
            ("cudaLaunchKernel", RUNTIME, 1.2, 1.3, 502, 0, None),
            ("first", KERNEL, 2, 5, 501, 0, 7),
            ("second", KERNEL, 8, 20, 502, 0, 20),
        ),
        [],
    )
    [idle] = operators_of(zprof.open(write(tmp_path / "run.zprof", events, tracks))).idle()
    assert idle.reasons == pytest.approx({"launch": 2 * MS, "sync": 0, "device": 3 * MS})


def test_calls_that_wait_are_said_once_with_their_module(run: zprof.Run) -> None:
    syncs = {call: (where, calls) for call, where, calls, _ in operators_of(run).syncs()}
    assert syncs == {"aten::item (cudaStreamSynchronize)": ("blocks.1.fc", 1)}
    assert run.measures["ops.sync_ms"] == pytest.approx(4.9)


def test_the_report_says_so_in_words(run: zprof.Run) -> None:
    text = CliRunner().invoke(main, ["report", str(run.path)]).output
    assert "cuda:0 was idle 50% of the 20 ms: 40% the host had not launched anything yet (launch-bound)" in text
    assert "blocks.1 23%" in text and "self GPU" in text and "gemm<128>" in text


def test_perfetto_gets_nested_slices_and_arrows_from_launches(run: zprof.Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = CliRunner().invoke(main, ["export", str(run.path), "--format", "perfetto", "-o", str(path)])
    assert done.exit_code == 0, done.output
    events = json.loads(path.read_text())["traceEvents"]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each.get("name") == "thread_name"}
    assert {"stream 7 of cuda:0", "stream 20 of cuda:0", "MainThread (thread 0): operators"} <= set(names.values())
    slices = [each for each in events if each["ph"] == "X"]
    check_nesting(slices)
    [copy] = [each for each in slices if each["name"] == "Memcpy DtoH"]
    assert copy["args"] == {"pass": "forward", "module": "blocks.1.fc", "step": 3} and copy["cat"] == "memcpy"
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert len(starts) == 4 and starts.keys() == ends.keys()
    for ident, start in starts.items():
        assert inside(start, slices) in ("cudaLaunchKernel", "cudaMemcpyAsync")
        assert inside(ends[ident], slices) in ("gemm<128>", "Memcpy DtoH", "vectorized_mul")


def check_nesting(slices: Sequence[dict[str, Any]]) -> None:
    """Perfetto moves what begins inside another slice of its thread and ends outside."""
    opened: dict[tuple[int, int], list[float]] = {}
    for each in slices:
        stack = opened.setdefault((each["pid"], each["tid"]), [])
        begin, end = round(each["ts"] * 1000), round((each["ts"] + each["dur"]) * 1000)
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], each
        stack.append(end)


def inside(arrow: dict[str, Any], slices: Sequence[dict[str, Any]]) -> str:
    """The innermost slice that an end of an arrow lies in."""
    holding = [
        each for each in slices
        if (each["pid"], each["tid"]) == (arrow["pid"], arrow["tid"]) and each["ts"] <= arrow["ts"] <= each["ts"] + each["dur"]
    ]  # fmt: skip
    return str(min(holding, key=lambda each: each["dur"])["name"])


@pytest.mark.slow
def test_a_million_events_are_read_in_chunks_and_drawn_within_the_bound(tmp_path: Path) -> None:
    count = 1 << 18
    begin = BEGIN + np.arange(count) * 100
    zeros, none = np.zeros(count, np.int64), np.full(count, -1)
    events = Events(
        [f"aten::op{number}" for number in range(50)] + ["blocks.0.fc"],
        name=np.arange(count) % 50, module=zeros + 50, line=none, kind=zeros, doing=zeros + 1, track=zeros,
        begin_ns=begin, duration_ns=zeros + 90, parent=none, cause=none,
    )  # fmt: skip
    path = write(tmp_path / "run.zprof", events, [(-1, THREAD)], end_ns=int(begin[-1]) + 100)
    assert path.stat().st_size < 12 * count
    again = events_of([note.body for note in Trace.open(path).notes(EVENTS)])
    for name, column in events.columns().items():
        assert bool((again.columns()[name] == column).all()), name
    found = operators_of(zprof.open(path))
    assert sum(row.calls for row in found.by("op")) == count
    done = CliRunner().invoke(main, ["export", str(path), "--format", "perfetto"])
    assert done.exit_code == 0 and "of the shortest left out" in done.output, done.output
    assert path.with_suffix(".perfetto.json").stat().st_size < 85_000_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_a_real_gpu_are_recorded_and_belong_to_modules(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with zprof.record(tmp_path / "run.zprof", level="ops", nvml="off"):
        for _ in range(8):
            net(torch.ones(64, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = zprof.open(tmp_path / "run.zprof")
    columns = run.ops()
    modules = {module for kind, module in zip(columns["kind"], columns["module"], strict=True) if kind == "kernel"}
    assert {"0", "1", "2"} <= modules
    for row in np.flatnonzero(columns["kind"] == "kernel").tolist():
        assert columns["cause"][row] >= 0
    assert 0 <= run.measures["gpu.idle_percent"] < 100
