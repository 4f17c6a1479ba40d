"""Short-lived values of a pass: put away when saved, back ahead of use, freed when dropped."""

from __future__ import annotations

from offload.stash.saved import Saved
from offload.stash.stash import Limits, Stash

__all__ = [
    "Limits",
    "Saved",
    "Stash",
]
