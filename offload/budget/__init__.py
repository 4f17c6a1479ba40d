"""Bytes per tier: how many are allowed, how many are held and by whom, and what the machine has."""

from __future__ import annotations

from offload.budget.account import Account
from offload.budget.budget import Budget, cannot_admit
from offload.budget.capacity import THIS_MACHINE, Facts, available, preflight
from offload.budget.machine import Bound, Machine, kept_free

__all__ = [
    "THIS_MACHINE",
    "Account",
    "Bound",
    "Budget",
    "Facts",
    "Machine",
    "available",
    "cannot_admit",
    "kept_free",
    "preflight",
]
