"""What a policy may say, read from files, tables and DeepSpeed configurations; names and sizes only, without torch."""

from __future__ import annotations

from offload.documents import Table
from offload.policy.costs import Cost, Footprint, cost, footprint
from offload.policy.deepspeed import Argument, IgnoredKeys
from offload.policy.policy import Policy, written
from offload.policy.tables import CELLS, Activation, Precision, Rule, RuleCell, RulePrecision

__all__ = [
    "CELLS",
    "Activation",
    "Argument",
    "Cost",
    "Footprint",
    "IgnoredKeys",
    "Policy",
    "Precision",
    "Rule",
    "RuleCell",
    "RulePrecision",
    "Table",
    "cost",
    "footprint",
    "written",
]
