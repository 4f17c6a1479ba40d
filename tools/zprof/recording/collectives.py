"""Owns the spans of torch.distributed's collectives, of DDP, FSDP2 and plain calls, and of the time the script waits for them.

The recorder opens it once torch is loaded, and closes it at its end. It never changes what a collective computes or how long
anybody waits, and a mistake of its own ends its recording with a note, never the script.

Note: [Where collectives are seen]
    Each goes through torch's dispatcher as an operation of "c10d", also those that DDP's reducer starts in C++. A kernel of
    ours at the key ADInplaceOrView hears it and hands it on, so that no other operation costs more. Python waits through
    ``Work.wait`` and ``AsyncCollectiveTensor.trigger_wait``, DDP broadcasts buffers through ``dist._broadcast_coalesced``:
    these three are replaced while a recording runs. DDP's reducer waits in C++, in a callback at the end of a backward: one
    of ours, queued when the first collective of the backward is seen, runs before it, and one behind it.

Note: [What is not seen]
    Collectives of inference tensors, of compiled code and inside a DTensor's operators start below that key. A wait in Python
    for the first is seen all the same; what compiled code waits for is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zprof.rows import RowKind

__all__ = ["Listener", "watch_collectives"]

_BEGIN, _END = int(RowKind.BEGIN), int(RowKind.END)

COLLECTIVE, POINT_TO_POINT = "collective", "point to point"
#: Operations of c10d -> what torch.distributed calls them.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
_BETWEEN_TWO = frozenset({"send", "recv"})
#: A wait whose start was not seen.
_UNKNOWN = "(not seen where it started)"

Row = Callable[[int, str, str, int], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """A recording.

    Attributes:
        row: takes (kind, what, key, nbytes). wanted: whether it wants any now. seen: called before its first row.
        failed: called with why nothing more is seen.
    """

    row: Row
    wanted: Callable[[], bool]
    seen: Callable[[], None]
    failed: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A collective that nobody has waited for yet; ``in_backward`` where it was started there."""

    work: Any
    what: str
    key: str
    in_backward: bool


def watch_collectives(listener: Listener) -> Callable[[], None]:
    """Report to ``listener`` until what is returned has been called.

    Raises:
        Exception: this torch lacks what it takes; nothing of it is left then.
    """
    global _watch
    with _changing:
        if _watch is None:
            watch = _Watch()
            watch.install()
            _watch = watch
        _watch.listeners = (*_watch.listeners, listener)

    def leave() -> None:
        global _watch
        with _changing:
            if _watch is None:
                return
            _watch.listeners = tuple(each for each in _watch.listeners if each is not listener)
            if not _watch.listeners:
                watch, _watch = _watch, None
                watch.remove()

    return leave


