"""The Makefile: an interrupt ends all that a target runs, and a set-up says what it does.

Each test runs ``make`` on a copy of the Makefile, whose environment has a program in Python's place that waits.
"""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import soon

ROOT = Path(__file__).resolve().parent.parent
#: In Python's place: notes what it is asked to run, and waits until it may end; interrupted, it ends as pytest and mypy do.
PROGRAM = f"""#!{sys.executable} -IS
import os, sys, time
with open("started", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
deadline = time.monotonic() + 120
try:
    while not os.path.exists("may-end") and time.monotonic() < deadline:
        time.sleep(0.02)
except KeyboardInterrupt:
    sys.exit(2)
"""
#: Of a person's shell, not of the ``make test`` that these tests may run under: a make in a make says where it works.
SHELL = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
#: Targets that run several programs, and the first of these.
SEVERAL = {"lint": "-m ruff", "test": "-m ruff", "coverage": "-m coverage run", "setup": "-m pip", "mutation": "-m pip"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the Makefile and an environment."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PROGRAM)
    python.chmod(0o755)
    return tmp_path


def started(project: Path) -> list[str]:
    log = project / "started"
    return log.read_text().splitlines() if log.exists() else []


def interrupted(project: Path, target: str, send: Callable[[int], None], *words: str, ignored: bool = False) -> int:
    """The exit code of a target that is sent an interrupt while its first program runs."""
    if target != "setup":
        (project / ".venv" / ".setup-done").touch()

    def before() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)

    make = subprocess.Popen(
        ["make", target, *words], cwd=project, env=SHELL, start_new_session=True, preexec_fn=before, stdout=subprocess.DEVNULL
    )
    soon(lambda: len(started(project)) == 1)
    send(make.pid)
    (project / "may-end").touch()
    return make.wait(120)


def to_all(pid: int) -> None:
    os.killpg(pid, signal.SIGINT)


def to_make(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


@pytest.mark.parametrize("send", [to_all, to_make])
@pytest.mark.parametrize("target", SEVERAL)
def test_no_program_is_started_after_an_interrupt(project: Path, target: str, send: Callable[[int], None]) -> None:
    assert interrupted(project, target, send) != 0
    assert [words.startswith(SEVERAL[target]) for words in started(project)] == [True]
    assert (project / ".venv" / ".setup-done").exists() == (target != "setup")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_shell_that_waits_for_what_it_runs_starts_nothing_either(project: Path) -> None:
    assert interrupted(project, "coverage", to_all, f"SHELL={shutil.which('bash')}") != 0
    assert len(started(project)) == 1


@pytest.mark.skipif(
    subprocess.run(["env", "--default-signal=INT", "true"], capture_output=True).returncode != 0, reason="env cannot"
)
@pytest.mark.parametrize("target", SEVERAL)
def test_a_job_in_the_background_of_a_script_which_ignores_interrupts_ends_by_one_too(project: Path, target: str) -> None:
    assert interrupted(project, target, to_all, ignored=True) != 0
    assert len(started(project)) == 1


def test_a_set_up_says_what_it_installs_and_when_it_is_done(project: Path) -> None:
    (project / "may-end").touch()
    done = subprocess.run(["make", "setup"], cwd=project, env=SHELL, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("test -x", "touch"))]
    assert [line.partition(" ")[0] for line in lines] == ["setting", "1", "2", ".venv"] and lines[-1] == ".venv is set up"
    assert "torch" in lines[1] and "minutes" in lines[1] and "minutes" in lines[2]
    assert [words.split()[:4] for words in started(project)] == [["-m", "pip", "install", "--quiet"]] * 2


def test_on_a_terminal_pip_shows_how_far_a_set_up_is(project: Path) -> None:
    (project / "may-end").touch()
    control, terminal = pty.openpty()
    subprocess.run(["make", "setup"], cwd=project, env=SHELL, stdout=terminal, stderr=terminal, timeout=120, check=True)
    os.close(terminal)
    os.close(control)
    assert len(started(project)) == 2 and not any("--quiet" in words for words in started(project))
