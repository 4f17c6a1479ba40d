"""Builds what was planned, shards and tiers, and puts the model back."""

from __future__ import annotations

from zhooks.build.shard import BuildContext, build_units, flat_of, restore_units
from zhooks.build.tiers import Tiers, open_tiers

__all__ = ["BuildContext", "Tiers", "build_units", "flat_of", "open_tiers", "restore_units"]
