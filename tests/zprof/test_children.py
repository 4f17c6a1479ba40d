"""Processes that a recorded one starts are sampled from outside: who they are, what they hold together, and how busy."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.cgroups import cgroup_of
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import HEADER, write_trace
from zprof.analysis.following import RunFollower
from zprof.analysis.ledger import Ledger
from zprof.recording.children import ChildrenSampler
from zprof.recording.sampler import Reading
from zprof.rows import Row, RowKind
from zprof.trace.reader import Trace

MIB = 1 << 20

#: Samples until `wanted(levels, note)`; `levels` has the last value of each quantity.
SAMPLING = """
import json, os, signal, subprocess, sys, time
from zprof.recording.children import ChildrenSampler
sampler, levels = ChildrenSampler(), {}
def sampled(wanted):
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for what, key, value in sampler.sample():
            levels[f"{what} {key}".strip()] = value
        if wanted(levels, sampler.note()[1]):
            return
        time.sleep(0.01)
    raise TimeoutError(f"{levels} {sampler.note()}")
def who(note):
    return note.get("peak", {"who": []})["who"]
def waits():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.write(ready, b"x")
    while True:
        signal.pause()
heard, ready = os.pipe()
"""


def samples(path: Path) -> dict[str, list[int]]:
    ledger = Ledger.of(Trace.open(path))
    names = ("children count", "children rss", "children pss", "children cpu", "tree pss", "tree shared memory")
    found = {name: ledger.samples(name) for name in names}
    return {f"{name} {key}".strip(): value.tolist() for name, keys in found.items() for key, (_, value) in keys.items()}


# --- what is sampled --------------------------------------------------------------------------------------------------


def test_what_forked_children_share_is_counted_once(tmp_path: Path) -> None:
    # The comparison is psutil's own sum over the same processes.
    code = SAMPLING + """
import psutil
shared = bytearray(os.urandom(1 << 20)) * 96
children = []
for _ in range(3):
    children.append(os.fork() or waits())
    os.read(heard, 1)
sampled(lambda levels, note: levels.get("children count python") == len(who(note)) == 3)
held = sum(psutil.Process(pid).memory_full_info().pss for pid in (os.getpid(), *children))
print(json.dumps([levels, held, sampler.note()[1]["peak"], children]))
for pid in children:
    os.kill(pid, signal.SIGTERM), os.waitpid(pid, 0)
sampled(lambda levels, note: levels["children count python"] == 0)
print(json.dumps(levels))
"""
    done = forked.python("-c", code, at=tmp_path)
    assert not done.returncode, done.stderr
    (levels, held, peak, pids), after = map(json.loads, done.stdout.splitlines())
    assert levels["children rss python"] > 3 * 96 * MIB
    # Of the pages that four processes have, three quarters are the children's.
    assert 72 * MIB <= levels["children pss python"] < levels["children rss python"] / 2
    assert abs(levels["tree pss"] - held) < 4 * MIB
    assert sorted(pid for pid, *_ in peak["who"]) == sorted(pids) and peak["unread"] == 0
    assert peak["pss_nbytes"] == sum(nbytes for *_, nbytes, _ in peak["who"])
    assert after["children rss python"] == after["children pss python"] == 0


def test_children_are_named_by_what_they_run_and_not_by_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import sys, time\nprint(flush=True)\nsys.stdin.read()\n")
    code = SAMPLING + """
