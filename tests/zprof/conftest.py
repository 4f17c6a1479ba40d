"""The command line for every test of zprof that asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.zprof_command import Zprof, zprof_in


@pytest.fixture
def zprof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zprof:
    """Calls ``zprof`` with the words given, in the test's own folder."""
    return zprof_in(tmp_path, monkeypatch)
