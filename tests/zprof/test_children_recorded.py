"""``zprof run --children record``: children that train have traces of their own, others none, and all end as they would."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.slow import slow
from tests.support.waiting import soon
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import HEADER, MIB, begun, sample_rows, write_trace
from zprof import open as open_run
from zprof.living.jobs import of_processes
from zprof.rows import Row, RowKind, placed
from zprof.running.child import Ending
from zprof.running.last_lines import last_lines
from zprof.trace.children import Recorded, child_path, recorded_children, reported_together, without_children
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

#: A child trains for two steps, and then does as it is told.
TRAINING = """
import multiprocessing, os, signal, sys, time, torch
from torch import nn

def train(steps=2):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step(), optimizer.zero_grad()

def started(target, *args, method="fork"):
    process = multiprocessing.get_context(method).Process(target=target, args=args)
    process.start(), process.join()
    return process.exitcode
"""


def record(script: str, at: Path, *words: str, how: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (at / "script.py").write_text(TRAINING + script)
    return forked.python("-m", "zprof", "run", "--nvml", "off", "--children", "record", *how, "script.py", *words, at=at)


def children(at: Path) -> list[Recorded]:
    return recorded_children(Trace.open(at / "run.0.zprof"))


def steps(path: Path) -> int:
    trace = Trace.open(path)
    chunks = [(rows, trace.strings) for rows in trace.chunks()]
    return sum(int(((rows.what == names.index("step")) & (rows.kind == 1)).sum()) for rows, names in chunks if "step" in names)


# --- who is recorded --------------------------------------------------------------------------------------------------

RANKS = """
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def rank(number, world, store):
    dist.init_process_group("gloo", rank=number, world_size=world, store=dist.FileStore(store, world))
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(rank, (2, os.path.abspath("store")), 2, start_method=sys.argv[1])
    print("done")
"""


@pytest.mark.parametrize("method", ["fork", *slow("forkserver", "spawn")])
def test_ranks_that_a_script_spawns_are_recorded_as_ranks(method: str, tmp_path: Path, zprof: Zprof) -> None:
    done = record(RANKS, tmp_path, method)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    found = children(tmp_path)
    assert sorted((child.header.rank, child.header.world, child.why, child.exit) for child in found) == [
        (0, 2, "process group", 0), (1, 2, "process group", 0)
    ]  # fmt: skip
    assert {child.path.name for child in found} == {"run.0.child-1.zprof", "run.0.child-2.zprof"}
    assert all(child.how == ("fork" if method == "fork" else "spawn") and steps(child.path) == 3 for child in found)
    assert "zprof: children recorded: 2\nzprof: next: zprof report run.0.child-" in done.stderr
    together = [str(child.path) for child in found]
    ranks = json.loads(zprof("report", *together, "--json").stdout)["ranks"]
    assert ranks["world"] == 2 and not ranks["missing"] and ranks["skew"] is not None
    parent = json.loads(zprof("report", "--json").stdout)
    (run,) = parent["runs"]
    assert [child["end"] for child in run["recorded_children"]] == [{"exit": 0, "reason": ""}] * 2
    assert parent["next"][0]["do"].startswith("zprof report ") and "child-1" in parent["next"][0]["do"]
    assert "rank 1 of 2 (pid " in zprof("report").stdout


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_that_trains_has_its_operators_recorded_at_level_ops(method: str, tmp_path: Path) -> None:
    script = f"""
if __name__ == "__main__":
    print(started(train, 4, method="{method}"), started(train, 4, method="{method}"))
"""
    done = record(script, tmp_path, how=("--level", "ops", "--ops-steps", "1:3"))
    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr
    found = children(tmp_path)
    assert [child.exit for child in found] == [0, 0]
    for child in found:
        run = open_run(child.path)
        columns = run.ops()
        assert columns is not None, run.unseen["ops.self_ms"]
        called = Counter(name for name, step in zip(columns["name"], columns["step"], strict=True) if step in (1, 2))
        assert called["aten::addmm"] == 2


def test_a_fork_that_trains_is_recorded_however_it_ends(tmp_path: Path) -> None:
    script = """
def forked(do):
    pid = os.fork()
    if not pid:
        train()
        do()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def fails(): raise KeyError("x")
