"""The tables of the pages are those of the kept results, and who changed one by hand is noticed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

RATIO = {"median": 0.614, "lowest": 0.6, "highest": 0.7}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`benchmarks/tables.py`, as it is imported by a command of that folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import tables

    yield tables
    for name in {"tables", "results", "launch"} - before:
        sys.modules.pop(name, None)


def kept(results: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", folder / "results")
    rows = [
        {"driver": "fsdp2", "step_ratio": RATIO | {"median": 1.0}, "rss_ratio": RATIO | {"median": 1.0}},
        {"driver": "zhooks-3", "step_ratio": RATIO, "rss_ratio": None},
    ]
    results.save("peers", {"summary": [{"config": "tiny", "dtype": "fp32", "rows": rows}]})


def test_the_pages_have_the_tables_of_the_kept_results(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(tables.PAGES, check=True) == 0, capsys.readouterr().err


def test_a_table_is_made_of_what_was_measured_and_names_its_commit_and_machine(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tables.results, tmp_path, monkeypatch)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table peers-fp32 -->\n<!-- end of table -->\nafter\n")
    assert tables.main([page], check=False) == 0
    text = page.read_text()
    assert "| FSDP2 | 1.00 | 1.00 |\n| zhooks stage 3 | 0.61 |  |\n" in text and "DDP" not in text
    about = tables.results.load("peers")["about"]
    assert about["commit"] in text and about["machine"]["processor"] in text and about["versions"]["torch"] in text
    assert text.startswith("before\n") and text.endswith("<!-- end of table -->\nafter\n")
    assert tables.main([page], check=True) == 0


def test_a_table_that_was_changed_by_hand_is_named(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tables.results, tmp_path, monkeypatch)
    page = tmp_path / "page.md"
    page.write_text("<!-- table peers-fp32 -->\n<!-- end of table -->\n")
    tables.main([page], check=False)
    page.write_text(changed := page.read_text().replace("0.61", "0.41"))
    assert tables.main([page], check=True) == 1
    assert "page.md: a table differs" in capsys.readouterr().err and page.read_text() == changed
