"""Chooses the device for what torch calls it."""

from __future__ import annotations

import torch

from offload.device.cpu import CpuDevice
from offload.device.cuda import CudaDevice
from offload.device.interface import Device
from offload.device.virtual import VirtualDevice
from offload.errors import CapabilityError
from offload.virtual import NAME, running


def computes_on_host(device: torch.device) -> bool:
    """The host's own memory and threads are the device: of a CPU, real or virtual."""
    return not running().accelerated if device.type == NAME else device.type == "cpu"


def open_device(device: torch.device, *, addresses_host: bool | None = None) -> Device:
    """The `Device` for a torch device.

    Args:
        device: "cpu", or "cuda" with or without an index (the current one then).
        addresses_host: None is what is true (CPU yes, CUDA no); False on a CPU forces the copies a GPU would need.
    Raises:
        CapabilityError: neither CPU nor a CUDA that this torch can use, or CUDA that is to address host memory.
    """
    if device.type == NAME:
        return VirtualDevice(running())
    if device.type == "cpu":
        return CpuDevice(torch.device("cpu"), addresses_host is not False)
    if device.type != "cuda":
        raise CapabilityError(f'device {device}: expected "cpu" or "cuda", found "{device.type}"; move the model there')
    if not torch.cuda.is_available():
        raise CapabilityError(f"device {device}: expected a CUDA device, found none; install a CUDA build of torch")
    if addresses_host:
        raise CapabilityError(f"device {device}: CUDA computes on its own memory only; leave addresses_host unset")
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index))
