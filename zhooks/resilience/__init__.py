"""What keeps a run right where ranks or hosts fail; ``ReplicaChecks`` is one of ``session.WATCHES``."""

from __future__ import annotations

from zhooks.resilience.peer_memory import PeerMemory
from zhooks.resilience.peer_state import OfferedState, PeerLostError, extra_of
from zhooks.resilience.peers import resume_run, save_run_to_peers
from zhooks.resilience.preemption import catch_preemption, exit_if_preempted, preempted
from zhooks.resilience.recovery import Recovery, recover
from zhooks.resilience.replica_checks import ReplicaChecks
from zhooks.resilience.replicas import Replica

__all__ = [
    "OfferedState",
    "PeerLostError",
    "PeerMemory",
    "Recovery",
    "Replica",
    "ReplicaChecks",
    "catch_preemption",
    "exit_if_preempted",
    "extra_of",
    "preempted",
    "recover",
    "resume_run",
    "save_run_to_peers",
]
