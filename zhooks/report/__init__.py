"""What an attachment says of itself: memory, a description, events for observers, ranges for choosing dtypes."""

from __future__ import annotations

from zhooks.report.calibrate import Calibrated
from zhooks.report.description import describe
from zhooks.report.grad_norms import GradNorms
from zhooks.report.grad_statistics import GradStatistics
from zhooks.report.memory import MemoryReport, memory_report
from zhooks.report.noise_scale import NoiseEstimate, NoiseScale
from zhooks.report.nonfinite import NonFinite
from zhooks.report.observe import Observation, state_held
from zhooks.report.unmatched import warn_of_unmatched

__all__ = [
    "Calibrated",
    "GradNorms",
    "GradStatistics",
    "MemoryReport",
    "NoiseEstimate",
    "NoiseScale",
    "NonFinite",
    "Observation",
    "describe",
    "memory_report",
    "state_held",
    "warn_of_unmatched",
]
