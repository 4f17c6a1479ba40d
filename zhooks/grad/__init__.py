"""Gradients: accumulated, reduced in one order on all ranks, scaled."""

from __future__ import annotations

from zhooks.grad.direct import refuse_saved, watch_direct
from zhooks.grad.grad_buffer import GradBuffer
from zhooks.grad.node import Node
from zhooks.grad.reduce import Reducer, Rider
from zhooks.grad.reduction import Probe, ReduceHook, ReplicaSums, Sent
from zhooks.grad.scaled_graph import each
from zhooks.grad.scaling import Scaling
from zhooks.grad.stacks import Asked, full_state_asked, in_backward, running, transforms

__all__ = [
    "Asked",
    "GradBuffer",
    "Node",
    "Probe",
    "ReduceHook",
    "Reducer",
    "ReplicaSums",
    "Rider",
    "Scaling",
    "Sent",
    "each",
    "full_state_asked",
    "in_backward",
    "refuse_saved",
    "running",
    "transforms",
    "watch_direct",
]
