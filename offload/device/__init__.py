"""The seam to the device: streams and events on CUDA, a thread on a CPU; the only package that names streams."""

from __future__ import annotations

from offload.device.cuda import CudaCalls
from offload.device.interface import Device, HostMemory
from offload.device.open import computes_on_host, open_device
from offload.device.streams import OneStream, StreamUses, beside, calls_of, keep, lane_of, one_stream
from offload.device.virtual import MemoryRun, VirtualDevice, VirtualTask, VirtualWork

__all__ = [
    "CudaCalls",
    "Device",
    "HostMemory",
    "MemoryRun",
    "OneStream",
    "StreamUses",
    "VirtualDevice",
    "VirtualTask",
    "VirtualWork",
    "beside",
    "calls_of",
    "computes_on_host",
    "keep",
    "lane_of",
    "one_stream",
    "open_device",
]
