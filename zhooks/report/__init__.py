"""What an attachment says of itself: memory, a description, events for observers, ranges for choosing dtypes."""

from __future__ import annotations

from zhooks.report.calibrate import Calibration, calibrating
from zhooks.report.description import describe
from zhooks.report.grad_norms import GradNorms, gradient_norms
from zhooks.report.memory import MemoryReport, memory_report
from zhooks.report.noise_scale import NoiseEstimate, NoiseScale, measure_noise
from zhooks.report.nonfinite import NonFinite
from zhooks.report.observe import Observation, state_held
from zhooks.report.unmatched import warn_of_unmatched

__all__ = [
    "Calibration",
    "GradNorms",
    "MemoryReport",
    "NoiseEstimate",
    "NoiseScale",
    "NonFinite",
    "Observation",
    "calibrating",
    "describe",
    "gradient_norms",
    "measure_noise",
    "memory_report",
    "state_held",
    "warn_of_unmatched",
]
