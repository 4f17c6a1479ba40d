"""What keeps a run right where ranks or hosts fail; ``ReplicaChecks`` is one of ``attachment.WATCHES``."""

from __future__ import annotations

from zhooks.resilience.replica_checks import ReplicaChecks

__all__ = ["ReplicaChecks"]
