"""A folder that several hosts share: what each rank's trace is called there, and which traces of it are one run's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import zprof as package
from tests.support.forked import python
from tests.support.zprof_command import LAUNCHERS
from tests.support.zprof_traces import HEADER, sample_rows, write_trace
from zprof.cli import main
from zprof.commands.naming import output_of
from zprof.problem import Problem
from zprof.trace.families import newest

SECOND_NS = 1_000_000_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    return tmp_path


def zprof(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def begun(path: Path, at_s: int, *, rank: int = 0, world: int = 1, changed_s: int | None = None) -> Path:
    """A trace whose recording began then, and that was written to last ten seconds later unless said."""
    wall_ns = HEADER.wall_ns + at_s * SECOND_NS
    write_trace(path, sample_rows(steps=2, units=1), rank=rank, world=world, wall_ns=wall_ns)
    changed_ns = HEADER.wall_ns + (at_s + 10 if changed_s is None else changed_s) * SECOND_NS
    os.utime(path, ns=(changed_ns, changed_ns))
    return path


def names(family: object) -> list[str]:
    return [path.name for path in getattr(family, "paths", ())]


# --- what a trace is called -------------------------------------------------------------------------------------------


def hosts(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """This process is a rank of a torchrun over two hosts."""
    told = {"TORCHELASTIC_RUN_ID": "job7", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in (told | more).items():
        monkeypatch.setenv(name, value)


def test_all_ranks_of_a_job_on_several_hosts_write_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(monkeypatch)
    assert [output_of("runs/", rank, 4, False) for rank in range(4)] == [Path(f"runs/job7.{rank}.zprof") for rank in range(4)]
    assert output_of("runs", 1, 4, False) == Path("runs/job7.1.zprof"), "it is a folder by now"
    assert output_of(None, 1, 4, False) == Path("job7.1.zprof")
    assert output_of("big.{rank}.zprof", 1, 4, False) == Path("big.1.zprof")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "a b/../c"}, "a_b____c"),
        ({"TORCHELASTIC_RUN_ID": "x" * 300}, "x" * 64),
        ({"TORCHELASTIC_RUN_ID": "0a1b2c3d-0000-4000-8000-123456789abc"}, "job-0a1b2c3d"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2"}, "slurm-4711-2"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "run"),
    ],
)
def test_the_name_is_what_the_launcher_calls_the_job(monkeypatch: pytest.MonkeyPatch, told: dict[str, str], name: str) -> None:
    hosts(monkeypatch, **told)
    assert output_of("runs/", 3, 4, False) == Path(f"runs/{name}.3.zprof")


def test_srun_alone_names_a_job_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert output_of("runs/", 3, 4, False) == Path("runs/slurm-4711-0.3.zprof")


def test_ranks_that_are_started_again_write_beside_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(monkeypatch)
    output_of("runs/", 0, 4, False).touch()
    # This host's launcher has counted no failure: the other's ranks failed.
    assert output_of("runs/", 0, 4, False) == Path("runs/job7.0.restart1.zprof")
    hosts(monkeypatch, TORCHELASTIC_RESTART_COUNT="2")
    assert output_of("runs/", 2, 4, False) == Path("runs/job7.2.restart2.zprof")
    Path("runs/job7.2.restart2.zprof").touch()
    assert output_of("runs/", 2, 4, False) == Path("runs/job7.2.restart3.zprof")


def test_f_writes_over_an_earlier_job_of_the_name_but_over_no_attempt_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(monkeypatch)
    path = output_of("runs/", 0, 4, False)
    path.touch()
    assert output_of("runs/", 0, 4, True) == Path("runs/job7.0.restart1.zprof"), "younger than this launcher"
    os.utime(path, (1, 1))
    assert output_of("runs/", 0, 4, True) == path


def test_a_folder_is_made_below_one_that_is_there(tmp_path: Path) -> None:
    assert output_of("new/", 0, 1, False) == Path("new/run.0.zprof") and Path("new").is_dir()
    with pytest.raises(Problem, match="-o no/such/: expected a folder, or to create one: No such file or directory"):
        output_of("no/such/", 0, 1, False)
    Path("file").touch()
    with pytest.raises(Problem, match="expected a folder"):
        output_of("file/", 0, 1, False)


def test_runs_in_a_folder_are_numbered_where_nobody_named_them() -> None:
    Path("script.py").write_text("print(1)")
    for _ in range(2):
        told = python("-m", "zprof", "run", "-o", "runs/", "script.py")
        assert told.returncode == 0, told.stderr
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run-2.0.zprof", "run.0.zprof"]
    assert "zprof: next: zprof report runs/run-2.0.zprof" in told.stderr


# --- which traces are one run's ---------------------------------------------------------------------------------------


def test_a_folder_is_the_run_that_was_written_to_last_and_says_what_is_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        begun(tmp_path / f"job6.{rank}.zprof", 0, rank=rank, world=3)
        begun(tmp_path / f"job7.{rank}.zprof", 100 + rank, rank=rank, world=3)
    begun(tmp_path / "other.zprof", 50)
    family = newest(tmp_path)
    assert family is not None and names(family) == ["job7.0.zprof", "job7.1.zprof", "job7.2.zprof"]
    said = "3 traces of run job7, the newest here; 4 others are left out"
    for words in (["report", "--json", "."], ["check", "--json", "."]):
        told = zprof(*words)
        assert told.exit_code == 0 and told.stderr.splitlines()[0] == f"zprof: .: {said}"
        assert len(json.loads(told.stdout)["runs"]) == 3
    assert len(json.loads(zprof("report", "--json").stdout)["runs"]) == 3
    assert zprof("report", "job6.0.zprof", "job6.1.zprof", "job6.2.zprof").stderr == ""
    assert package.open(tmp_path, rank=2).path.name == "job7.2.zprof"


def test_of_a_job_that_was_started_again_the_last_attempt_is_read_whatever_its_numbers(tmp_path: Path) -> None:
    # Host A counted one restart, host B, whose ranks were well, none: rank 3 took the next free number.
    for rank, name in enumerate(("j.0.zprof", "j.1.zprof", "j.2.zprof", "j.3.zprof")):
        begun(tmp_path / name, rank, rank=rank, world=4)
    for rank, name in enumerate(("j.0.restart1.zprof", "j.1.restart1.zprof", "j.2.restart4.zprof", "j.3.restart1.zprof")):
        begun(tmp_path / name, 100 - rank, rank=rank, world=4)
    family = newest(tmp_path)
    assert names(family) == ["j.0.restart1.zprof", "j.1.restart1.zprof", "j.2.restart4.zprof", "j.3.restart1.zprof"]
    assert family is not None and family.line(Path("runs")) == (
        "runs: 4 traces of run j, started 2 times, the newest here; 4 others are left out"
    )


def test_a_rank_that_never_came_back_is_missing_and_not_taken_from_the_attempt_before(tmp_path: Path) -> None:
    for rank in range(3):
        begun(tmp_path / f"j.{rank}.zprof", rank, rank=rank, world=3)
    for rank in range(2):
        begun(tmp_path / f"j.{rank}.restart1.zprof", 100, rank=rank, world=3)
    told = json.loads(zprof("report", "--json", ".").stdout)
    assert [run["rank"] for run in told["runs"]] == [0, 1] and told["ranks"]["missing"] == [2]
    # What is missing is not in the folder, but for the attempt that failed.
    assert not any(each["do"].startswith("zprof report") for each in told["next"])


def test_a_trace_that_cannot_be_read_has_its_place_by_when_it_was_written(tmp_path: Path) -> None:
    for rank in range(2):
        begun(tmp_path / f"j.{rank}.zprof", 0, rank=rank, world=2)
    begun(tmp_path / "j.0.restart1.zprof", 100, rank=0, world=2)
    torn = tmp_path / "j.1.restart1.zprof"
    torn.write_bytes(b"zprof")
    changed_ns = HEADER.wall_ns + 101 * SECOND_NS
    os.utime(torn, ns=(changed_ns, changed_ns))
    assert names(newest(tmp_path)) == ["j.0.restart1.zprof", "j.1.restart1.zprof"]


def test_files_whose_names_say_no_run_are_one_run(tmp_path: Path) -> None:
    for rank, name in enumerate("ba"):
        begun(tmp_path / f"{name}.zprof", 0, rank=rank, world=2)
    assert names(newest(tmp_path)) == ["a.zprof", "b.zprof"]
    assert names(newest(tmp_path, alone=True)) == ["b.zprof"], "without being asked for a folder, the newest file"
    assert newest(tmp_path / "none") is None
