"""Owns how NVIDIA's NVML is opened through its bindings, ``pynvml``, and what is asked of it.

`sampling` opens it first, and `processes` for one look. It never raises: no NVML, no device and no permission are states.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zprof.gpu.answers import Failure, Nvml, ask, one_line
from zprof.gpu.library import Library, Opened
from zprof.gpu.vendors import NVIDIA
from zprof.recording.sampler import torch_uuids

if TYPE_CHECKING:
    from zprof.gpu.devices import Device, Visible

__all__ = ["opened"]

_LIBRARY = "libnvidia-ml.so.1"
_STATES = {9: "no driver", 4: "no permission", 17: "no permission", 18: "mismatch", 15: "lost", 16: "lost"}


def opened() -> Opened:
    """The library, begun, with its devices in the order of the bus; who gets one closes it."""
    try:
        # Asked before the bindings are imported, which costs more than all of a start without a GPU.
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return Opened(NVIDIA, "absent", f"no NVML: {one_line(str(error))}")
    imported = ask(_bindings)
    if isinstance(imported, Failure):
        why = f"NVML is there, its bindings are not ({imported.why}): pip install nvidia-ml-py"
        return Opened(NVIDIA, "absent", why)
    nvml = imported
    begun = ask(nvml.nvmlInit)
    if isinstance(begun, Failure):
        return Opened(NVIDIA, _STATES.get(begun.code or 0, "failed"), f"NVML does not start: {begun.why}")
    driver = ask(nvml.nvmlSystemGetDriverVersion)
    said = one_line(driver, 64) if isinstance(driver, str) else ""
    from zprof.gpu.devices import found_devices

    library, found = _library(nvml), found_devices(nvml)
    if isinstance(found, Failure):
        state = _STATES.get(found.code or 0, "failed")
        return Opened(NVIDIA, state, f"NVML shows no devices: {found.why}", library, said)
    devices, notes = found
    if not devices:
        return Opened(NVIDIA, "no devices", "NVML shows no devices", library, said, notes=tuple(notes))
    return Opened(NVIDIA, "ok", "", library, said, tuple(devices), tuple(notes))


def _bindings() -> Any:
    import pynvml

    return pynvml


def _library(nvml: Nvml) -> Library:
    from zprof.gpu.counters import nvlink_sources, pcie_sources
    from zprof.gpu.quantities import ENERGY, QUANTITIES

    return Library(
        nvml,
        QUANTITIES,
        ENERGY,
        buses=(("nvml pcie", pcie_sources), ("nvml nvlink", nvlink_sources)),
        total=lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        visible=_visible,
        running=lambda: torch_uuids() is not None,
        close=lambda: ask(nvml.nvmlShutdown),
    )


def _visible(found: Sequence[Device]) -> Visible:
    from zprof.gpu.devices import visible_devices

    wanted, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    return visible_devices(found, wanted, order=order, uuids=torch_uuids())
