"""What tests import, and what the processes they start import, is this checkout, whatever is installed beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import offload
import zhooks
import zprof
from tests.support import forked
from tests.support.paths import ROOT

PLACES = {"zhooks": ROOT / "zhooks", "offload": ROOT / "offload", "zprof": ROOT / "tools" / "zprof"}
SHOWN = f"import {', '.join(PLACES)}; print(*(module.__path__[0] for module in ({', '.join(PLACES)})), sep='\\n')"


def test_tests_import_this_checkout() -> None:
    assert [module.__path__[0] for module in (zhooks, offload, zprof)] == [str(place) for place in PLACES.values()]


@pytest.mark.parametrize("start", ["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def test_a_process_that_a_test_starts_in_another_folder_imports_this_checkout(start: str, tmp_path: Path) -> None:
    if start == "forked":
        done = forked.python("-c", SHOWN, at=tmp_path)
    else:
        done = subprocess.run([sys.executable, "-c", SHOWN], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == [str(place) for place in PLACES.values()], done.stderr