import multiprocessing
def wait(end): os.write(ready, b"x"), end.wait()
context = multiprocessing.get_context("fork")
end = context.Event()
named = context.Process(target=wait, args=(end,), name="tokenizer"); named.start(); os.read(heard, 1)
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
script = subprocess.Popen([sys.executable, "-X", "dev", "worker.py", "--token=hunter2"], **pipes)
other = subprocess.Popen(["cat", "-", "/dev/null"], **pipes)
bare = os.fork() or waits()
os.read(heard, 1), script.stdout.readline()
whole = {"tokenizer", "python worker.py", "cat", "a fork of this process"}
sampled(lambda levels, note: {each[2] for each in who(note)} == whole)
print(json.dumps([sampler.note()[1], levels]))
end.set(), os.kill(bare, signal.SIGTERM), script.communicate(), other.communicate(), named.join()
"""
    done = forked.python("-c", code, at=tmp_path)
    assert not done.returncode, done.stderr
    body, levels = json.loads(done.stdout)
    kinds = {label: kind for _, kind, label, *_ in body["peak"]["who"]}
    assert kinds.pop("cat") == "others" and set(kinds.values()) == {"python"}
    assert levels["children count others"] == 1 and body["most"]["python"] >= 3
    assert "hunter2" not in done.stdout


def test_the_work_of_children_is_counted_over_those_that_have_ended(tmp_path: Path) -> None:
    code = SAMPLING + """
def work():
    begin = time.process_time()
    while time.process_time() < begin + 0.3: pass
    waits()
for _ in range(3):
    pid = os.fork() or work()
    os.read(heard, 1)
    before = levels.get("children cpu python", 0)
    sampled(lambda levels, note: levels.get("children cpu python", 0) >= before + 290_000_000)
    os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0)
print(levels["children cpu python"])
"""
    done = forked.python("-c", code, at=tmp_path)
    assert not done.returncode, done.stderr
    assert 870_000_000 <= int(done.stdout) < 3_000_000_000


def proc(
    root: Path, pid: int, start: int, *, parent: int, name: str = "sh", state: str = "S", rss: int = 10, cpu: int = 0
) -> None:
    """A process as Linux shows it."""
    here = root / f"proc/{pid}"
    here.mkdir(parents=True, exist_ok=True)
    fields = [state, str(parent), *["0"] * 9, str(cpu), "0", *["0"] * 6, str(start), "0", str(rss), "0"]
    (here / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (here / "smaps_rollup").write_text(f"00400000-7ffd ---p 0 00:00 0 [rollup]\nRss: {rss * 4} kB\nPss: {rss * 2} kB\n")
    (here / "cmdline").write_bytes(b"sh\0-c\0true\0")


@pytest.mark.parametrize("lists_children", [False, True])
def test_a_pid_that_comes_again_is_another_process(
    lists_children: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel's list of each thread's children, and without it as of kernels that keep none."""
    me, page = os.getpid(), os.sysconf("SC_PAGE_SIZE")

    def children(*pids: int) -> None:
        if lists_children:
            for thread, mine in ((me, pids[:1]), (me + 1, pids[1:])):
                (tmp_path / f"proc/{me}/task/{thread}").mkdir(parents=True, exist_ok=True)
                (tmp_path / f"proc/{me}/task/{thread}/children").write_text(" ".join(map(str, mine)))

    # As where this process has children, whatever it has.
    monkeypatch.setattr(os, "waitid", lambda *_: None)
    proc(tmp_path, me, 5, parent=1)
    proc(tmp_path, 77, 5, parent=1)
    children(70, 71)
    proc(tmp_path, 70, 10, parent=me, rss=100, cpu=50, name="a (b) c")
    proc(tmp_path, 71, 10, parent=me, rss=7, state="Z")
    sampler = ChildrenSampler(tmp_path_workers, tmp_path)
    first = levels(sampler.sample())
    assert first["children rss others"] == 100 * page and first["children count others"] == 1
    assert first["children pss others"] == 200 << 10 and first["tree pss"] == 220 << 10
    assert "tree shared memory" not in first, "this kernel does not say"
    again(sampler)
    proc(tmp_path, 70, 99, parent=me, rss=3, cpu=1)
    second = levels(sampler.sample())
    assert second["children rss others"] == 3 * page
    assert second["children cpu others"] == 51 * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    name, body = sampler.note()
    assert (name, body["seen"], body["zombies"], body["most"]) == ("children", 2, 1, {"others": 1})
    assert body["peak"]["who"] == [[70, "others", "sh", 200 << 10, 100 * page]]


