"""Bytes per tier: how many are allowed, how many are held and by whom, and what the machine has."""

from __future__ import annotations

from offload.budget.account import Account
from offload.budget.budget import Budget, cannot_admit
from offload.budget.capacity import ALONE, THIS_MACHINE, Facts, Ranks, available, preflight
from offload.budget.machine import Bound, Machine, Shared, kept_free

__all__ = [
    "ALONE",
    "THIS_MACHINE",
    "Account",
    "Bound",
    "Budget",
    "Facts",
    "Machine",
    "Ranks",
    "Shared",
    "available",
    "cannot_admit",
    "kept_free",
    "preflight",
]
