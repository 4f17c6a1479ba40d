"""The seam to the device: streams and events on CUDA, a thread on a CPU; the only package that names streams."""

from __future__ import annotations

from offload.device.clock import StreamClock
from offload.device.cuda import CudaCalls, cuda_calls
from offload.device.interface import Device, HostMemory
from offload.device.open import computes_on_host, open_device
from offload.device.streams import OneStream, StreamUses, beside, bus_of, calls_of, keep, lane_of, one_stream
from offload.device.virtual import MemoryRun, VirtualCalls, VirtualDevice, VirtualTask, VirtualWork

__all__ = [
    "CudaCalls",
    "Device",
    "HostMemory",
    "MemoryRun",
    "OneStream",
    "StreamClock",
    "StreamUses",
    "VirtualCalls",
    "VirtualDevice",
    "VirtualTask",
    "VirtualWork",
    "beside",
    "bus_of",
    "calls_of",
    "computes_on_host",
    "cuda_calls",
    "keep",
    "lane_of",
    "one_stream",
    "open_device",
]
