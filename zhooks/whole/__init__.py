"""Updates of parameters that an optimizer must see whole (matrices: Muon, Shampoo), each on the rank that owns it."""

from __future__ import annotations

from zhooks.whole.update import WholeUpdater

__all__ = ["WholeUpdater"]
