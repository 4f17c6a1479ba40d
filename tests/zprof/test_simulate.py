"""``zprof simulate``: its trace is the simulation, every command reads it as one, and diff sets it beside a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pool
from tests.support.torches import on_a_device_in_python
from tests.support.zprof_command import WRITE_RESULTS, Zprof
from tests.support.zprof_traces import spans_of
from zprof.analysis.spans import lanes_of
from zprof.trace.reader import Trace

JOB = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer, rows=1024):
    print("a step")
    model(torch.empty(rows, 512, device="virtual")).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def small():
    return build, step

def huge():
    return build, lambda *given: step(*given, rows=1 << 25)

def first():
    rows = iter((1 << 25, 1024, 1024))
    return build, lambda *given: step(*given, rows=next(rows))

def reading():
    def read(model, optimizer):
        print(model(torch.empty(4, 512, device="virtual")).sum().item())
    return build, read

def broken():
    def fail(model, optimizer):
        raise ValueError("no such batch")
    return build, fail

def number():
    return (lambda: 3), step

def ended():
    batches = iter([1024])
    def loop(model, optimizer):
        for rows in batches:
            step(model, optimizer, rows)
    return build, loop

def staged(fails=None):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def stages(mesh):
        pp, model = mesh["pp"], nn.Linear(512, 512)
        stage = PipelineStage(model, pp.get_local_rank(), pp.size(), torch.device("virtual"), group=pp.get_group())
        return model, None, Schedule1F1B(stage, 4, loss_fn=lambda out, target: out.sum()), pp.get_local_rank()

    def trains(model, optimizer, schedule, place):
        if place == fails:
            raise ValueError("no such stage")
        rows = torch.empty(64, 512, device="virtual")
        schedule.step(rows) if place == 0 else schedule.step(target=rows)
        model.zero_grad()
    return stages, trains

def one_fails():
    return staged(fails=1)
"""
TIERED = """
[parameter]
tier = "disk"
[gradient]
tier = "host"
[optimizer]
tier = "host"
[activation]
tier = "host"
min_bytes = "64KiB"
[units]
min_numel = 0
"""


def line_of(words: str) -> int:
    """Where the job says so."""
    return next(number for number, line in enumerate(JOB.splitlines(), 1) if words in line)


