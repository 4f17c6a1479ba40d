"""Bytes per tier: how many are allowed, how many are held and by whom, and what the machine has."""

from __future__ import annotations

from offload.budget.budget import Account, Budget, cannot_admit
from offload.budget.machine import ALONE, THIS_MACHINE, Bound, Machine, Ranks, Shared, available, kept_free, preflight

__all__ = [
    "ALONE", "THIS_MACHINE", "Account", "Bound", "Budget", "Machine", "Ranks", "Shared", "available", "cannot_admit",
    "kept_free", "preflight",
]  # fmt: skip
