"""Adam, SGD, Lion and stochastic rounding in one pass over host memory, compiled by numba."""

from __future__ import annotations

from offload.kernels.rounding import Noise, noise_for, round_to_bf16
from offload.kernels.sharing import cores_of_rank, flushes_denormals, update_threads
from offload.kernels.updates import RTOL, Adam, Lion, Sgd, adam, available, lion, sgd

__all__ = [
    "RTOL",
    "Adam",
    "Lion",
    "Noise",
    "Sgd",
    "adam",
    "available",
    "cores_of_rank",
    "flushes_denormals",
    "lion",
    "noise_for",
    "round_to_bf16",
    "sgd",
    "update_threads",
]
