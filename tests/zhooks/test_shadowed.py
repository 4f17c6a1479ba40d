"""A user's file with the name of our second package: refused by name before anything of it runs twice.

pytest runs it, in interpreters of their own, which end before torch is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def run(script: str, at: Path) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script], cwd=at, env=told, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("script", "found"),
    [("offload.py", "offload.py"), ("train.py", "offload.py"), ("train.py", "offload/__init__.py")],
)
def test_a_file_called_offload_is_named_as_the_reason_why_zhooks_cannot_be_imported(
    script: str, found: str, tmp_path: Path
) -> None:
    for each in (found, script):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text('print("ran")\nimport zhooks\n')
    done = run(script, tmp_path)
    assert done.returncode == 1 and done.stdout == "ran\n"
    assert f"ImportError: zhooks expected its package offload, found {tmp_path / found}, " in done.stderr


def test_a_folder_called_offload_without_code_of_that_name_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "offload").mkdir()
    (tmp_path / "train.py").write_text("import zhooks.errors_of_nobody")
    done = run("train.py", tmp_path)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'zhooks.errors_of_nobody'"