def tmp_path_workers() -> dict[int, str]:
    return {}


def again(sampler: ChildrenSampler) -> None:
    """The next look is due."""
    sampler._due_ns = sampler._round_spent_ns = 0


def levels(readings: Sequence[Reading]) -> dict[str, int]:
    return {f"{what} {key}".strip(): value for what, key, value in readings}


def test_a_process_whose_pages_may_not_be_read_counts_with_all_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "waitid", lambda *_: None)
    proc(tmp_path, os.getpid(), 5, parent=1)
    proc(tmp_path, 70, 10, parent=os.getpid(), rss=100)
    (tmp_path / "proc/70/smaps_rollup").unlink()
    sampler = ChildrenSampler(tmp_path_workers, tmp_path)
    assert levels(sampler.sample())["children pss others"] == 100 * page
    assert sampler.note()[1]["peak"]["unread"] == 1


# --- in a recorded run ------------------------------------------------------------------------------------------------

STARTING = """
import subprocess, sys, time
killed = subprocess.Popen(["sleep", "600"])
if len(sys.argv) > 1:
    from zprof.trace.reader import Trace
    until = time.monotonic() + 300
    while "peak" not in Trace.growing(sys.argv[1]).notes("children")[-1].body and time.monotonic() < until:
        time.sleep(0.01)
codes = [subprocess.run([sys.executable, "-c", f"raise SystemExit({code})"]).returncode for code in (0, 7)]
killed.kill()
print(*codes, killed.wait())
"""


def test_a_script_finds_the_exit_codes_of_its_children_as_under_plain_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STARTING)
    plain = forked.start("script.py", at=tmp_path)
    done = forked.python("-m", "zprof", "run", "--interval", "5ms", "script.py", "run.0.zprof", at=tmp_path)
    under = plain.wait()
    assert (done.returncode, done.stdout) == (under.returncode, under.stdout) == (0, "0 7 -9\n"), done.stderr
    assert max(samples(tmp_path / "run.0.zprof")["children count others"]) == 1
    assert Trace.open(tmp_path / "run.0.zprof").notes("children")[1].body["peak"]["who"][0][1:3] == ["others", "sleep"]


