"""Devices without streams: the CPU, on which a thread copies so that compute goes on, and those of which torch shows none
(MPS), where a copy is over when it has been started."""

from __future__ import annotations

import threading

import psutil
import torch
from torch import Tensor

from offload.budget import THIS_MACHINE
from offload.device.interface import Device, Mark, failed
from offload.pages import aligned
from offload.work import DONE, HostWork


class CpuDevice(Device):
    """Host memory is the device's memory; copies run in a thread so that compute goes on."""

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> HostWork:
        on_host = out.device.type == source.device.type == "cpu"
        assert on_host, f"copy of {key}: a CPU device copies between host tensors only"
        return self._worker.copy(out, source, key, self.bus)

    def on_host(self, tensor: Tensor) -> bool:
        return True

    def empty(self, nbytes: int) -> Tensor:
        return aligned(nbytes)

    def memory(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def used(self) -> tuple[int, int]:
        return THIS_MACHINE.resident()


class SynchronousDevice(Device):
    """A device with memory of its own, whose one queue the host waits for at every copy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, addresses_host=False)
        self._issue = threading.Lock()

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> HostWork:
        here = not self.on_host(out)
        if not here and self.on_host(source):
            return self._worker.copy(out, source, key, self.bus)
        assert out.shape == source.shape, f"copy of {key}: {tuple(source.shape)} into {tuple(out.shape)}"
        span = ("copy h2d" if here else "copy d2h", key, out.nbytes)
        with self._issue:
            self.bus.begin(*span)
            try:
                with torch.inference_mode(out.is_inference()), torch.no_grad():
                    out.copy_(source)
            except RuntimeError as error:
                raise failed(key, error) from error
            finally:
                self.bus.end(*span)
        return DONE
