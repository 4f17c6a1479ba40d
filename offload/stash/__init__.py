"""Short-lived values of a pass, moved to a slower tier while nobody needs them."""

from __future__ import annotations

from offload.stash.stash import Limits, Saved, Stash

__all__ = ["Limits", "Saved", "Stash"]
