"""Builds what was planned: shards, tiers; lays units out anew; and puts the model back."""

from __future__ import annotations

from zhooks.build.relayout import relayout_units
from zhooks.build.restore import restore_units
from zhooks.build.shard import BuildContext, build_units
from zhooks.build.tiers import Tiers, open_tiers

__all__ = ["BuildContext", "Tiers", "build_units", "open_tiers", "relayout_units", "restore_units"]
