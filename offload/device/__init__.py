"""The seam to the device: streams and events where torch has them, a thread on a CPU; the only package that names streams, and
types of device."""

from __future__ import annotations

from offload.device.clock import StreamClock
from offload.device.comm_context import CommContext
from offload.device.cuda import CudaCalls
from offload.device.interface import Device, HostMemory
from offload.device.open import computes_on_host, open_device
from offload.device.reserved import can_reserve, grain_of, reserve
from offload.device.stream_device import StreamCalls
from offload.device.streams import StreamUses, beside, bus_of, calls_of, keep, lane_of
from offload.device.torch_module import (
    checkpoint_keeps_generator,
    default_device,
    device_guard,
    device_name,
    has_generator,
    memory_statistics,
    random_state,
    set_random_state,
    started_device,
    used_of,
)
from offload.device.virtual import MemoryRun, VirtualCalls, VirtualDevice, VirtualTask, VirtualWork

__all__ = [
    "CommContext",
    "CudaCalls",
    "Device",
    "HostMemory",
    "MemoryRun",
    "StreamCalls",
    "StreamClock",
    "StreamUses",
    "VirtualCalls",
    "VirtualDevice",
    "VirtualTask",
    "VirtualWork",
    "beside",
    "bus_of",
    "calls_of",
    "can_reserve",
    "checkpoint_keeps_generator",
    "computes_on_host",
    "default_device",
    "device_guard",
    "device_name",
    "grain_of",
    "has_generator",
    "keep",
    "lane_of",
    "memory_statistics",
    "open_device",
    "random_state",
    "reserve",
    "set_random_state",
    "started_device",
    "used_of",
]
