"""``zprof run``: the script finds what plain python shows it, ends as it would, and its trace is there whatever happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.slow import slow
from tests.support.terminal import on_a_terminal
from tests.support.waiting import soon
from tests.support.zprof_command import NOT_LAUNCHED
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.rows import RowKind
from zprof.running.child import Kills
from zprof.trace.reader import Trace

ZPROF = [sys.executable, "-m", "zprof", "run"]

ENDINGS = """
import sys, os
class Odd(Exception): pass
mode = sys.argv[1]
def inner():
    try: 1 / 0
    except ZeroDivisionError as error: raise Odd(mode) from error
def hook(kind, error, trace): print("hook", kind.__name__, trace.tb_frame.f_code.co_name, file=sys.stderr)
if mode == "raise": inner()
if mode == "text": sys.exit("a message")
if mode == "interrupt": raise KeyboardInterrupt
if mode == "hook":
    sys.excepthook = hook
    inner()
if mode == "group": raise ExceptionGroup("several", [ValueError(1), Odd(2)])
if mode == "_exit": os._exit(9)
if mode == "abort": os.abort()
print(sys.argv, sys.path[0], __file__, __name__, __spec__, __package__, "torch" in sys.modules)
if mode.isdecimal(): sys.exit(int(mode))
"""


def zprof(*words: str, at: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {**NOT_LAUNCHED, **environment}
    return subprocess.run(
        [*ZPROF, *words], cwd=at, env=told, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )


def python(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=at, env=NOT_LAUNCHED, capture_output=True, text=True, timeout=600)


def theirs(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("zprof: "))


def script(at: Path, text: str, name: str = "script.py") -> str:
    (at / name).parent.mkdir(parents=True, exist_ok=True)
    (at / name).write_text(text)
    return name


@pytest.mark.parametrize("mode", ["7", "raise", *slow("0", "abort", "300", "text", "interrupt", "hook", "group", "_exit")])
def test_a_script_prints_raises_and_ends_as_under_plain_python(mode: str, tmp_path: Path) -> None:
    script(tmp_path, ENDINGS, "below/script.py")
    plain = python("below/script.py", mode, "--", "-f", at=tmp_path)
    recorded = zprof("below/script.py", mode, "--", "-f", at=tmp_path)
    assert (recorded.stdout, theirs(recorded.stderr), recorded.returncode) == (plain.stdout, plain.stderr, plain.returncode)
    assert "zprof: next: zprof report run.0.zprof" in recorded.stderr
    ends = Trace.open(tmp_path / "run.0.zprof").notes("end")
    if mode == "abort":
        assert not ends, "nobody had time to end the trace"
    else:
        [end] = ends
        assert end.body["exit"] == {"7": 7, "300": 300, "_exit": 9}.get(mode, 0 if mode == "0" else 1)


@pytest.mark.slow
def test_an_error_within_an_operation_is_shown_without_what_listens_to_it(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import torch
try: torch.ones(2, 3) @ torch.ones(2, 3)
except RuntimeError as error:
    raise ExceptionGroup("both", [error, ValueError()]) from error
""",
    )
    recorded = zprof("--level", "alloc", "script.py", at=tmp_path)
    plain = python("script.py", at=tmp_path)
    assert (theirs(recorded.stderr), recorded.returncode) == (plain.stderr, plain.returncode)


def test_a_reader_that_goes_away_ends_a_command_as_it_ends_cat(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.zprof", sample_rows(steps=1, units=2))
    for words in (["--help"], ["check", "--measures"], ["report", "run.zprof"]):
        ours, theirs = os.pipe()
        os.close(ours)
        ended = subprocess.run([sys.executable, "-m", "zprof", *words], cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b""), words


def test_a_command_whose_output_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.zprof", sample_rows(steps=1, units=2))
    for words in (["--help"], ["check", "--measures"], ["report", "run.zprof"], ["report", "run.zprof", "--json"]):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "zprof", *words]
            ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (ended.returncode, ended.stderr) == (1, "standard output: No space left on device\n"), words


