"""Transports between ranks whose parameters are on the CPU; ``between_cpus`` is one of ``comm.OPENERS``."""

from zhooks.cpu_transport.open_transport import between_cpus

__all__ = ["between_cpus"]
