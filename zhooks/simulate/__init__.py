"""Training steps on hardware that is not there: the real planner and executor over the virtual device."""

from __future__ import annotations

from zhooks.simulate.automatic import chosen_for
from zhooks.simulate.costs import Slowdown
from zhooks.simulate.policy_search import find_policy
from zhooks.simulate.proposals import Bandwidth, Proposal, Proposals
from zhooks.simulate.run import Simulation, simulate
from zhooks.simulate.virtual_group import on_paper

__all__ = ["Bandwidth", "Proposal", "Proposals", "Simulation", "Slowdown", "chosen_for", "find_policy", "on_paper", "simulate"]
