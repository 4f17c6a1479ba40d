"""Owns how tests call ``zprof`` in their own process: in a folder of their own, with nobody's settings, as a shell would.

The fixture ``zprof`` of `tests/zprof/conftest.py` is made here. It judges no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zprof.cli import main

#: Called with the words of a command line, none of which need be text.
Zprof = Callable[..., Result]


def zprof_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Zprof:
    """Goes into the folder, and calls the command there."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words], prog_name="zprof")