def test_a_name_with_letters_that_the_output_lacks_is_shown_escaped(tmp_path: Path) -> None:
    write_trace(tmp_path / "jos\xe9.zprof", sample_rows(steps=1, units=2))
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "zprof", "report", "jos\xe9.zprof"]
    ended = subprocess.run(command, cwd=tmp_path, env=ascii_only, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"") and b"jos\\xe9" in ended.stdout


@pytest.mark.slow
def test_modules_folders_and_scripts_that_do_not_compile_are_as_under_plain_python(tmp_path: Path) -> None:
    script(tmp_path, "", "pkg/__init__.py")
    script(tmp_path, "import sys; print(sys.argv, sys.path[0], __spec__.name, __package__); raise ValueError", "pkg/mod.py")
    script(tmp_path, "import sys; print(__name__, __file__, __spec__.name, sys.argv[1:])", "pkg/__main__.py")
    script(tmp_path, "def wrong(:", "wrong.py")
    for words in (["-m", "pkg.mod", "-h", "-f"], ["-m", "pkg"], ["pkg", "-o", "x"], ["wrong.py"]):
        plain, recorded = python(*words, at=tmp_path), zprof("-f", *words, at=tmp_path)
        assert (recorded.stdout, theirs(recorded.stderr)) == (plain.stdout, plain.stderr), words
        assert recorded.returncode == plain.returncode, words
        assert Trace.open(tmp_path / "run.0.zprof").header.argv == tuple(words), "what to type to record it again"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.py"], 2, "none.py: expected a script, found no such file"),
        (["-m", "nobody_has_this"], 2, "-m nobody_has_this: expected a module, found none"),
        (["pipe.py"], 2, "pipe.py: expected a script, found a named pipe, not a regular file"),
        (["/dev/zero"], 2, "/dev/zero: expected a script, found a device, not a regular file"),
        (["json"], 2, "json: expected a script, found no such file; a module needs -m"),
        (["-o", "none/run.zprof", "script.py"], 1, "expected a folder to write into, found no none"),
        (["-o", "old.zprof", "script.py"], 1, "old.zprof: exists already; overwrite it with -f"),
        (["torchrun", "--nproc_per_node", "2", "train.py", "-x"], 2, "torchrun --nproc_per_node 2 -m zprof run train.py -x"),
        (["-m", "torch.distributed.run", "--nnodes=1", "train.py"], 2, "torchrun --nnodes=1 -m zprof run train.py"),
        (["python", "train.py"], 2, "expected a script, because zprof starts python itself: zprof run train.py"),
        (["--nvml", "on", "script.py"], 4, "NVML"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(words: list[str], code: int, said: str, tmp_path: Path) -> None:
    script(tmp_path, "print('ran')")
    (tmp_path / "old.zprof").write_text("something")
    os.mkfifo(tmp_path / "pipe.py")
    if "--nvml" in words and Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has NVML")
    refused = forked.python("-m", "zprof", "run", *words, at=tmp_path, environment=NOT_LAUNCHED)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert (tmp_path / "old.zprof").read_text() == "something"


def test_an_interval_is_a_time_with_its_unit(tmp_path: Path) -> None:
    script(tmp_path, "")
    for value in ("0", "1", "100", "ms", "2h", "0.1ms", "5000s"):
        refused = forked.python("-m", "zprof", "run", "--interval", value, "script.py", at=tmp_path)
        assert refused.returncode == 2 and "expected a time from 1ms to 3600s" in refused.stderr, value


def test_each_rank_writes_a_file_of_its_own_and_a_restart_leaves_the_first(tmp_path: Path) -> None:
    name = script(tmp_path, "")
    rank1 = zprof(name, at=tmp_path, RANK="1", WORLD_SIZE="2")
    assert (rank1.returncode, rank1.stderr) == (0, ""), "the first rank speaks for all"
    again = zprof(name, at=tmp_path, RANK="1", WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT="1")
    slurm = zprof("-o", "s{rank}.zprof", name, at=tmp_path, SLURM_PROCID="3", SLURM_NTASKS="4")
    assert (again.returncode, slurm.returncode) == (0, 0)
    assert {path.name for path in tmp_path.glob("*.zprof")} == {"run.1.zprof", "run.1.restart1.zprof", "s3.zprof"}
    assert Trace.open(tmp_path / "s3.zprof").header.rank == 3
    shared = zprof("-o", "one.zprof", name, at=tmp_path, RANK="1", WORLD_SIZE="2")
    assert shared.returncode == 2
    assert "{rank}" in shared.stderr


def test_starting_a_run_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    heavy = "{'torch', 'numpy', 'numba', 'rich', 'pydantic'} & set(sys.modules)"
    found = python("-c", f"import sys, zprof.commands.run, zprof.running.launch; print({heavy})", at=tmp_path)
    assert found.stdout == "set()\n", found.stderr


# Signals.


def started(*words: str, at: Path, start_new_session: bool = False) -> subprocess.Popen[str]:
    """``start_new_session``: in a process group of its own, as torchrun starts its ranks."""
    run = subprocess.Popen(
        [*ZPROF, *words],
        cwd=at,
        env=NOT_LAUNCHED,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    return run


HEARS = """
import signal, sys, time
heard = []
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, frame: heard.append(number))
print("ready", flush=True)
until = time.monotonic() + 100
while not heard and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(10 * len(heard) + len(set(heard)))
"""


def test_ctrl_c_on_a_terminal_reaches_the_script_once(tmp_path: Path) -> None:
    name = script(tmp_path, HEARS)
    code, shown = on_a_terminal([*ZPROF[1:], name, "SIGINT"], tmp_path, "ready", b"\x03")
    assert code == 11, shown


COUNTS = """
import os, signal, sys, time
heard = open("heard", "wb", buffering=0)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, frame: heard.write(b"%d\\n" % number))
print("ready", flush=True)
until = time.monotonic() + 100
while not os.path.exists("enough") and time.monotonic() < until:
    time.sleep(0.01)
"""


def sent_to(run: subprocess.Popen[str], number: signal.Signals, way: str) -> None:
    """By the ways in which people and launchers send signals."""
    if way == "to zprof":
        run.send_signal(number)
    elif way == "to the group":
        os.killpg(run.pid, number)
    else:  # as Slurm and systemd do
        for process in (run.pid, *children(run)):
            os.kill(process, number)


def children(run: subprocess.Popen[str]) -> list[int]:
    return [int(word) for word in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def counted(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "heard").read_bytes().split()]


@pytest.mark.parametrize("way", ["to zprof", "to the group", *slow("to each process")])
def test_the_script_hears_each_signal_once_whoever_it_is_sent_to(way: str, tmp_path: Path) -> None:
    run = started(script(tmp_path, COUNTS), at=tmp_path, start_new_session=True)
    sent = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM]
    expected: list[int] = []
    for number in sent:
        sent_to(run, number, way)
        expected.append(number)
        assert soon(lambda: len(counted(tmp_path)) >= len(expected) and not pending(run.pid))
        # What zprof has heard it passes on before it hears the next: this one comes after a second copy of the other.
        run.send_signal(signal.SIGUSR2)
        expected.append(signal.SIGUSR2)
        assert soon(lambda: len(counted(tmp_path)) >= len(expected))
    (tmp_path / "enough").touch()
    run.communicate(timeout=600)
    assert counted(tmp_path) == expected
    assert run.returncode == 0


def test_a_signal_to_the_group_reaches_a_script_that_has_left_it(tmp_path: Path) -> None:
    run = started(script(tmp_path, f"import os\nos.setpgid(0, 0)\n{HEARS}"), "SIGTERM", at=tmp_path, start_new_session=True)
    os.killpg(run.pid, signal.SIGTERM)
    run.communicate(timeout=600)
    assert run.returncode == 11


def pending(process: int) -> bool:
    """Whether a signal waits to be heard by it."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(fields["ShdPnd"], 16) != 0


@pytest.mark.parametrize("number", [*slow(signal.SIGTERM), signal.SIGINT])
def test_a_signal_to_the_group_ends_zprof_as_it_ends_python(number: signal.Signals, tmp_path: Path) -> None:
    name = script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(120)")
    run = started(name, at=tmp_path, start_new_session=True)
    os.killpg(run.pid, number)
    _, said = run.communicate(timeout=600)
    assert run.returncode == -number
    assert said.count("KeyboardInterrupt\n") == (number == signal.SIGINT)
    alone = subprocess.Popen([sys.executable, name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert alone.stdout is not None
    assert alone.stdout.readline() == "ready\n"
    alone.send_signal(number)
    alone.communicate(timeout=600)
    assert alone.returncode == run.returncode


def test_nothing_of_zprof_is_left_when_it_is_killed(tmp_path: Path) -> None:
    run = started(script(tmp_path, COUNTS), at=tmp_path)
    processes = children(run)
    assert len(processes) == 2
    run.kill()
    run.communicate(timeout=600)
    assert soon(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


def test_a_script_that_a_signal_ends_ends_zprof_alike(tmp_path: Path) -> None:
    run = started(script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(120)"), at=tmp_path)
    run.terminate()
    _, said = run.communicate(timeout=600)
    assert run.returncode == -signal.SIGTERM
    assert "ended by signal 15" in said


def test_a_script_that_is_killed_leaves_a_trace_that_reads(tmp_path: Path) -> None:
    before = Kills.read()
    run = started(script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(120)"), at=tmp_path)
    assert soon(lambda: Trace.open(tmp_path / "run.0.zprof").count > 0), "the recorder writes every second"
    # The script is the one started last.
    *_, child = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    _, said = run.communicate(timeout=600)
    assert run.returncode == -signal.SIGKILL
    # A kernel that ended another process of this machine meanwhile might have ended this one.
    if Kills.read() == before:
        assert "killed by SIGKILL; the kernel killed no process for lack of memory meanwhile" in said
    trace = Trace.open(tmp_path / "run.0.zprof")
    assert sum(len(rows) for rows in trace.chunks()) == trace.count > 0
    assert trace.notes("end") == []


# What runs inside.


PROCESSES = """
import multiprocessing, os, pickle, sys
class Thing:
    def __init__(self, value): self.value = value
def twice(thing): return thing.value * 2
class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((64,), float(index))
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing(3))).value == 3
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            assert pool.apply(twice, (Thing(4),)) == 8
    import torch
    assert sum(float(batch.sum()) for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)) == 64 * 28
    for end in (os._exit, sys.exit):
        pid = os.fork()
        if not pid:
            held = [torch.ones(1 << 20) for _ in range(8)]
            end(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    mine = torch.ones(1 << 10)
"""


@pytest.mark.slow
def test_forked_spawned_and_loading_processes_work_and_are_not_recorded(tmp_path: Path) -> None:
    run = zprof("--level", "alloc", script(tmp_path, PROCESSES), at=tmp_path)
    assert run.returncode == 0, run.stderr
    trace = Trace.open(tmp_path / "run.0.zprof")
    sizes = {int(nbytes) for rows in trace.chunks() for nbytes in rows.nbytes[rows.kind == RowKind.ALLOC]}
    assert 4 << 10 in sizes, "torch was followed from its import on"
    assert 4 << 20 not in sizes, "a forked child's storages are its own"
    assert (trace.damage, len(trace.notes("end"))) == (None, 1)
    assert [path.name for path in tmp_path.glob("*.zprof")] == ["run.0.zprof"]


TRAINS = """
import os, sys, torch, zhooks
torch.set_num_threads(1)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
zhooks.attach(model, policy={"optimizer": {"tier": "host"}})
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    model(torch.ones(4, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
"""


def words_of(trace: Trace) -> set[str]:
    return {trace.strings[what] for rows in trace.chunks() for what in set(rows.what.tolist())}


def test_an_attached_model_is_recorded_with_its_policy_and_its_tiers(tmp_path: Path) -> None:
    run = zprof(script(tmp_path, TRAINS), at=tmp_path)
    assert run.returncode == 0, run.stderr
    trace = Trace.open(tmp_path / "run.0.zprof")
    assert {"parameter on device", "optimizer on host", "forward", "backward", "step", "update", "unit"} <= words_of(trace)
    assert len(trace.notes("policy")) >= 1
    last = run.stderr.splitlines()[-2]
    assert last.startswith("zprof: trace run.0.zprof (")
    assert "device " in last and "host " in last and "rss " in last


def test_under_torchrun_each_rank_has_its_trace_and_one_speaks(tmp_path: Path) -> None:
    # The launcher has imported torch already; it starts both ranks as ever.
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    words = [*launcher, "-m", "zprof", "run", script(tmp_path, "")]
    run = forked.python(*words, at=tmp_path, environment=NOT_LAUNCHED)
    assert run.returncode == 0, run.stderr
    traces = [Trace.open(tmp_path / f"run.{rank}.zprof") for rank in (0, 1)]
    assert [(trace.header.rank, trace.header.world, trace.damage) for trace in traces] == [(0, 2, None), (1, 2, None)]
    assert run.stderr.count("zprof: next: zprof report run.*.zprof") == 1


def test_ranks_that_share_a_model_each_record_what_they_gather(tmp_path: Path) -> None:
    words = ("-m", "zprof", "run", script(tmp_path, TRAINS))
    for rank, ended in enumerate(forked.launch(2, *words, at=tmp_path, environment=NOT_LAUNCHED)):
        assert ended.returncode == 0, ended.stderr
        trace = Trace.open(tmp_path / f"run.{rank}.zprof")
        assert trace.damage is None and "gather" in words_of(trace)


# Live.


PROGRESS = """
import select, sys, time
print("first", sys.stdout.isatty())
for number in range(3):
    print(f"\\r{number}/3", end="", flush=True)
    time.sleep(0.1)
# Until somebody has seen the view.
select.select([sys.stdin], [], [], 120)
print("\\nlast")
"""


@pytest.mark.slow
def test_a_live_view_shares_the_terminal_with_what_the_script_prints(tmp_path: Path) -> None:
    code, shown = on_a_terminal([*ZPROF[1:], "--live", script(tmp_path, PROGRESS)], tmp_path, "rss ", b"\n")
    assert code == 0
    for part in ("first True", "2/3", "last", "rss ", "zprof: next: zprof report run.0.zprof"):
        assert part in shown, shown
    piped = zprof("-f", "--live", "script.py", at=tmp_path)
    assert (piped.returncode, piped.stdout.splitlines()[0]) == (0, "first False")
    assert "expected a terminal on stderr" in piped.stderr


# Kills.


def test_kills_are_read_from_both_kinds_of_cgroups_and_told_from_none(tmp_path: Path) -> None:
    def machine(name: str, kills: int, files: dict[str, str]) -> Kills:
        root = tmp_path / name
        for path, text in {**files, "proc/vmstat": f"oom_kill {kills}\n"}.items():
            script(root, text.replace("KILLS", str(kills)), path)
        return Kills.read(root)

    two = {
        "proc/self/cgroup": "0::/job/rank\n",
        "sys/fs/cgroup/job/memory.events": "oom 9\noom_kill KILLS\n",
        "sys/fs/cgroup/job/memory.max": "1073741824\n",
        "sys/fs/cgroup/job/rank/memory.events": "oom 9\noom_kill KILLS\n",
        "sys/fs/cgroup/job/rank/memory.max": "max\n",
    }
    before = machine("two", 0, two)
    whose = machine("two", 1, two).since(before)
    assert whose == (f"cgroup {tmp_path}/two/sys/fs/cgroup/job/rank", 1 << 30), "the narrowest, bounded by all above it"
    one = {
        "proc/self/cgroup": "4:memory:/box\n2:cpu:/\n",
        "sys/fs/cgroup/memory/box/memory.oom_control": "oom_kill_disable 0\noom_kill KILLS\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4096\n",
    }
    assert machine("one", 3, one).cgroup == {f"{tmp_path}/one/sys/fs/cgroup/memory/box": (3, 4096)}
    none = machine("none", 1, {})
    assert machine("none", 2, {}).since(none) == ("the machine", None)
    assert machine("none", 1, {}).since(none) is None
