"""Marks values of a parameter slow, so that a default run leaves out the cases that have one.

Tests list them in ``pytest.mark.parametrize`` and in ``on_ranks``.  It imports nothing but pytest, and marks no whole test.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["slow"]


def slow(*values: Any) -> tuple[Any, ...]:
    """Values that a default run does without."""
    return tuple(pytest.param(value, marks=pytest.mark.slow) for value in values)