@pytest.mark.parametrize("how", [[], ["--children", "off"]])
def test_a_run_without_children_has_no_rows_of_them_and_says_whether_it_looked(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(1)\n")
    done = forked.python("-m", "zprof", "run", *how, "script.py", at=tmp_path)
    assert not done.returncode, done.stderr
    assert samples(tmp_path / "run.0.zprof") == {}
    notes = [each.body for each in Trace.open(tmp_path / "run.0.zprof").notes("children")]
    assert notes == ([] if how else [{"seen": 0, "most": {}}])


# --- what is said of them ---------------------------------------------------------------------------------------------


def sampled_rows(*looks: tuple[int, dict[str, tuple[int, int, int]]]) -> list[Row]:
    """Rows of looks at seconds since the recording began: kind -> how many, and their PSS and processor seconds."""
    rows = []
    for second, kinds in looks:
        total = [sum(values) for values in zip(*kinds.values(), strict=True)] or [0, 0, 0]
        for key, (count, pss, cpu_s) in [*kinds.items(), ("", total)]:
            values = {"count": count, "rss": 3 * pss, "pss": pss, "cpu": cpu_s * 1_000_000_000}
            at = HEADER.mono_ns + second * 1_000_000_000
            rows += [Row(RowKind.COUNTER, f"children {name}", key, value, at) for name, value in values.items()]
        rows.append(Row(RowKind.COUNTER, "tree pss", "", total[1] + 100 * MIB, at))
        rows.append(Row(RowKind.COUNTER, "rss", "", HEADER.rss_nbytes, at))
    return rows


def with_children(folder: Path) -> Path:
    """Two workers, then a command beside them, then nobody. A worker's name is what another program made of it."""
    none = {"loader workers": (0, 0, 4), "others": (0, 0, 0)}
    both = {"loader workers": (2, 300 * MIB, 4), "others": (1, 50 * MIB, 0)}
    rows = sampled_rows((1, {"loader workers": (2, 200 * MIB, 1), "others": (0, 0, 0)}), (3, both), (5, none))
    who = [[12, "loader workers", "evil \x1b[2J", 160 * MIB, 400 * MIB], [14, "others", "ffmpeg", 50 * MIB, 60 * MIB], ["bad"]]
    peak = {"time_ns": HEADER.mono_ns + 3_000_000_000, "who": who, "unread": 1}
    note = {"seen": 5, "most": {"loader workers": 2}, "peak": peak}
    return write_trace(folder / "run.0.zprof", rows, notes={"children": note}, zhooks=False)


def test_a_report_says_what_processes_under_it_held_and_who(zprof: Zprof, tmp_path: Path) -> None:
    with_children(tmp_path)
    report = json.loads(zprof("report", "--json").stdout)["runs"][0]
    under = report["children"]
    assert (under["seen"], under["most"], under["bytes"], under["at_s"]) == (5, 3, 350 * MIB, 3.0)
    assert (under["rss_bytes"], under["tree_bytes"], under["shared_bytes"]) == (1050 * MIB, 450 * MIB, None)
    # Three seconds of work in the four seconds in which two of them were there.
    assert under["kinds"][0] == {
        "name": "loader workers", "most": 2, "bytes": 300 * MIB, "rss_bytes": 900 * MIB, "cpu_s": 4.0, "busy": 0.375,
        "queued": None,
    }  # fmt: skip
    assert [child["name"] for child in under["who"]] == ["evil \x1b[2J", "ffmpeg"], "what is no child is left out"
    measures = report["measures"]
    assert (measures["children.peak"], measures["children.count"], measures["tree.peak"]) == (350 * MIB, 3, 450 * MIB)
    text = zprof("report").stdout
    assert "child processes" in text and "38% of a core" in text and "\x1b" not in text
    assert "350 MiB at most, at 3.000 s, shared memory counted once; 450 MiB at most with this process" in text


def test_a_limit_on_children_is_kept_without_any_and_not_where_nobody_looked(zprof: Zprof, tmp_path: Path) -> None:
    write_trace(tmp_path / "alone.zprof", [], notes={"children": {"seen": 0, "most": {}}})
    write_trace(tmp_path / "older.zprof", [])
    with_children(tmp_path)
    limit = ("--max", "children.peak=1MiB")
    assert zprof("check", "alone.zprof", *limit).exit_code == 0
    older, broken = zprof("check", "older.zprof", *limit), zprof("check", "run.0.zprof", *limit)
    assert older.exit_code == broken.exit_code == 3
    assert "not sampled: the recording did not look for child processes" in older.stdout
    assert "no process was seen under this one" in zprof("check", "alone.zprof", "--max", "tree.peak=1GiB").stdout


def test_top_shows_how_many_are_under_a_run_and_what_they_hold(tmp_path: Path) -> None:
    looks = sampled_rows((1, {"loader workers": (2, 200 * MIB, 1), "others": (1, MIB, 0)}))
    seen = RunFollower(write_trace(tmp_path / "run.0.zprof", looks)).look()
    assert (seen.samples["children count"], seen.samples["children pss"]) == (3, 201 * MIB)


# --- out of memory ----------------------------------------------------------------------------------------------------

LOADING = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    held = []
    def __len__(self): return 1 << 20
    def __getitem__(self, index):
        if sys.argv[1] == "keep":
            self.held.append(torch.ones(2 << 20, dtype=torch.uint8))
            time.sleep(0.005)
            return torch.ones(1)
        return torch.ones(4 << 20, dtype=torch.uint8)
if __name__ == "__main__":
    for _ in DataLoader(Rows(), batch_size=4, num_workers=2):
        time.sleep(0.05)
"""
RUNNING = """
import os, sys
{prepare}
from zprof.cli import main
main(["run", "load.py", "{mode}"], prog_name="zprof")
"""


@pytest.mark.slow  # whom the kernel ends is its own affair, and it has ended zprof
def test_a_loader_worker_that_the_kernel_ends_for_want_of_memory_is_named(tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text(LOADING)
    with cgroup_of(700 * MIB) as folder:
        prepare = f"with open('{folder}/cgroup.procs', 'w') as file: file.write(str(os.getpid()))"
        died = forked.python("-c", RUNNING.format(prepare=prepare, mode="keep"), at=tmp_path)
    said = died.stderr
    assert died.returncode in (1, -9), said
    headline = next(line for line in said.splitlines() if line.startswith("zprof: out of memory: "))
    assert headline.startswith(f"zprof: out of memory: cgroup {folder} (limit 700 MiB): the kernel killed ")
    # Whom it chooses is the kernel's affair; mostly it is a worker.
    assert "(pid " in headline or "the process for lack of memory" in headline
    under = next(line for line in said.splitlines() if line.startswith("zprof: child processes held at most "))
    assert "(2 loader workers" in under and "; with the process at most " in under
    assert under.endswith("; the limit counts them, too")
    assert "zprof: each loader worker (num_workers; 2 at most) takes about " in said


@pytest.mark.slow
def test_a_full_dev_shm_is_told_from_other_failures_of_loader_workers(tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text(LOADING)
    prepare = """
import ctypes, subprocess
if ctypes.CDLL(None).unshare(0x20000):
    raise SystemExit(77)
for words in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", "/dev/shm"]):
    if subprocess.run(words).returncode:
        raise SystemExit(77)
"""
    died = forked.python("-c", RUNNING.format(prepare=prepare, mode="hand over"), at=tmp_path)
    if died.returncode == 77:
        pytest.skip("no file system can be mounted here")
    assert died.returncode == 1, died.stderr
    said = [line.removeprefix("zprof: ") for line in died.stderr.splitlines() if line.startswith("zprof: ")]
    assert said[0].startswith("out of memory: /dev/shm refused memory for ") and said[0].endswith(": limit 24 MiB")
    assert any(line.startswith("give it more: docker run --shm-size=8g") for line in said)


SEES = """
import multiprocessing, os, signal
from zprof.oom.deaths import death_of
def ends(): os.kill(os.getpid(), signal.SIGKILL)
process = multiprocessing.get_context("fork").Process(target=ends, name="reader")
process.start(), process.join()
import subprocess, torch.multiprocessing
how = dict(error_index=0, error_pid=5, exit_code=-9, signal_name="SIGKILL")
exited = torch.multiprocessing.ProcessExitedException("terminated", **how)
for error in (
    RuntimeError(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ..."),
    exited,
    subprocess.CalledProcessError(-9, "make"),
    ConnectionResetError("reset"),
    RuntimeError("DataLoader worker (pid(s) 1) exited unexpectedly"),
    ValueError("no"), subprocess.CalledProcessError(1, "make"),
):
    death = death_of(error)
    print(None if death is None else (death.name, death.pid == process.pid, death.signal))
"""


def test_errors_say_whose_death_they_are_about(tmp_path: Path) -> None:
    done = forked.python("-c", SEES, at=tmp_path)
    assert done.stdout.splitlines() == [
        "('loader worker', True, 9)",
        "('loader worker', False, 7)",
        "('a process of torch.multiprocessing.spawn', False, 9)",
        "('a command', False, 9)",
        "('reader', True, 9)",
        "('loader worker', False, 0)",
        "None",
        "None",
    ], done.stderr
