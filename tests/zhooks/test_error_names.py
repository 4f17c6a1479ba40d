"""By which name users meet the errors: in tracebacks, and in what other processes are sent."""

from __future__ import annotations

import pickle
import traceback

import pytest

import zhooks
from offload import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_a_traceback_and_a_pickle_name_an_error_as_users_import_it(name: str) -> None:
    error = getattr(zhooks, name)("what, and what to do")
    assert traceback.format_exception_only(error) == [f"zhooks.{name}: what, and what to do\n"]
    sent = pickle.dumps(error)
    assert b"offload" not in sent and type(pickle.loads(sent)) is getattr(errors, name)
    # As an earlier release pickled it.
    assert pickle.loads(f"coffload.errors\n{name}\n.".encode()) is type(error)
