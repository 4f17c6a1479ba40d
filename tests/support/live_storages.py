"""A second account of live torch storages, from the allocator's own records instead of ours; for the tracker's tests.

``tests/zprof/test_alloc.py`` compares. It knows nothing of zprof: ``torch.profiler`` tells of every block of CPU memory that is
taken or given back, and a mode of its own marks where an operation begins and ends.

Note: [Live]
    A block is a live storage from the return of the operation in which it was taken until it is given back. What an
    operation takes and gives back before it returns is its workspace, and is left out. So is what Python's call of a function
    takes and gives back itself, outside of the operations it calls: the numbers among its arguments, made into tensors.

Note: [Lost]
    The profiler hears the threads that work for its own. A block that another thread gives back (Gloo's, of a message that
    was sent) is gone though no record says when: its bytes are told apart, for the peak may or may not have had them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATION, CALL = "an operation", "a call"
_profiler = torch._C._profiler
_EXPERIMENTAL = _profiler._ExperimentalConfig()
_Mark = torch._C._profiler._RecordFunctionFast


class Marks(TorchDispatchMode):
    """Marks every operation; those of a subclass are the ones it is made of."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(seen.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for seen in types):
            return NotImplemented
        with _Mark(OPERATION):
            return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Marks every call of one of torch's functions or methods."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _Mark(CALL):
            return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Account:
    """The bytes alive when the account began, at most, and at its end; ``lost``: what ``peak`` may have too much, see Lost."""

    begin: int = 0
    peak: int = 0
    end: int = 0
    lost: int = 0


@contextmanager
def accounted() -> Iterator[Account]:
    """Account for the storages of what runs inside; complete after the block."""
    account = Account()
    gc.collect()
    # Kept to the end: the profiler does not tell of the death of what it has not seen made.
    before = storages_in_python()
    alive = sum(storage.nbytes() for storage in before)
    # Below ``torch.profiler.profile``, which would spend seconds on tables nobody asked for.
    config = _profiler.ProfilerConfig(_profiler.ProfilerState.KINETO, False, True, False, False, False, _EXPERIMENTAL)
    activities = {_profiler.ProfilerActivity.CPU}
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities)
    try:
        with Calls(), Marks():
            yield account
    finally:
        results = torch._C._autograd._disable_profiler()
    left = {storage.data_ptr() for storage in storages_in_python()}
    del before
    levels, account.lost = replay(list(blocks(results.experimental_event_tree())), alive, left)
    account.begin, account.peak, account.end = alive, max(levels), levels[-1] - account.lost


def storages_in_python() -> list[torch.UntypedStorage]:
    """Every storage of CPU memory that torch allocated and a Python object leads to, once."""
    found: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.resizable() and storage.nbytes():
                found[storage._cdata] = storage
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Block:
    """One record of the allocator: bytes taken (positive) or given back, at an address.

    ``operation`` is the outermost operation around it, ``call`` the innermost call around that: begin and end, or None.
    """

    time_ns: int
    address: int
    nbytes: int
    operation: tuple[int, int] | None
    call: tuple[int, int] | None

    def spans(self, other: Block) -> bool:
        """Taken here and given back there is more than a workspace."""
        if self.operation is not None:
            return self.operation != other.operation
        return self.call is None or other.operation is not None or self.call != other.call


def blocks(
    events: list[Any], operation: tuple[int, int] | None = None, call: tuple[int, int] | None = None
) -> Iterator[Block]:
    """The records below ``events``."""
    for event in events:
        kind, about = event.typed
        if str(kind).endswith("Allocation"):
            if "cpu" in str(about.device):
                yield Block(event.start_time_ns, about.ptr, about.alloc_size, operation, call)
            continue
        at = event.start_time_ns, event.end_time_ns
        if operation is None and event.name == OPERATION:
            yield from blocks(event.children, at, call)
        elif operation is None and event.name == CALL:
            yield from blocks(event.children, None, at)
        else:
            yield from blocks(event.children, operation, call)


def replay(records: list[Block], alive: int, left: set[int]) -> tuple[list[int], int]:
    """The bytes alive after every change, and those lost.

    ``alive``: bytes alive before; ``left``: where storages lie that are alive after.
    """
    records.sort(key=lambda block: block.time_ns)
    changes: list[tuple[int, int, int]] = []
    taken: dict[int, Block] = {}
    lost: list[Block] = []
    for block in records:
        if block.nbytes > 0:
            if block.address in taken:
                lost.append(taken[block.address])
            taken[block.address] = block
            continue
        source = taken.pop(block.address, None)
        if source is not None and source.spans(block):
            changes.append((_seen(source), 1, source.nbytes))
            changes.append((block.time_ns, 0, block.nbytes))
    lost.extend(block for block in taken.values() if block.address not in left)
    kept = [block for block in taken.values() if block.address in left]
    changes.extend((_seen(block), 1, block.nbytes) for block in (*kept, *lost))
    levels = [alive]
    for _, _, change in sorted(changes):
        levels.append(levels[-1] + change)
    return levels, sum(block.nbytes for block in lost)


def _seen(block: Block) -> int:
    return block.time_ns if block.operation is None else block.operation[1]
