"""Counts the buffers of zhooks: every live storage that one of its rooms allocated and that is neither a state nor gathered.

``test_buffers.py`` measures with it. It looks at real storages, as operations return them, and at who asked for them: it
knows no formula of ours.

Note: [Whose]
    An allocation belongs to the innermost Python frame outside of torch. Modules, losses and autograd's own backward run
    below a frame of the test or of ``torch.nn``, so what they allocate is plain PyTorch's. What is left in the sum is what
    zhooks and offload took: casts, copies, partial sums, pieces under way, idle buffers.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
OURS = (f"{ROOT}/zhooks/", f"{ROOT}/offload/")
TORCH = str(Path(torch.__file__).parent)


class Census(TorchDispatchMode):
    """Follows storages from the operation that made them until they die.

    Args:
        apart: the storages (by ``_cdata``) that are no buffers now: states, gathered units, results handed to the user.
    """

    def __init__(self, apart: Callable[[], set[int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._apart = apart
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(seen.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for seen in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        where = _whose(sys._getframe(1))
        if where is not None:
            fresh = [self._take(tensor, where) for tensor in _tensors(out)]
            if any(fresh):
                self._weigh()
        return out

    def _take(self, tensor: Tensor, where: str) -> bool:
        if tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if storage.nbytes() == 0 or (known is not None and known[0]() is not None):
            return False
        key = storage._cdata
        self._live[key] = (_Alive(storage), storage.nbytes(), where)  # type: ignore[assignment]
        return True

    def _weigh(self) -> None:
        dead = [key for key, (alive, _, _) in self._live.items() if alive() is None]
        for key in dead:
            del self._live[key]
        total = sum(nbytes for _, nbytes, _ in self._live.values())
        if total <= self.peak:
            return
        apart = self._apart()
        here: Counter[str] = Counter()
        for key, (_, nbytes, where) in self._live.items():
            if key not in apart:
                here[where] += nbytes
                self.largest[where] = max(self.largest[where], nbytes)
        if sum(here.values()) > self.peak:
            self.peak, self.at_peak = sum(here.values()), here


class _Alive:
    """A weak reference to a storage, by torch's own count of who else refers to it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage._weak_ref()

    def __call__(self) -> Any:
        return None if torch.UntypedStorage._expired(self._weak) else self

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


def _whose(frame: FrameType | None) -> str | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) and file != __file__:
            return f"{file[len(str(ROOT)) + 1 :]}:{frame.f_code.co_name}" if file.startswith(OURS) else None
        frame = frame.f_back
    return None


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for item in out:
            yield from _tensors(item)


def storages(*tensors: Any) -> set[int]:
    """The identities of the memory behind tensors, sharded ones by their range."""
    found = set()
    for tensor in tensors:
        local = getattr(tensor, "_at", tensor)
        if isinstance(local, Tensor):
            found.add(local.untyped_storage()._cdata)
    return found


def states(attachment: Any, *optimizers: torch.optim.Optimizer) -> set[int]:
    """What rests, and what is gathered: parameters, gradients, optimizer states, full buffers in use."""
    with torch._C.DisableTorchFunctionSubclass():
        flats = [flat for unit in attachment._units for flat in unit.flats]
        found = storages(*(flat.full for flat in flats), *(flat._shard for flat in flats))
        for flat in flats:
            found |= storages(*flat.params, *(param.grad for param in flat.params))
            gradient = attachment._runtime.reducer.gradients.get(flat.number)
            found |= storages(None if gradient is None else gradient._shard)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                found |= storages(*(value for value in state.values() if isinstance(value, Tensor)))
    return found


@contextmanager
def counted(attachment: Any, *optimizers: torch.optim.Optimizer) -> Iterator[Census]:
    """Count the buffers of what runs inside."""
    census = Census(lambda: states(attachment, *optimizers))
    with census:
        yield census
