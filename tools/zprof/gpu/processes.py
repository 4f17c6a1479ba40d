"""Owns what NVML says of which processes hold memory on which device.

`zprof.living` asks it of a running process. It opens NVML for one look and gives it back, and never raises.
"""

from __future__ import annotations

from zprof.gpu.answers import Failure, ask
from zprof.gpu.nvml import opened

__all__ = ["processes_on_gpus"]

_MOST_PROCESSES = 4096
#: More than any device has: an answer gone wrong, or one that is not available.
_MOST_NBYTES = 1 << 50


def processes_on_gpus() -> tuple[list[tuple[str, str, int, int | None]], str]:
    """(device, its name, process, bytes or None) of each that computes, and why some are not known; "" where all are.

    Processes are numbered as the driver numbers them, which is as the host does, also inside a container.
    """
    state = opened()
    if state.library is None:
        return [], state.why
    nvml = state.library.api
    found: list[tuple[str, str, int, int | None]] = []
    why = state.why
    for device in state.devices:
        if device.divided:
            continue  # Its instances are asked.
        listed = ask(lambda device=device: nvml.nvmlDeviceGetComputeRunningProcesses(device.handle))  # type: ignore[misc]
        if isinstance(listed, Failure):
            why = why or f"processes of gpu{device.label}: {listed.why}"
            continue
        for each in listed[:_MOST_PROCESSES]:
            nbytes = each.usedGpuMemory
            known = isinstance(nbytes, int) and nbytes < _MOST_NBYTES
            found.append((f"gpu{device.label}", device.name, int(each.pid), nbytes if known else None))
    state.library.close()
    return found, why
