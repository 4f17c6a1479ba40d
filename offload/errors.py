"""Owns the error tree: every mistake the project reports to its user is one of these classes.

Every package raises from here, and `zhooks` re-exports the tree. It never formats a message and imports nothing.
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
    """Base of every error raised on purpose; the message says what, expected, found and what to do."""


class PolicyError(ZhooksError, ValueError):
    """A policy cannot be read or contradicts itself; the message has one line per problem."""


class HardwareError(ZhooksError, ValueError):
    """A hardware profile cannot be read, is not possible, or lacks a figure that is needed."""


class BudgetError(ZhooksError, RuntimeError):
    """A tier cannot hold what the policy asks it to hold."""


class TierError(ZhooksError, RuntimeError):
    """A tier lost or refused data: an I/O error, or bytes that differ from those that were written."""


class AttachError(ZhooksError, ValueError):
    """A model, optimizer or mesh cannot be attached; the model is left as it was."""


class LayoutError(ZhooksError, ValueError):
    """A buffer's length, dtype or device is not what the flat layout says."""


class ShardedOpError(ZhooksError, RuntimeError):
    """An operation needs whole values where this rank holds only a range of them."""


class ScaleError(ZhooksError, RuntimeError):
    """Loss scaling cannot continue: the scale is at its minimum, or gradients bypass it."""


class NonFiniteError(ZhooksError, RuntimeError):
    """A step would have used an inf or a nan; the message names the rank and the unit where it first appeared."""


class DivergenceError(ZhooksError, RuntimeError):
    """Ranks disagree on the next collective; the message names rank, unit and call."""


class CheckpointError(ZhooksError, RuntimeError):
    """A saved state cannot be written, read or matched to the model."""


class CapabilityError(ZhooksError, RuntimeError):
    """The machine or the installed torch lacks what the policy asks for."""


class SimulationError(ZhooksError, RuntimeError):
    """What is to be simulated is not possible, such as reading data that a virtual device does not have."""
