"""What an attachment says of itself: memory, a description, events for observers, ranges for choosing dtypes."""

from __future__ import annotations

from zhooks.report.calibrate import Calibration, calibrating
from zhooks.report.description import describe
from zhooks.report.grad_norms import GradNorms, gradient_norms
from zhooks.report.memory import MemoryReport, memory_report
from zhooks.report.noise_scale import NoiseEstimate, NoiseScale, measure_noise

__all__ = [
    "Calibration",
    "GradNorms",
    "MemoryReport",
    "NoiseEstimate",
    "NoiseScale",
    "calibrating",
    "describe",
    "gradient_norms",
    "measure_noise",
    "memory_report",
]
