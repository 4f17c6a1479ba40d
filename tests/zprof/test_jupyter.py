"""``%%zprof`` in IPython's own shell: cells are recorded, results and errors are what they would be without."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zprof.trace.reader import Trace

pytestmark = pytest.mark.usefixtures("alone")

pytest.importorskip("IPython", reason="IPython is not installed: pip install ipython")

with warnings.catch_warnings():
    # What IPython's own packages deprecate is not ours to answer for.
    warnings.simplefilter("ignore")
    from IPython.core.interactiveshell import InteractiveShell

MODEL = """
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
loss = model(torch.ones(32, 64)).sum()
loss.backward()
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    gc.collect()  # What other tests left is alive to a recording, too.
    shell: Any = InteractiveShell()
    # In memory: a test leaves no history anywhere.
    shell.history_manager.enabled = False
    shell.run_line_magic("load_ext", "zprof")
    yield shell
    shell.history_manager.end_session()


def test_a_cell_is_recorded_and_its_summary_is_the_result(shell: Any, tmp_path: Path) -> None:
    result = shell.run_cell(f"%%zprof -o a.zprof\n{MODEL}")
    assert result.success
    recording = shell.user_ns["_"]
    assert recording.path == Path("a.zprof")
    assert recording.peaks["device"] >= recording.held["parameter", "device"] == 2 * (64 * 64 + 64) * 4
    assert repr(recording).startswith("zprof: peak device ")
    trace = Trace.open(tmp_path / "a.zprof")
    assert trace.damage is None
    assert trace.header.level == "alloc"
    assert shell.user_ns["loss"].requires_grad, "the cell's names are the notebook's"


def test_a_summary_in_html_is_small_and_escapes_what_it_shows(shell: Any, tmp_path: Path) -> None:
    from zprof.running.jupyter import Recording

    recording = Recording(Path("<script>.zprof"), {"device": 2048}, {("parameter", "device"): 2048}, ("a <b> of it",))
    page = recording._repr_html_()
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
    assert "parameter" in page
    assert "2 KiB" in page
    assert len(page) < 4096


def test_a_cell_that_raises_shows_its_own_error_and_stops_the_notebook(shell: Any, capsys: Any) -> None:
    result = shell.run_cell("%%zprof\nraise ValueError('mine')")
    assert not result.success
    shown = capsys.readouterr().out
    assert shown.count("ValueError") >= 1
    assert "mine" in shown
    assert "record_cell" not in shown
    [end] = Trace.open("cell.zprof").notes("end")
    assert end.body["reason"] == "ValueError"


def test_a_cell_without_memory_is_explained(shell: Any, capsys: Any) -> None:
    shell.run_cell(f"%%zprof\n{MODEL}\ntorch.empty(1 << 60)")
    assert "out of memory: " in capsys.readouterr().out


def test_the_same_cell_runs_again_over_its_own_trace(shell: Any) -> None:
    for _ in range(2):
        assert shell.run_cell("%%zprof --level events\n1 + 1").success


def test_a_wrong_option_is_one_line_and_the_cell_does_not_run(shell: Any, capsys: Any) -> None:
    shell.run_cell("%%zprof --levle alloc\nran = True")
    said = capsys.readouterr().err
    assert said.startswith("%%zprof: No such option")
    assert said.count("\n") == 1
    assert "ran" not in shell.user_ns