ends = (lambda: None, lambda: sys.exit(3), fails, lambda: os._exit(4), lambda: os.kill(os.getpid(), signal.SIGKILL))
print(*map(forked, ends))
"""
    (tmp_path / "plain.py").write_text(TRAINING + script)
    plain = forked.python("plain.py", at=tmp_path)
    done = record(script, tmp_path)
    assert done.stdout == plain.stdout == "0 3 1 4 -9\n", done.stderr
    assert done.returncode == plain.returncode == 0
    assert done.stderr.count("KeyError: 'x'") == 1 and "zprof/running" not in done.stderr
    found = children(tmp_path)
    assert [(child.number, child.exit, child.reason) for child in found] == [
        (1, 0, ""), (2, 3, "SystemExit"), (3, 1, "KeyError"), (4, 4, "os._exit"), (5, None, "")
    ]  # fmt: skip
    # A kill leaves what was recorded until then.
    assert [steps(child.path) for child in found] == [2] * 5
    assert not list(tmp_path.glob("*.tail"))


def test_a_process_of_multiprocessing_says_how_it_ended_and_what_it_died_of(tmp_path: Path) -> None:
    script = """
def fails():
    train()
    raise MemoryError("no more")
def exits():
    train()
    sys.exit(5)
print(started(fails), started(exits), started(train))
"""
    done = record(script, tmp_path)
    assert done.stdout == "1 5 0\n", done.stderr
    assert [(child.exit, child.reason) for child in children(tmp_path)] == [(1, "MemoryError"), (5, "SystemExit"), (0, "")]
    assert Trace.open(tmp_path / "run.0.child-1.zprof").notes("oom")[0].body["kind"] == "memory"


OUT_OF_MEMORY = """
import torch.multiprocessing as mp

def rank(number):
    train()
    torch.empty(1 << 50, dtype=torch.uint8)

if __name__ == "__main__":
    mp.start_processes(rank, nprocs=2, start_method="fork")
"""


def test_a_rank_that_runs_out_of_memory_is_explained_by_its_own_trace(tmp_path: Path, zprof: Zprof) -> None:
    done = record(OUT_OF_MEMORY, tmp_path)
    assert done.returncode == 1, done.stderr
    said = [line.removeprefix("zprof: ") for line in done.stderr.splitlines() if line.startswith("zprof: ")]
    first = next(child for child in children(tmp_path) if child.ran_out)
    assert said[0] == f"{first.path.name}, a process (pid {first.pid}):"
    assert said[1].startswith("out of memory: ") and " refused 1024 TiB" in said[1]
    assert said[1] in zprof("report", str(first.path)).stdout


def killed(header: dict[str, Any], folder: Path, *, notes: dict[str, Any], rows: list[Row]) -> Path:
    """A script whose child the kernel has ended, and the child's trace, as it was written until then."""
    died = {"pid": 4711, "name": "a process of torch.multiprocessing.spawn", "signal": 9, "message": "terminated"}
    script = write_trace(folder / "run.0.zprof", [Row(RowKind.COUNTER, "rss", "", 7 * MIB, HEADER.mono_ns + 1)],
                         notes={"child died": died}, zhooks=False)  # fmt: skip
    about = {"root_pid": HEADER.pid, "root_ns": HEADER.mono_ns, "parent_pid": HEADER.pid, "number": 1, "how": "spawn"}
    writer = Writer(child_path(script, 1), dataclasses.replace(HEADER, **header))
    writer.rows(rows)
    for name, body in {"child": about | {"why": "optimizer"}, **notes}.items():
        writer.note(name, body)
    writer.flush()
    return script


def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_explained_by_what_it_held(tmp_path: Path, zprof: Zprof) -> None:
    rows = [Row(RowKind.ALLOC, placed("activation", "device"), "layers.0", 96 * MIB, HEADER.mono_ns + 5, 0, 7),
            Row(RowKind.COUNTER, "rss", "", 300 * MIB, HEADER.mono_ns + 9)]  # fmt: skip
    script = killed({"pid": 4711, "rank": 1, "world": 2, "level": "alloc"}, tmp_path, notes={}, rows=rows)
    lines = last_lines(script, Ending(1, 0, 7 * MIB), ("cgroup /box", 400 * MIB), 1)
    assert lines[:2] == [
        "run.0.child-1.zprof, rank 1 of 2 (pid 4711):",
        "out of memory: cgroup /box (limit 400 MiB): the kernel killed rank 1 of 2 (pid 4711) for lack of memory: it had "
        "at most 300 MiB resident when it was sampled",
    ]
    assert "most of it: activation of layers.0 96 MiB" in lines
    # Its own trace says so from now on, too.
    assert "the kernel killed rank 1 of 2 (pid 4711)" in zprof("report", str(child_path(script, 1))).stdout


