"""Which transport ranks have whose parameters are on the CPU.

Note: [Transports of the CPU]
    shm    ranks of one host over shared memory (``shared_memory.py``): one copy in, one copy out, every message labelled.
    p2p    Gloo send/recv, tagged with the call, each rank sending every peer its range directly: (N-1)/N of the payload.
    "auto" is shm where all ranks of the axis share a host with ordered stores, else p2p.
"""

from __future__ import annotations

from offload.errors import CapabilityError
from zhooks.comm import CONTROL, Opening, Transport, open_group
from zhooks.cpu_transport.p2p import PeerToPeer
from zhooks.cpu_transport.shared_memory import SharedMemory


def between_cpus(opening: Opening) -> Transport | None:
    """The transport of an axis; None for another device, and where the policy wants the backend's own collectives.

    Raises:
        CapabilityError: the policy wants shared memory, and the ranks have none.
    """
    comm, axis, failure = opening.policy.comm, opening.axis, opening.failure
    if opening.device.type != "cpu" or comm.transport == "stock":
        return None
    if comm.transport in ("auto", "shm"):
        shared = SharedMemory.open(axis, opening.meeting, comm.bucket, failure)
        if isinstance(shared, SharedMemory):
            return shared
        if comm.transport == "shm":
            raise CapabilityError(
                f'[comm] transport: "shm" needs all ranks of axis {axis.name} on one x86-64 Linux host with enough memory, '
                f'found that {shared}. Write transport = "auto", or lower [comm] bucket.'
            )
    return PeerToPeer(axis, open_group(opening, {CONTROL}), failure)
