"""Training steps on hardware that is not there: the real planner and executor over the virtual device."""

from __future__ import annotations

from zhooks.simulation.policy_search import find_policy
from zhooks.simulation.proposals import Bandwidth, Proposal, Proposals
from zhooks.simulation.run import Simulation, simulate
from zhooks.simulation.slowdown import Slowdown

__all__ = ["Bandwidth", "Proposal", "Proposals", "Simulation", "Slowdown", "find_policy", "simulate"]