@pytest.mark.slow
def test_a_child_that_hangs_leaves_its_own_stacks_and_the_script_that_waits_for_it_none(tmp_path: Path) -> None:
    script = """
def hangs():
    train()
    time.sleep(3600)
started(hangs)
"""
    (tmp_path / "script.py").write_text(TRAINING + script)
    words = ("zprof", "run", "--nvml", "off", "--children", "record", "--hang-after", "300ms", "script.py")
    running = forked.start("-m", *words, at=tmp_path)
    own = tmp_path / "run.0.child-1.zprof"

    def noted(path: Path) -> list[dict[str, Any]]:
        trace = begun(path)
        return [] if trace is None else [note.body for note in trace.notes("hang")]

    try:
        assert soon(lambda: any("hangs" in str(note["threads"]) for note in noted(own)), 300)
        of_child = noted(own)[0]["time_ns"]
        # Time for three more looks.
        since = time.monotonic()
        assert soon(lambda: time.monotonic() > since + 1)
        # It may have been silent before its child trained, and not since.
        assert all(note["time_ns"] < of_child for note in noted(tmp_path / "run.0.zprof"))
    finally:
        os.kill(Trace.growing(own).header.pid, signal.SIGKILL)
        assert running.wait().returncode == 0


def test_ranks_that_a_script_forks_are_known_to_hang_by_their_recordings(tmp_path: Path) -> None:
    script = RANKS.replace("    dist.destroy_process_group()", "    time.sleep(3600)")
    (tmp_path / "script.py").write_text(TRAINING + script)
    words = ("zprof", "run", "--nvml", "off", "--children", "record", "script.py", "fork")
    running = forked.start("-m", *words, at=tmp_path)
    own = tmp_path / "run.0.zprof"
    pids: list[int] = []

    def labels() -> list[str]:
        trace = begun(own)
        if trace is None:
            return []
        job = of_processes([trace.header.pid])
        pids[:] = [member.process.pid for member in job.members if member.process is not None]
        return [member.label for member in job.members]

    try:
        assert soon(lambda: sorted(labels()) == ["rank 0", "rank 1"], 300)
        assert soon(lambda: sorted(child.pid for child in children(tmp_path)) == sorted(pids), 300)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        running.wait()


def test_what_waits_in_a_child_is_gone_once_it_trains(tmp_path: Path) -> None:
    script = """
import torch.distributed.distributed_c10d as c10d
def functions(): return torch.optim.Optimizer.__init__, c10d._update_default_pg
own = functions()
def child():
    assert all(mine is not before for mine, before in zip(functions(), own))
    train()
    assert functions() == own
print(started(child))
"""
    done = record(script, tmp_path)
    assert done.stdout == "0\n", done.stderr


def test_loader_workers_and_processes_that_do_not_train_leave_nothing(tmp_path: Path) -> None:
    script = """
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader, Dataset
class Augmented(Dataset):
    def __init__(self): self.layer = nn.Linear(2, 2)
    def __len__(self): return 4
    # A forward with gradients, as of an augmentation that is a module.
    def __getitem__(self, index): return self.layer(torch.ones(2)).detach()
def infers(_):
    with torch.no_grad():
        return nn.Linear(2, 2)(torch.ones(2)).shape[0]
for _ in range(3):
    assert len(list(DataLoader(Augmented(), num_workers=2, multiprocessing_context="fork"))) == 4
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    print(*pool.map(infers, range(4)))
"""
    done = record(script, tmp_path)
    assert done.stdout == "2 2 2 2\n" and "not recorded" not in done.stderr, done.stderr
    assert [path.name for path in tmp_path.glob("*.zprof*")] == ["run.0.zprof"]


