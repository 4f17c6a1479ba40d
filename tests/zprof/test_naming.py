"""Traces that nobody named: each run has new ones, the same number on all its ranks, and commands read the newest run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.forked import python
from tests.support.zprof_command import NOT_LAUNCHED
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.cli import main
from zprof.trace.reader import Trace

#: One rank after the other: the later ones see what the earlier have left.
LAUNCHER = """
import os, subprocess, sys
for rank, ran in enumerate(sys.argv[1:]):
    told = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(len(sys.argv) - 1)}
    subprocess.run([sys.executable, "-m", "zprof", "run", "script.py", ran], env=told, check=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("import sys; print(sys.argv)")
    return tmp_path


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "zprof", "run", *words, environment=NOT_LAUNCHED | environment)


def zprof(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def recorded() -> dict[str, tuple[str, ...]]:
    """Each trace here: what the script was given."""
    return {path.name: Trace.open(path).header.argv[1:] for path in Path().glob("*.zprof")}


@pytest.mark.slow
def test_every_run_of_a_script_has_a_trace_of_its_own() -> None:
    for ran in ("first", "second", "third"):
        done = run("script.py", ran)
        assert done.returncode == 0, done.stderr
    assert recorded() == {"run.0.zprof": ("first",), "run-2.0.zprof": ("second",), "run-3.0.zprof": ("third",)}
    assert "run-3.0.zprof" in done.stderr, "it says where to look"
    assert run("-f", "script.py", "again").returncode == 0
    assert recorded()["run.0.zprof"] == ("again",) and len(recorded()) == 3


def test_a_run_is_numbered_above_all_others_whatever_their_ranks() -> None:
    for name in ("run.0.zprof", "run-4.3.restart1.zprof", "run-9.zprof", "other-7.0.zprof"):
        write_trace(Path(name), sample_rows())
    assert run("script.py").returncode == 0
    assert Path("run-5.0.zprof").is_file()


@pytest.mark.slow
def test_ranks_that_begin_one_after_the_other_agree_on_the_number() -> None:
    Path("launcher.py").write_text(LAUNCHER)
    for given in (("a0", "a1"), ("b0", "b1", "b2"), ("c0", "c1")):
        subprocess.run([sys.executable, "launcher.py", *given], env=NOT_LAUNCHED, check=True, timeout=600, capture_output=True)
    assert recorded() == {
        f"run{number}.{rank}.zprof": (f"{name}{rank}",)
        for number, name, ranks in (("", "a", 2), ("-2", "b", 3), ("-3", "c", 2))
        for rank in range(ranks)
    }


def test_ranks_of_several_hosts_are_refused_a_name_that_is_taken() -> None:
    hosts = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert run("script.py", **hosts).returncode == 0
    refused = run("script.py", **hosts)
    assert refused.returncode == 1 and "run.1.zprof: exists already" in refused.stderr
    assert list(recorded()) == ["run.1.zprof"]


def aged(name: str, age_s: int, *, rank: int = 0, world: int = 1) -> None:
    path = write_trace(Path(name), sample_rows(), rank=rank, world=world)
    time_s = path.stat().st_mtime - age_s
    os.utime(path, (time_s, time_s))


def test_commands_read_the_newest_run_with_all_its_ranks_and_say_so() -> None:
    aged("other.zprof", 30)
    aged("run.0.zprof", 20)
    for rank, age_s in ((0, 11), (1, 10)):
        aged(f"run-2.{rank}.zprof", age_s, rank=rank, world=2)
    for words in (["report", "--json"], ["check", "--json"], ["export", "--format", "csv"], ["timeline", "--json"]):
        done = zprof(*words)
        assert done.exit_code == 0, done.output
        assert done.stderr.splitlines()[0] == "zprof: run-2.0.zprof run-2.1.zprof: the newest run in this folder", words
        if words[0] in ("report", "check"):
            assert {Path(each.get("file", each.get("path"))).name for each in json.loads(done.stdout)["runs"]} == {
                "run-2.0.zprof",
                "run-2.1.zprof",
            }
    refused = zprof("flamegraph")
    assert refused.exit_code == 2 and "found 2 of the newest run here; choose one with --rank" in refused.stderr


@pytest.mark.parametrize("named", [[], ["run.0.zprof", "run.1.zprof", "run.2.zprof"], ["."]], ids=["newest", "files", "folder"])
def test_rank_chooses_one_trace_of_a_run(named: list[str]) -> None:
    for rank in range(3):
        aged(f"run.{rank}.zprof", 10 - rank, rank=rank, world=3)
    told = zprof("report", *named, "--rank", "1", "--json")
    assert [run["rank"] for run in json.loads(told.stdout)["runs"]] == [1]
    assert told.stderr == ("" if named else "zprof: run.1.zprof: rank 1 of the newest run in this folder\n")
    assert [Path(run["path"]).name for run in json.loads(zprof("check", "--rank", "2", *named, "--json").stdout)["runs"]] == [
        "run.2.zprof"
    ]
    if len(named) < 2:
        assert zprof("flamegraph", "--rank", "1", *named).exit_code == 0 and Path("run.1.flamegraph.html").is_file()
    refused = zprof("report", *named, "--rank", "7")
    where = named[0] if named else "run.0.zprof"
    assert refused.exit_code == 1
    assert refused.stderr == f"--rank 7: expected a trace of this rank in {where}, found ranks 0, 1, 2\n"
    assert zprof("report", "--rank", "-1").exit_code == 2


def test_a_snapshot_of_several_ranks_is_of_the_one_chosen() -> None:
    for rank in range(2):
        write_trace(Path(f"run.{rank}.zprof"), sample_rows(level="alloc"), level="alloc", rank=rank, world=2)
    refused = zprof("export", "--format", "torch-snapshot")
    assert refused.exit_code == 2 and "expected one rank, found 2; choose one with --rank" in refused.stderr
    assert zprof("export", "--format", "torch-snapshot", "--rank", "1").exit_code == 0
    assert [path.name for path in Path().glob("*.pickle")] == ["run.1.pickle"]


def test_a_command_for_one_rank_reads_the_newest_trace() -> None:
    aged("old.zprof", 30)
    aged("new.zprof", 10)
    drawn = zprof("flamegraph")
    assert drawn.exit_code == 0 and Path("new.flamegraph.html").is_file()
    assert zprof("report", "old.zprof").stderr == "", "who names a run hears nothing of others"


@pytest.mark.parametrize(
    "command", [["report"], ["check"], ["timeline"], ["flamegraph"], ["oom"], ["export", "--format", "csv"]]
)
def test_a_folder_without_traces_is_said(command: list[str]) -> None:
    refused = zprof(*command)
    assert refused.exit_code == 2
    assert "RUN: expected a trace, found no *.zprof in this folder" in refused.stderr and refused.stderr.count("\n") == 1


def test_f_of_export_writes_over_a_file() -> None:
    aged("run.0.zprof", 10)
    assert zprof("export", "--format", "csv").exit_code == 0
    again = zprof("export", "--format", "csv")
    assert again.exit_code == 1
    assert "exists already, expected a new name; name another with -o, or overwrite it with -f" in again.stderr
    assert zprof("export", "--format", "csv", "-f").exit_code == 0
