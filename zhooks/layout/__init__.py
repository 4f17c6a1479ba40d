"""Integers and facts: flat layouts, placements, mesh axes, how a parameter is divided, which modules make a unit."""

from __future__ import annotations

from zhooks.layout.flat_kind import DTYPES, FLATS, Kind, kind_of
from zhooks.layout.flat_ranges import ALIGN_BYTES, Layout, Piece, Segment, flat_layout
from zhooks.layout.frozen_subclass import FrozenSubclass
from zhooks.layout.ignored import Ignored
from zhooks.layout.mesh import DATA, EP, PP, REPLICATE, SHARD, STAGE, TP, Axis, Mesh, accepted_names, axis_names, resolve
from zhooks.layout.placement import Placement, Table
from zhooks.layout.tp_division import Division, hollow, is_divided, mark_of, part_of, rewrap, whole_of
from zhooks.layout.unit_plan import FlatPlan, Keeps, UnitPlan, flats_of, inner_units
from zhooks.layout.units import Group, find_units

__all__ = [
    "ALIGN_BYTES",
    "DATA",
    "DTYPES",
    "EP",
    "FLATS",
    "PP",
    "REPLICATE",
    "SHARD",
    "STAGE",
    "TP",
    "Axis",
    "Division",
    "FlatPlan",
    "FrozenSubclass",
    "Group",
    "Ignored",
    "Keeps",
    "Kind",
    "Layout",
    "Mesh",
    "Piece",
    "Placement",
    "Segment",
    "Table",
    "UnitPlan",
    "accepted_names",
    "axis_names",
    "find_units",
    "flat_layout",
    "flats_of",
    "hollow",
    "inner_units",
    "is_divided",
    "kind_of",
    "mark_of",
    "part_of",
    "resolve",
    "rewrap",
    "whole_of",
]
