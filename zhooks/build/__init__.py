"""Builds what was planned, shards and tiers, and puts the model back."""

from __future__ import annotations

from zhooks.build.restore import restore_units
from zhooks.build.shard import BuildContext, build_units, flat_of
from zhooks.build.tiers import Tiers, open_tiers

__all__ = ["BuildContext", "Tiers", "build_units", "flat_of", "open_tiers", "restore_units"]
