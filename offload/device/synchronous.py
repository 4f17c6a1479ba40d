"""A device of which torch shows no streams (MPS): a copy is over when it has been started."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from offload.device.cpu import Worker
from offload.device.interface import Device, Mark, failed
from offload.device.torch_module import memory_of, used_of
from offload.work import DONE, HostWork


class SynchronousDevice(Device):
    """A device with memory of its own, whose one queue the host waits for at every copy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, addresses_host=False)
        self._worker = Worker()
        self._issue = threading.Lock()

    def start(self) -> None:
        self._worker.start()

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

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type != self.device.type

    def empty(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def memory(self) -> tuple[int, int]:
        return memory_of(self.device)

    def used(self) -> tuple[int, int]:
        return used_of(self.device)

    def close(self) -> None:
        self._worker.close()
