"""``%zprof?`` in a notebook: what IPython is handed to show, also where IPython itself is not installed."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from zprof.running.jupyter import load


def test_the_help_of_the_magic_says_how_it_is_used_and_a_line_alone_records_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    magics = Mock()
    load(magics)
    (magic,), told = magics.register_magic_function.call_args
    assert told == {"magic_kind": "line_cell", "magic_name": "zprof"}
    assert "--level" in magic.__doc__ and "-o FILE" in magic.__doc__
    assert magic("") is None
    assert capsys.readouterr().err == "%zprof: expected a cell to record; write %%zprof above it\n"
