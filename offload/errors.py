"""Owns the error tree: every mistake the project reports to its user is one of these classes.

Every package raises from here; `zhooks` exports the tree, and gives the classes its own name. It never formats a message, and
imports nothing.
"""

from __future__ import annotations

__all__ = [
    "AttachError",
    "BudgetError",
    "CapabilityError",
    "CheckpointError",
    "DivergenceError",
    "HardwareError",
    "LayoutError",
    "NonFiniteError",
    "PolicyError",
    "ScaleError",
    "ShardedOpError",
    "SimulationError",
    "TierError",
    "ZhooksError",
]


class ZhooksError(Exception):
    """Base class of all errors raised deliberately; messages say what failed, expected, found, what to do."""


class PolicyError(ZhooksError, ValueError):
    """A policy cannot be read or contradicts itself; the message has one line per problem."""


class HardwareError(ZhooksError, ValueError):
    """A hardware profile cannot be read, is not possible, or lacks a figure that is needed."""


class BudgetError(ZhooksError, RuntimeError):
    """A tier does not have enough memory for what the policy puts there."""


class TierError(ZhooksError, RuntimeError):
    """A tier lost or refused data: an I/O error, or bytes that differ from those that were written."""


class AttachError(ZhooksError, ValueError):
    """A model, optimizer or mesh cannot be attached; the model is unchanged."""


class LayoutError(ZhooksError, ValueError):
    """A buffer's length, dtype or device does not match the flat layout."""


class ShardedOpError(ZhooksError, RuntimeError):
    """An operation needs full values, but this rank holds only a range of them."""


class ScaleError(ZhooksError, RuntimeError):
    """Loss scaling cannot continue: the scale is at its minimum, or gradients bypass it."""


class NonFiniteError(ZhooksError, RuntimeError):
    """A step would have used an inf or a nan; the message names the rank and the unit where it first occurred."""


class DivergenceError(ZhooksError, RuntimeError):
    """Ranks disagree on the next collective; the message names rank, unit and call."""


class CheckpointError(ZhooksError, RuntimeError):
    """A saved state cannot be written or read, or does not match the model."""


class CapabilityError(ZhooksError, RuntimeError):
    """The machine or the installed torch lacks what the policy asks for."""


class SimulationError(ZhooksError, RuntimeError):
    """A simulation is not possible, for example because code reads values that a virtual device does not have."""
