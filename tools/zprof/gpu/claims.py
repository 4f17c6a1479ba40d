"""Owns who samples a GPU: of the ranks of a job on one host the first that asks, so that each GPU's figures are recorded once.

The NVML sampler asks. It holds nothing on disk: what a rank has claimed is free again when it ends, however it ends.

Note: [How a GPU is claimed]
    By a socket bound to a name made of the job and the GPU, in Linux's abstract namespace: the kernel gives each name to one
    process, and takes it back. Ranks of a job know the same launcher's variables; without several ranks nothing is claimed.
"""

from __future__ import annotations

import hashlib
import os
import socket
import weakref

from zprof.recording.surroundings import ranks

__all__ = ["Claims"]

#: What tells a job's ranks from those of another on the same host.
_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


class Claims:
    """What this process samples of what the ranks of its job see."""

    def __init__(self) -> None:
        self._alone = ranks()[1] < 2
        said = [os.environ.get(name, "") for name in _JOB]
        # Ranks that a program spawns, and joins by a file or an address of its own, have that program in common.
        self._job = "\0".join([str(os.getuid()), *(said if any(said) else [str(os.getppid())])])
        self._held: dict[str, socket.socket] = {}
        claims = weakref.ref(self)

        def leave() -> None:
            # A loader's worker would hold on to what its rank has claimed, after the rank has ended too.
            mine = claims()
            if mine is not None:
                mine.close()

        os.register_at_fork(after_in_child=leave)

    def take(self, gpu: str) -> bool:
        """Whether this process samples ``gpu``, a UUID, from now on."""
        if self._alone or gpu in self._held:
            return True
        name = hashlib.sha256(f"{self._job}\0{gpu}".encode()).hexdigest()
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0zprof-nvml-{name}")
        except OSError:
            held.close()
            return False
        self._held[gpu] = held
        return True

    def close(self) -> None:
        """Leave all to others."""
        while self._held:
            self._held.popitem()[1].close()
