"""Owns how tests call ``zprof export``: in a folder of their own, and what a good and a bad answer look like.

`tests/zprof/test_export.py` and `tests/zprof/test_export_faults.py` use it. It checks the words around a file, not what is in
it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zprof.bench import store as bench_store
from zprof.cli import main

__all__ = ["Export", "exporting", "promtool", "refused", "well"]

Export = Callable[..., Result]


def exporting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    """Calls the command with the arguments given, in ``folder``."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(bench_store, "bench_path", lambda: folder / "bench.json")
    return lambda *arguments: CliRunner().invoke(main, ["export", *map(str, arguments)], prog_name="zprof")


def well(result: Result) -> str:
    """The one line of an export that went well."""
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert result.stdout.count("\n") == 1
    return result.stdout


def refused(result: Result, *, code: int = 1) -> str:
    """The one line of an export that did not; wrong usage has click's own."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert code == 2 or result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def promtool(body: bytes) -> None:
    """Hold ``body`` against Prometheus' own tool, where it is on the path."""
    if tool := shutil.which("promtool"):
        told = subprocess.run([tool, "check", "metrics"], input=body, capture_output=True, check=False)
        assert (told.returncode, told.stdout, told.stderr) == (0, b"", b"")
