"""Chooses the device for what torch calls it."""

from __future__ import annotations

import torch

from offload.device.cpu import CpuDevice, SynchronousDevice
from offload.device.cuda import CudaCalls, CudaDevice
from offload.device.interface import Device
from offload.device.stream_device import StreamDevice
from offload.device.streams import calls_of
from offload.device.torch_module import current_index, unavailable
from offload.device.virtual import VirtualDevice
from offload.errors import CapabilityError
from offload.virtual import NAME, running


def computes_on_host(device: torch.device) -> bool:
    """The host's own memory and threads are the device: of a CPU, real or virtual."""
    return not running().accelerated if device.type == NAME else device.type == "cpu"


def open_device(device: torch.device, *, addresses_host: bool | None = None) -> Device:
    """The `Device` for a torch device.

    Args:
        device: with or without an index (the current one then).
        addresses_host: None is what is true (a CPU's does); False on a CPU forces the copies a GPU would need.
    Raises:
        CapabilityError: torch does not compute on it here, or another device than a CPU is to address host memory.
    """
    if device.type == NAME:
        return VirtualDevice(running())
    if device.type == "cpu":
        return CpuDevice(torch.device("cpu"), addresses_host is not False)
    why = unavailable(device)
    if why:
        raise CapabilityError(f"Cannot use device {device}. {why}")
    if addresses_host:
        raise CapabilityError(f"device {device}: it computes on its own memory only; leave addresses_host unset")
    device = torch.device(device.type, current_index(device))
    calls = calls_of(device)
    if calls is None:
        return SynchronousDevice(device)
    return CudaDevice(device, calls) if isinstance(calls, CudaCalls) else StreamDevice(device, calls)
