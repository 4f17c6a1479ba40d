"""What hardware can do and what operations take on it: profiles with their sources, and a pure cost model; without torch."""

from __future__ import annotations

from offload.hardware.collectives import ALGORITHMS, KINDS, Collective, Group
from offload.hardware.costs import CostModel, StepCost, as_ns
from offload.hardware.fitting import MEASURED, Fit, Residual, Sample, fit
from offload.hardware.hardware import Hardware, for_device, names
from offload.hardware.tables import DTYPES

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "KINDS",
    "MEASURED",
    "Collective",
    "CostModel",
    "Fit",
    "Group",
    "Hardware",
    "Residual",
    "Sample",
    "StepCost",
    "as_ns",
    "fit",
    "for_device",
    "names",
]