def test_the_process_of_a_process_is_recorded_beside_the_script_too(tmp_path: Path) -> None:
    script = """
def middle():
    print(started(train), flush=True)
    train()
print(started(middle))
"""
    done = record(script, tmp_path)
    assert done.stdout == "0\n0\n", done.stderr
    inner, middle = children(tmp_path)
    assert (inner.number, middle.number) == (1, 2) and inner.parent_pid == middle.header.pid
    assert middle.parent_pid == Trace.open(tmp_path / "run.0.zprof").header.pid


def test_an_optimizer_that_came_from_the_parent_is_noticed_at_the_first_forward(tmp_path: Path) -> None:
    script = """
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def child():
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print(started(child))
"""
    done = record(script, tmp_path)
    assert done.stdout == "0\n", done.stderr
    (child,) = children(tmp_path)
    assert child.why == "forward" and steps(child.path) == 1


def test_there_are_no_more_traces_than_the_bound_and_the_child_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING + "print([started(train) for _ in range(4)])\n")
    code = """
import zprof.running.follow, zprof.running.launch
zprof.running.follow.MOST = zprof.running.launch.MOST = 2
from zprof.cli import main
main(["run", "--children", "record", "script.py"], prog_name="zprof")
"""
    done = forked.python("-c", code, at=tmp_path)
    assert done.stdout == "[0, 0, 0, 0]\n", done.stderr
    assert [child.number for child in children(tmp_path)] == [1, 2]
    assert done.stderr.count("expected fewer than 2 traces of children, found as many; delete old ones") == 2


def test_a_child_whose_trace_cannot_be_made_trains_all_the_same(tmp_path: Path) -> None:
    script = """
os.mkdir("elsewhere")
def child():
    os.chdir("elsewhere")
    train()
    print("trained", flush=True)
os.chmod(".", 0o500) if os.getuid() else os.symlink("nowhere", "run.0.child-1.zprof")
print(started(child))
"""
    done = record(script, tmp_path)
    assert done.stdout == "trained\n0\n", done.stderr
    os.chmod(tmp_path, 0o700)
    # A link is nobody's trace: the next number is taken, beside the script's trace wherever the child has gone.
    if not os.getuid():
        assert [child.path.name for child in children(tmp_path)] == ["run.0.child-2.zprof"]


def test_nothing_is_left_in_multiprocessing_when_the_recording_is_over(tmp_path: Path) -> None:
    code = """
import multiprocessing, os
from multiprocessing.reduction import ForkingPickler
from zprof.running.follow import Family, follow
def entry(process): return vars(process)["_config"].get("zprof")
def made(): return multiprocessing.get_context("spawn").Process()
leave = follow(Family({}, "run.zprof", os.getpid(), 1))
before = made()
assert entry(before) is not None
leave()
assert entry(multiprocessing.current_process()) is entry(made()) is None
# One that was made before, and is started now.
import pickle
assert pickle.loads(bytes(ForkingPickler.dumps(entry(before)))) is None
"""
    done = forked.python("-c", code, at=tmp_path)
    assert not done.returncode, done.stderr


def test_without_being_told_a_child_is_not_recorded_and_the_report_says_how(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "script.py").write_text(TRAINING + """
def child():
    train()
    # Until it was seen.
    from zprof.trace.reader import Trace
    until = time.monotonic() + 300
    while "peak" not in Trace.growing("run.0.zprof").notes("children")[-1].body and time.monotonic() < until:
        time.sleep(0.01)
print(started(child))
""")
    done = forked.python("-m", "zprof", "run", "--interval", "10ms", "script.py", at=tmp_path)
    assert done.stdout == "0\n", done.stderr
    assert [path.name for path in tmp_path.glob("*.zprof")] == ["run.0.zprof"]
    following = json.loads(zprof("report", "--json").stdout)["next"]
    assert "zprof run --children record script.py" in [each["do"] for each in following]


def test_writing_over_a_run_removes_its_children_and_no_other_file(tmp_path: Path) -> None:
    first = record("print(started(train), started(train))\n", tmp_path)
    assert first.stdout == "0 0\n", first.stderr
    other = tmp_path / "run.0.child-7.zprof"
    write_trace(other, sample_rows(steps=1))
    again = record("print(started(train))\n", tmp_path, how=("-f",))
    assert again.stdout == "0\n", again.stderr
    assert [child.number for child in children(tmp_path)] == [1] and other.exists()


