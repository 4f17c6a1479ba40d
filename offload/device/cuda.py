"""What CUDA has beyond other devices with streams: mapped memory is registered, events block, streams are captured.

ROCm's devices are CUDA's to torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from offload.device.interface import HostMemory
from offload.device.stream_device import StreamCalls, StreamDevice, no_lock
from offload.pages import ALIGN

_HOST_REGISTER_PORTABLE = 1
#: What unlocking answers where the address was never locked: ours to get right. Any other error is an earlier fault's.
_NOT_LOCKED = (1, 713)


class CudaCalls(StreamCalls):
    """The calls to CUDA that `CudaDevice` makes for one device.

    Note: [CUDA's own streams]
        torch.Event takes ``blocking`` and ignores it; torch.cuda.Event does not, and takes streams of torch.cuda alone.
    """

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def number(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event(blocking=True)

    def timed_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def register(self, address: int, nbytes: int) -> int:
        """Lock host memory; CUDA's status."""
        with torch.cuda.device(self.device):
            return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))

    def unregister(self, address: int) -> int:
        """Unlock it; CUDA's status."""
        with torch.cuda.device(self.device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def error_text(self, status: int) -> str:
        """CUDA's words for a status."""
        runtime = torch.cuda.cudart()
        return str(runtime.cudaGetErrorString(runtime.cudaError(status)))

    def forget_error(self) -> None:
        """Take back the error that a failed call has left, which the next kernel anybody launches would report as its own.

        torch shows cudaHostRegister but not cudaGetLastError; the check after a launch of its own takes the error, and raises.
        """
        with suppress(RuntimeError):
            torch.empty(1, dtype=torch.float32, device=self.device).fill_(0.0)


class CudaDevice(StreamDevice):
    """A CUDA device, which locks memory that others have mapped."""

    calls: CudaCalls

    def pins(self) -> bool:
        return True

    def map_host(self, nbytes: int, *, locked: bool = False) -> HostMemory:
        # Mapped, to be put on large pages and beside the device before it is locked.
        return super().map_host(nbytes)

    def pin(self, memory: Tensor) -> None:
        address, nbytes = memory.data_ptr(), memory.untyped_storage().nbytes()
        assert address % ALIGN == 0 == nbytes % ALIGN, "page-locking takes whole pages"
        status = self.calls.register(address, nbytes)
        if status != 0:
            self.calls.forget_error()
            raise no_lock(self.device, nbytes, self.calls.error_text(status))

    def unpin(self, memory: Tensor) -> None:
        status = self.calls.unregister(memory.data_ptr())
        if status != 0:
            # After a fault every call answers with it; it was raised where a result was wanted, and this is only clean-up.
            self.calls.forget_error()
            assert status not in _NOT_LOCKED, f"device {self.device}: host memory is unlocked that was not locked ({status})"

    def pci_address(self) -> str | None:
        found: Any = torch.cuda.get_device_properties(self.device)
        if not hasattr(found, "pci_bus_id"):
            return None
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
