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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.inside import flats_of, runtime_of
from tests.support.paths import ROOT

OURS = (f"{ROOT}/zhooks/", f"{ROOT}/offload/")
TORCH = str(Path(torch.__file__).parent)


class Census(TorchDispatchMode):
    """Follows storages from the operation that made them until they die.

    Args:
        apart: the storages (by ``_cdata``) that are no buffers now: states, gathered units.
        results: functions ("file:name") whose allocations are what the user asked for.
    """

    def __init__(self, apart: Callable[[], set[int]], *results: str) -> None:
        super().__init__()
        self._apart, self._results = apart, results
        self._live: dict[int, tuple[_Alive, int, str]] = {}
        self._more = False
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(seen.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for seen in types):
            return NotImplemented
        where = _whose(sys._getframe(1))
        # Not before the pool has handed it out is what it made in its place: a full buffer its unit's.
        if self._more and where != "zhooks/unit/buffer_pool.py:Pool.take":
            self.weigh()
        out = func(*args, **(kwargs or {}))
        if where is not None:
            given = {tensor.untyped_storage()._cdata for tensor in _tensors([args, list((kwargs or {}).values())])}
            for tensor in _tensors(out):
                if tensor.untyped_storage()._cdata not in given:
                    self._take(tensor, where)
        return out

    def _take(self, tensor: Tensor, where: str) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == "meta" or not storage.resizable():
            return  # memory that torch did not allocate: rings and slabs, which have accounts of their own
        if storage.nbytes():
            self._live[storage._cdata] = (_Alive(storage), storage.nbytes(), where)
            self._more = True

    def weigh(self) -> None:
        """Sum up what is alive now."""
        self._more = False
        dead = [key for key, (alive, _, _) in self._live.items() if not alive()]
        for key in dead:
            del self._live[key]
        if sum(nbytes for _, nbytes, _ in self._live.values()) <= self.peak:
            return
        apart = self._apart()
        here: Counter[str] = Counter()
        for key, (_, nbytes, where) in self._live.items():
            if key not in apart and not where.startswith(self._results):
                here[where] += nbytes
                self.largest[where] = max(self.largest[where], nbytes)
        if sum(here.values()) > self.peak:
            self.peak, self.at_peak = sum(here.values()), here


class _Alive:
    """A weak reference to a storage, by torch's own count of who else refers to it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = storage._weak_ref()

    def __call__(self) -> bool:
        return not torch.UntypedStorage._expired(self._weak)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


def _whose(frame: FrameType | None) -> str | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) and file != __file__:
            return f"{file[len(str(ROOT)) + 1 :]}:{frame.f_code.co_qualname}" if file.startswith(OURS) else None
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
        local = getattr(getattr(tensor, "local_shard", None), "memory", tensor)
        if isinstance(local, Tensor):
            found.add(local.untyped_storage()._cdata)
    return found


def resting(attachment: Any, *optimizers: torch.optim.Optimizer) -> set[int]:
    """Parameters, gradients and optimizer states that exist already."""
    with torch._C.DisableTorchFunctionSubclass():
        found = set()
        for flat in flats(attachment):
            found |= storages(flat.storage.memory, *flat.params, *(param.grad for param in flat.params))
        for optimizer in optimizers:
            for state in optimizer.state.values():
                found |= storages(*(value for value in state.values() if isinstance(value, Tensor)))
    return found


def in_use(attachment: Any) -> set[int]:
    """What is gathered now, and the gradients' shards: those being filled, and those that are parameters' already."""
    gradients = runtime_of(attachment).reducer.gradients.values()
    with torch._C.DisableTorchFunctionSubclass():
        claimed = [param.grad for flat in flats(attachment) for param in flat.params]
    return storages(*claimed, *(flat.full for flat in flats(attachment)), *(gradient.at for gradient in gradients))


def flats(attachment: Any) -> list[Any]:
    return flats_of(attachment)


@contextmanager
def counted(attachment: Any, *optimizers: torch.optim.Optimizer, results: tuple[str, ...] = ()) -> Iterator[Census]:
    """Count the buffers of what runs inside."""
    known = resting(attachment, *optimizers)
    census = Census(lambda: known | in_use(attachment), *results)
    with census:
        yield census
    census.weigh()
