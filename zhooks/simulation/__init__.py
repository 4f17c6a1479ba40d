"""Training steps on hardware that is not there: the real planner and executor over the virtual device."""

from __future__ import annotations

from zhooks.simulation.run import Simulation, simulate

__all__ = ["Simulation", "simulate"]