# --- how they are found -----------------------------------------------------------------------------------------------


def family(folder: Path, *ranks: tuple[int, int]) -> Path:
    """A script's trace, and those of children with these ranks and worlds."""
    script = write_trace(folder / "run.0.zprof", sample_rows(steps=1))
    header = Trace.open(script).header
    for number, (rank, world) in enumerate(ranks, 1):
        about: dict[str, Any] = {"root_pid": header.pid, "root_ns": header.mono_ns, "parent_pid": 1, "number": number}
        note, rows = about | {"how": "fork", "why": "optimizer"}, sample_rows(steps=1)
        write_trace(child_path(script, number), rows, notes={"child": note}, rank=rank, world=world)
    return script


def test_commands_that_read_a_folder_or_the_newest_run_leave_children_out(tmp_path: Path, zprof: Zprof) -> None:
    script = family(tmp_path, (0, 2), (1, 2))
    later = script.stat().st_mtime + 100
    for number in (1, 2):
        os.utime(child_path(script, number), (later, later))
    for words in ((), (".",)):
        report = json.loads(zprof("report", *words, "--json").stdout)
        assert [Path(run["file"]).name for run in report["runs"]] == ["run.0.zprof"]
    with_them = zprof("report", str(child_path(script, 1)), str(child_path(script, 2)), "--json")
    assert json.loads(with_them.stdout)["ranks"]["world"] == 2


def test_children_alone_in_a_folder_are_a_run(tmp_path: Path, zprof: Zprof) -> None:
    family(tmp_path, (0, 2), (1, 2)).unlink()
    assert len(json.loads(zprof("report", ".", "--json").stdout)["runs"]) == 2


def test_files_of_others_are_nobodys_children(tmp_path: Path) -> None:
    script = family(tmp_path, (0, 1))
    child_path(script, 2).write_bytes(b"no trace")
    write_trace(child_path(script, 3), sample_rows(steps=1), notes={"child": {"root_pid": 1, "root_ns": "x"}})
    write_trace(tmp_path / "run.0.child-4.extra.zprof", sample_rows(steps=1))
    assert [child.number for child in recorded_children(Trace.open(script))] == [1]


def test_ranks_of_one_run_are_reported_together() -> None:
    def named(*ranks: tuple[int, int]) -> str:
        return reported_together([(f"my runs/run.0.child-{at}.zprof", *each) for at, each in enumerate(ranks, 1)])

    assert named((1, 3), (0, 3), (2, 3)) == "'my runs/run.0'.child-*.zprof"
    assert named((1, 2), (0, 2)) == "'my runs/run.0.child-2.zprof' 'my runs/run.0.child-1.zprof'"
    # Started again, and others beside them.
    assert named((0, 2), (1, 2), (1, 2), (0, 2)) == "'my runs/run.0.child-1.zprof' 'my runs/run.0.child-2.zprof'"
    assert named((0, 1), (0, 1), (0, 1)) == "'my runs/run.0.child-1.zprof'"


def test_names_of_children_go_by_whose_trace_is_there() -> None:
    paths = [Path(name) for name in ("run.0.zprof", "run.0.child-1.zprof", "run.1.child-1.zprof", "a.child-x.zprof")]
    assert [path.name for path in without_children(paths)] == ["run.0.zprof", "run.1.child-1.zprof", "a.child-x.zprof"]


def test_a_signal_that_ends_a_child_leaves_the_script_and_its_others_alone(tmp_path: Path) -> None:
    script = """
def child(ready):
    train()
    ready.set()
    while True: time.sleep(1)
context = multiprocessing.get_context("fork")
ready = [context.Event() for _ in range(2)]
both = [context.Process(target=child, args=(each,)) for each in ready]
[process.start() for process in both], [each.wait() for each in ready]
both[0].terminate(), both[0].join()
print(both[0].exitcode, both[1].is_alive())
both[1].kill(), both[1].join()
print(both[1].exitcode)
"""
    done = record(script, tmp_path)
    assert done.stdout == f"-{int(signal.SIGTERM)} True\n-9\n", done.stderr
    assert [(child.exit, steps(child.path)) for child in children(tmp_path)] == [(None, 2)] * 2