class _Watch:
    """What hangs in torch, once a process, however many recordings there are."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._undo: list[Callable[[], object]] = []
        self._pending: dict[int, _Pending] = {}
        self._told: set[int] = set()
        self._backwards: set[int] = set()
        self._waiting_here = threading.local()
        self._default = ""
        self._failed = False

    # Its life.

    def install(self) -> None:
        """Hang the kernels and replace the three functions."""
        try:
            c10d: Any = torch._C._distributed_c10d
            self._unbox, self._group_of = c10d.Work.unbox, c10d.ProcessGroup.unbox
            after = torch._C._after_ADInplaceOrView_keyset
            library = torch.library.Library("c10d", "IMPL")
            self._undo.append(library._destroy)
            for operation, name in _NAMES.items():
                overload = getattr(torch.ops.c10d, operation, None)
                if overload is not None:
                    library.impl(operation, self._kernel(overload.default, name, after), "ADInplaceOrView", with_keyset=True)
            self._replace(c10d.Work, "wait", self._waiting)
            self._replace(torch.distributed, "_broadcast_coalesced", self._broadcasting)
            from torch.distributed import _functional_collectives as functional

            self._replace(functional.AsyncCollectiveTensor, "trigger_wait", self._triggering)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Leave torch as it was."""
        while self._undo:
            self._undo.pop()()
        self._pending.clear()

    def _replace(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        ours = around(original)
        setattr(owner, name, ours)

        def undo() -> None:
            # Somebody else's, put over ours meanwhile, stays.
            if getattr(owner, name, None) is ours:
                setattr(owner, name, original)

        self._undo.append(undo)

    # What torch calls.

    def _kernel(self, overload: Any, name: str, after: Any) -> Callable[..., Any]:
        place = next(
            (at for at, each in enumerate(overload._schema.arguments) if str(each.type).endswith("c10d.ProcessGroup")), -1
        )

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._begin(name, args[place] if 0 <= place < len(args) else None, args)
            try:
                out = overload.redispatch(keys & after, *args, **kwargs)
            except BaseException:
                if begun is not None:
                    self._say(_END, *begun, 0)
                raise
            if begun is not None:
                self._started(begun, out)
            return out

        return kernel

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            pending = self._pending.pop(id(work), None)
            with self._wait(pending):
                return original(work, *args, **kwargs)

        return wait

    def _triggering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def trigger_wait(tensor: Any) -> Any:
            if getattr(tensor, "completed", False):
                return original(tensor)
            # Which collective the tensor came of is not known here: it ends in the trace when it is next seen to be done.
            with self._wait(None, COLLECTIVE, "functional"):
                return original(tensor)

        return trigger_wait

    def _broadcasting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            known = set(self._pending)
            with self._wait(None, COLLECTIVE, "broadcast"):
                out = original(*args, **kwargs)
            for number in [number for number in tuple(self._pending) if number not in known]:
                self._end(number)
            return out

        return broadcast

    # What is made of it.

    def _begin(self, name: str, group: Any, args: tuple[Any, ...]) -> tuple[str, str] | None:
        """A collective starts; (what, key) where anybody wants to know."""
        try:
            if not self._wanted():
                return None
            self._end_done()
            key = name
            if group is not None:
                own = str(self._group_of(group).group_name)
                default = torch.distributed.group.WORLD
                if default is not None and own != str(default.group_name):
                    key = f"{name} in group {own}"
            what = POINT_TO_POINT if name in _BETWEEN_TWO else COLLECTIVE
            self._say(_BEGIN, what, key, max((_nbytes(each) for each in args), default=0))
        except Exception as error:
            self._fail(error)
            return None
        return what, key

    def _started(self, begun: tuple[str, str], out: Any) -> None:
        try:
            work = self._unbox(out[-1] if isinstance(out, tuple) else out)
            task = torch._C._current_graph_task_id()
            self._pending[id(work)] = _Pending(work, *begun, task >= 0)
            if task >= 0 and task not in self._backwards:
                self._backwards.add(task)
                _at_end_of_backward(lambda: self._before_reducer(task))
        except Exception as error:
            self._fail(error)

    def _before_reducer(self, task: int) -> None:
        """A backward ends, and what comes next may wait for its collectives in C++."""
        try:
            self._backwards.discard(task)
            waited_for = [each for each in tuple(self._pending.values()) if each.in_backward and not each.work.is_completed()]
            if waited_for and self._wanted():
                what, key = waited_for[0].what, waited_for[0].key
                self._say(_BEGIN, f"wait {what}", key, 0)
                _at_end_of_backward(lambda: self._after_reducer(what, key))
            else:
                self._end_done()
        except Exception as error:
            self._fail(error)

    def _after_reducer(self, what: str, key: str) -> None:
        try:
            self._say(_END, f"wait {what}", key, 0)
            self._end_done()
        except Exception as error:
            self._fail(error)

    @contextmanager
    def _wait(self, pending: _Pending | None, what: str = COLLECTIVE, key: str = _UNKNOWN) -> Iterator[None]:
        """Somebody stands still; a wait inside a wait is the outer one's."""
        here = self._waiting_here
        if getattr(here, "waits", False) or not self._wanted():
            yield
            return
        if pending is not None:
            what, key = pending.what, pending.key
        here.waits = True
        self._say(_BEGIN, f"wait {what}", key, 0)
        try:
            yield
        finally:
            here.waits = False
            self._say(_END, f"wait {what}", key, 0)
            if pending is not None:
                self._say(_END, what, key, 0)

    def _end_done(self) -> None:
        """Those that are done and that nobody waited for: the work, and what it holds, is let go."""
        for number, each in tuple(self._pending.items()):
            if not each.work.is_completed():
                return
            self._end(number)

    def _end(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._say(_END, pending.what, pending.key, 0)

    def _wanted(self) -> bool:
        return not self._failed and any(each.wanted() for each in self.listeners)

    def _say(self, kind: int, what: str, key: str, nbytes: int) -> None:
        for each in self.listeners:
            if each.wanted():
                if id(each) not in self._told:
                    self._told.add(id(each))
                    each.seen()
                each.row(kind, what, key, nbytes)

    def _fail(self, error: Exception) -> None:
        """Nothing more is said: a wait that went unseen would count as a rank's own work."""
        if not self._failed:
            self._failed = True
            self._pending.clear()
            for each in self.listeners:
                each.failed(f"{type(error).__name__}: {error}")


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(each) for each in value) if isinstance(value, (list, tuple)) else 0


def _at_end_of_backward(do: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(do)


_watch: _Watch | None = None
_changing = threading.RLock()