#: Words after ``zprof simulate``, by the name under which their results are kept.
COMMANDS = {
    "small": "job.py:small --nodes 2 --mesh replicate=2,shard=8 -o small.zprof --steps 3 --json",
    "again": "job.py:small --nodes 2 --mesh replicate=2,shard=8 -o again.zprof --steps 3 --json",
    "tiered": "job.py:small --policy tiered.toml -o tiered.zprof --json",
    "text": "job:small --ranks 2",
    "huge": "job.py:huge --hardware rtx4090 -o huge.zprof",
    "first": "job.py:first --hardware rtx4090 --ranks 1 --steps 3 --json",
    "staged": "job.py:staged --ranks 4 --mesh pp=2,dp=2 --json",
    "one stage": "job.py:one_fails --ranks 4 --mesh pp=2,dp=2",
    "stages": "job.py:staged --ranks 4 --mesh pp=2,dp=2 -o stages.zprof",
    "unknown axis": "job.py:small --ranks 4 --mesh pipe=2,dp=2",
    "near": "job.py:small --hardware h10",
    "reading": "job.py:reading -o reading.zprof",
    "broken": "job.py:broken -o broken.zprof",
    "number": "job.py:number",
    "missing": "job.py:smal",
    "mesh": "job.py:small --mesh shard=3",
    "axes": "job.py:small --mesh shard",
    "both": "job.py:small --nodes 1 --ranks 2",
    "many": "job.py:small --nodes 1000000 -o many.zprof",
    "exists": "job.py:small -o job.py",
    "policy": "job.py:small --policy none.toml -o policy.zprof",
    "late": "job.py:small --slow 5:compute=2 --slow 0-3:compute=1.5,link=2 --allocator expandable_segments:True "
    "-o late.zprof --json",
    "full": "job.py:huge --hardware rtx4090 --ranks 1 --allocator= --no-races --json",
    "ended": "job.py:ended -o ended.zprof",
    "slow": "job.py:small --slow 5",
    "faster": "job.py:small --slow 5:compute=0.5",
    "nobody": "job.py:small --slow 8:compute=2",
    "backwards": "job.py:small --slow 5-3:compute=2",
    "setting": "job.py:small --allocator expandable_segment:True",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, virtual_ranks: Pool) -> Path:
    """The folder with the results of all `COMMANDS`."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "job.py").write_text(JOB)
    (folder / "tiered.toml").write_text(TIERED)
    virtual_ranks.run(WRITE_RESULTS, folder=str(folder), command="simulate", words=COMMANDS)
    return folder


def result(made: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / f"{name}.result").read_text())
    return found


def rows_of(path: Path) -> Iterator[tuple[Any, ...]]:
    trace = Trace.open(path)
    for rows in trace.chunks():
        names = [trace.strings[what] for what in rows.what], [trace.strings[key] for key in rows.key]
        yield from zip(rows.kind.tolist(), *names, rows.nbytes.tolist(), rows.time_ns.tolist(), strict=True)
    trace.close()


def measures(zprof: Zprof, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zprof("check", path, "--json").stdout)["runs"][0]["measures"]
    return found


@on_a_device_in_python
@pytest.mark.parametrize("name", ["small", "tiered"])
def test_the_trace_says_what_the_simulation_says(made: Path, zprof: Zprof, name: str) -> None:
    found = json.loads(result(made, name)["out"])["simulation"]
    seen = measures(zprof, made / f"{name}.zprof")
    assert seen["device.peak"] == found["device"]["nbytes"] and seen["host.peak"] == found["host"]["nbytes"]
    assert seen["step.median_ms"] == pytest.approx(found["step_s"] * 1e3, rel=0.02)
    held = {"parameter", "gradient", "optimizer"}
    assert all(seen[f"{'host' if name == 'tiered' else 'device'}.{each}.peak"] for each in held - {"parameter"})
    assert (seen["disk.parameter.peak"] > 0) == (name == "tiered")
    assert seen["rss.peak"] is None and seen["rows.dropped"] == 0


@on_a_device_in_python
def test_nothing_of_this_computer_is_in_the_trace(made: Path) -> None:
    rows = list(rows_of(made / "small.zprof"))
    assert rows == list(rows_of(made / "again.zprof")) and len(rows) > 200
    assert rows[0][4] == 0
    header = Trace.open(made / "small.zprof").header
    assert (header.simulated, header.world, header.host, header.pid) == ("h100", 16, "h100 (simulated)", 0)


@on_a_device_in_python
def test_transfers_and_operations_have_the_times_of_their_streams(made: Path) -> None:
    trace = Trace.open(made / "small.zprof")
    table, lanes = spans_of(trace), lanes_of(trace)
    found: dict[str, list[tuple[int, int]]] = {}
    for what, lane in (("operation", "compute"), ("gather", "gather over shard"), ("reduce", "reduce over replicate")):
        mine = table.of(what)
        on = [lanes[number] for number in mine.thread.tolist()]
        # What becomes of a sum that was reduced is computed on a stream of its own.
        assert len(mine) and (mine.duration_ns > 0).all() and set(on) - {"reduce"} == {lane}
        times = zip(on, mine.begin_ns.tolist(), mine.end_ns.tolist(), strict=True)
        found[what] = [(begin, end) for name, begin, end in times if name == lane]
        ordered = all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found[what]))
        assert ordered or what == "reduce", "it has a stream for each axis, the others one"
    # A prefetched gather runs while the device computes.
    compute = found["operation"]
    assert any(begin < end_too and begin_too < end for begin, end in found["gather"] for begin_too, end_too in compute)


@on_a_device_in_python
def test_the_text_says_what_to_do_next_and_a_jobs_own_words_go_to_stderr(made: Path) -> None:
    found = result(made, "text")
    assert found["code"] == 0 and found["out"].startswith("h100 x 2: ")
    assert "one node of " not in found["out"], "it was said how many ranks"
    assert "\nnext\n" in found["out"] and "-o plan.zprof\n" in found["out"]
    assert found["err"] == "zprof: simulating 2 steps of job:small on h100 x 2 ...\n" + "a step\n" * 2
    said = json.loads(result(made, "small")["out"])
    assert (said["nodes"], said["fits"], said["trace"], said["version"]) == (2, True, "small.zprof", 1)
    assert said["simulation"]["world"] == 16 and said["simulation"]["races"] == []


@on_a_device_in_python
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("near", 1, 'hardware must be one of a100-80, b200, h100, h200, rtx4090, v100-32, found "h10"; did you mean h100?'),
        ("reading", 1, f"/job.py:{line_of('item()')} reads values. Expected code that needs no values"),
        ("broken", 1, f"/job.py:{line_of('no such batch')}: step of job.py:broken raised ValueError: no such batch"),
        ("number", 1, "simulate expected that build returns a model, or a model and its optimizer, found int."),
        ("one stage", 1, f"/job.py:{line_of('no such stage')}: step of job.py:one_fails raised ValueError: no such stage"),
        ("stages", 2, "-o: expected a mesh without pp, as a trace has one rank for all, found pp=2; drop one"),
        ("unknown axis", 1, "expected a mesh of axes 'shard' or 'dp' or 'fsdp' or 'dp_shard', 'replicate' or"),
        ("missing", 2, "did you mean small?"),
        ("mesh", 2, "--mesh: expected axes whose sizes multiply to 8 ranks, found 3"),
        ("axes", 2, "expected sizes of axes such as replicate=16,shard=64"),
        ("both", 2, "--ranks: expected --nodes or --ranks, found both"),
        ("many", 2, "--nodes 1000000: expected at most 1,048,576 ranks, found 8,000,000"),
        ("exists", 1, "job.py: is the input"),
        ("policy", 1, "none.toml: no such policy file"),
        ("ended", 1, "found that call 2 of 2 ran nothing on the device."),
        ("slow", 2, "'5': expected ranks and how many times as long they take, such as 5:compute=1.5"),
        ("backwards", 2, "'5-3:compute=2': expected ranks and how many times as long they take"),
        ("faster", 1, "slow expected compute to be a factor of at least 1.0, by which it takes longer, found 0.5."),
        ("nobody", 1, "slow expected ranks as numbers from 0 to 7, found [8]."),
        ("setting", 1, "did you mean expandable_segments?"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line_and_leaves_no_file(made: Path, name: str, code: int, said: str) -> None:
    found = result(made, name)
    assert found["code"] == code and found["out"] == "" and said in found["err"].strip().splitlines()[-1]
    assert "Traceback" not in found["err"] and not (made / f"{name}.zprof").exists()


@on_a_device_in_python
def test_a_step_that_the_hardware_cannot_hold_is_said_and_its_trace_shows_why(made: Path, zprof: Zprof) -> None:
    found = result(made, "huge")
    assert found["code"] == 3 and "\ndevice: does not fit: a step holds " in "\n" + found["err"]
    assert "rtx4090 has 24 GiB per rank" in found["err"]
    assert "\none node of rtx4090 has 1 device; --nodes or --ranks takes another number\n\nnext\n" in found["out"]
    assert zprof("check", made / "huge.zprof", "--max", "device.peak=24GiB").exit_code == 3


@on_a_device_in_python
def test_stages_of_a_pipeline_are_said_each_with_its_own_peak(made: Path) -> None:
    found = result(made, "staged")
    said = json.loads(found["out"])
    assert found["code"] == 0 and said["fits"] and [stage["rank"] for stage in said["simulation"]["stages"]] == [0, 2]
    assert said["simulation"]["device"]["nbytes"] == max(stage["device"]["nbytes"] for stage in said["simulation"]["stages"])


@on_a_device_in_python
def test_a_first_step_that_the_hardware_cannot_hold_is_not_passed_over(made: Path) -> None:
    found = result(made, "first")
    said = json.loads(found["out"])
    assert (found["code"], said["fits"]) == (3, False) and "device: does not fit: " in found["err"]
    assert said["simulation"]["device"]["nbytes"] < said["capacity"]["device"], "the last step would fit"


@on_a_device_in_python
def test_ranks_that_are_slow_and_an_allocator_are_simulated_too(made: Path, zprof: Zprof) -> None:
    found = json.loads(result(made, "late")["out"])["simulation"]
    assert (found["rank"], result(made, "late")["code"]) == (5, 0) and 0 < found["waiting_s"] < found["step_s"]
    assert found["reserved"]["settings"] == "expandable_segments:True"
    assert found["reserved"]["nbytes"] >= found["device"]["nbytes"]
    # The trace is the slowest rank's alone, though one that is like the others was simulated, too.
    assert measures(zprof, made / "late.zprof")["step.median_ms"] == pytest.approx(found["step_s"] * 1e3, rel=0.02)


@on_a_device_in_python
def test_requests_that_an_allocator_refuses_count_as_memory_that_lacks(made: Path) -> None:
    found = result(made, "full")
    assert json.loads(found["out"])["simulation"]["reserved"]["failed"] > 0
    assert found["code"] == 3 and "\nallocator: does not fit: " in "\n" + found["err"]


@on_a_device_in_python
def test_every_command_reads_it(made: Path, zprof: Zprof) -> None:
    plan = made / "tiered.zprof"
    for words in ("report", "timeline -o page.html", "flamegraph -o flames.html", "check", "frag", "top --once"):
        name, *options = words.split()
        assert zprof(name, plan, *options).exit_code == 0, words
    for kind in ("perfetto", "speedscope", "csv", "prometheus", "tensorboard", "torch-snapshot"):
        assert zprof("export", plan, "--format", kind, "-o", f"out.{kind}").exit_code == 0, kind
    assert zprof("diff", plan, plan).stdout == "no measure changed\n"
