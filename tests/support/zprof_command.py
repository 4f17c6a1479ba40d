"""Owns how tests call ``zprof`` in their own process: in a folder of their own, with nobody's settings, as a shell would.

The fixture ``zprof`` of `tests/zprof/conftest.py` is made here. It judges no answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zprof.cli import main

#: Called with the words of a command line, none of which need be text.
Zprof = Callable[..., Result]
#: What launchers say to a rank begins with one of these; the environment without it.
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_", "SLURM_", "TORCHELASTIC_")
NOT_LAUNCHED = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
#: The name of `write_results`, for a pool of ranks.
WRITE_RESULTS = f"{__name__}:write_results"


def zprof_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Zprof:
    """Goes into the folder, and calls the command there."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words], prog_name="zprof")


def write_results(folder: str, command: str, words: Mapping[str, str]) -> None:
    """In the process of the virtual device: the command with each of these words, its result in ``NAME.result``."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name, line in words.items():
            found = CliRunner().invoke(main, [command, *line.split()], prog_name="zprof")
            body = {"code": found.exit_code, "out": found.stdout, "err": found.stderr, "raised": repr(found.exception)}
            Path(f"{name}.result").write_text(json.dumps(body))
    finally:
        os.chdir(before)
