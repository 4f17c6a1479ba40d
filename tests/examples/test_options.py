"""The command line of the main example: what is wrong with it is one line, before anything is trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lr", "nan"], "--lr: expected a number, found nan"),
        (["--seconds", "nan"], "--seconds: expected a number, found nan"),
        (["--out", "both.json", "--json", "both.json"], "--json: expected another file than --out"),
        (["--out", "/dev/null"], "/dev/null: expected a file or no such path, found a device or a pipe"),
        (["--policy", "a.toml", "--stage", "2"], "--policy and --stage"),
    ],
)
def test_options_that_cannot_work_are_one_line_before_anything_is_trained(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
