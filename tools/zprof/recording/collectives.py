"""Owns the spans of torch.distributed's collectives, of DDP, FSDP2 and plain calls, and of the time the script waits for them.

The recorder opens it once torch is loaded, and closes it at its end. It never changes what a collective computes or how long
anybody waits, and a mistake of its own ends its recording with a note, never the script.

Note: [Where collectives are seen]
    Each goes through torch's dispatcher as an operation of "c10d", also those that DDP's reducer starts in C++. A kernel of
    ours at the key ADInplaceOrView hears it and hands it on, so that no other operation costs more. Python waits through
    ``Work.wait`` and ``AsyncCollectiveTensor.trigger_wait``, DDP broadcasts buffers through ``dist._broadcast_coalesced``:
    these three are replaced while a recording runs. DDP's reducer waits in C++, in a callback at the end of a backward: one
    of ours, queued when the first collective of the backward is seen, runs before it, and one behind it.

Note: [Times on CUDA]
    A collective there begins where the stream that it is launched from comes to it, and ends where that of who waited has
    waited, or where the host noticed that it was done; a wait lasts as long as the stream of who waits stood still. One that
    returns no work ran on the stream it was launched from, which stood still for it. Where the stream that waits is not known
    to compute (FSDP2 has one for its gathers), the one that does waits for it by an event that nobody here sees: then waits
    are said to be not measured. The start and end that torch's NCCL group may record itself (TORCH_NCCL_ENABLE_TIMING) are not
    used: the setting is its script's, and the names are private.

Note: [What is not seen]
    Collectives of inference tensors, of compiled code and inside a DTensor's operators start below that key. A wait in Python
    for the first is seen all the same; what compiled code waits for is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.events import Kind, KnownTime, TimeMark, now_ns
from zprof.recording.lanes import here
from zprof.recording.watching import Shared, Watch
from zprof.replacing import put_around

__all__ = ["Listener", "watch_collectives"]

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

#: The stream that computes unless the script says otherwise.
_COMPUTES = "compute"

Span = Callable[[Kind, str, str, int, TimeMark | None], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """A recording.

    Attributes:
        span: takes (kind, what, key, nbytes, mark). wanted: whether it wants any now. seen: called before the first.
        failed: called with why nothing more is seen.
        untimed: called with the name of spans that have no time of the device's, and why.
    """

    span: Span
    wanted: Callable[[], bool]
    seen: Callable[[], None]
    failed: Callable[[str], None]
    untimed: Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A collective; where a GPU does it, ``mark`` is the point at which it was launched."""

    what: str
    key: str
    mark: TimeMark | None

    def wait(self) -> _Begun:
        """The time that somebody waits for it."""
        return _Begun(f"wait {self.what}", self.key, self.mark)

    def here(self) -> TimeMark | None:
        """The point that the current stream has been given work up to by now."""
        return None if self.mark is None else here()

    def noticed(self) -> TimeMark | None:
        """It is found to be over."""
        return None if self.mark is None else KnownTime(self.mark.lane, now_ns())


@dataclass(frozen=True, slots=True)
class _Pending:
    """A collective that nobody has waited for yet; ``in_backward`` where it was started there."""

    work: Any
    begun: _Begun
    in_backward: bool


class _Watch(Watch[Listener]):
    """What hangs in torch, once a process, however many recordings there are."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[int, _Pending] = {}
        self._told: set[int] = set()
        self._backwards: set[int] = set()
        self._waiting_here = threading.local()
        self._default = ""

    # Its life.

    def hang(self, undo: ExitStack) -> None:
        """Hang the kernels and replace the three functions."""
        c10d: Any = torch._C._distributed_c10d
        self._unbox, self._group_of = c10d.Work.unbox, c10d.ProcessGroup.unbox
        after = torch._C._after_ADInplaceOrView_keyset
        library = torch.library.Library("c10d", "IMPL")
        undo.callback(library._destroy)
        for operation, name in _NAMES.items():
            overload = getattr(torch.ops.c10d, operation, None)
            if overload is not None:
                library.impl(operation, self._kernel(overload.default, name, after), "ADInplaceOrView", with_keyset=True)
        undo.callback(put_around(c10d.Work, "wait", self._waiting))
        undo.callback(put_around(torch.distributed, "_broadcast_coalesced", self._broadcasting))
        from torch.distributed import _functional_collectives as functional

        undo.callback(put_around(functional.AsyncCollectiveTensor, "trigger_wait", self._triggering))

    def remove(self) -> None:
        super().remove()
        self._pending.clear()

    def fail(self, error: Exception) -> None:
        self._pending.clear()
        super().fail(error)

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
                    self._say("end", begun, begun.noticed())
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
            with self._wait(None, _Begun(COLLECTIVE, "functional", here() if _on_gpu(tensor) else None)):
                return original(tensor)

        return trigger_wait

    def _broadcasting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            known = set(self._pending)
            with self._wait(None, _Begun(COLLECTIVE, "broadcast", here() if _on_gpu(args) else None)):
                out = original(*args, **kwargs)
            for number in [number for number in tuple(self._pending) if number not in known]:
                self._end(number)
            return out

        return broadcast

    # What is made of it.

    def _begin(self, name: str, group: Any, args: tuple[Any, ...]) -> _Begun | None:
        """A collective starts; None where nobody wants to know."""
        try:
            if not self.wanted():
                return None
            self._end_done()
            key = name
            if group is not None:
                own = str(self._group_of(group).group_name)
                default = torch.distributed.group.WORLD
                if default is not None and own != str(default.group_name):
                    key = f"{name} in group {own}"
            what = POINT_TO_POINT if name in _BETWEEN_TWO else COLLECTIVE
            begun = _Begun(what, key, here() if _on_gpu(args) else None)
            self._say("begin", begun, begun.mark, max((_nbytes(each) for each in args), default=0))
        except Exception as error:
            self.fail(error)
            return None
        return begun

    def _started(self, begun: _Begun, out: Any) -> None:
        try:
            returned = out[-1] if isinstance(out, tuple) else out
            work = None if returned is None else self._unbox(returned)
            if work is None:
                self._done(begun)
                return
            task = torch._C._current_graph_task_id()
            self._pending[id(work)] = _Pending(work, begun, task >= 0)
            if task >= 0 and task not in self._backwards:
                self._backwards.add(task)
                _at_end_of_backward(lambda: self._before_reducer(task))
        except Exception as error:
            self.fail(error)

    def _done(self, begun: _Begun) -> None:
        """It runs on the stream that it was launched from. Note: [Times on CUDA]."""
        end, wait = begun.here(), begun.wait()
        if not self._elsewhere(wait, end):
            self._say("begin", wait, begun.mark)
            self._say("end", wait, end)
        self._say("end", begun, end)

    def _elsewhere(self, wait: _Begun, mark: TimeMark | None) -> bool:
        """The stream that waits is none that is known to compute: how long that one stands still is not seen."""
        if mark is None or mark.lost or mark.lane == _COMPUTES:
            return False
        for each in self.listeners:
            each.untimed(wait.what, "the script orders its streams itself, which is not seen")
        return True

    def _before_reducer(self, task: int) -> None:
        """A backward ends, and what comes next may wait for its collectives in C++."""
        try:
            self._backwards.discard(task)
            waited_for = [each for each in tuple(self._pending.values()) if each.in_backward and not each.work.is_completed()]
            if waited_for and self.wanted():
                wait = waited_for[0].begun.wait()
                self._say("begin", wait, wait.here())
                _at_end_of_backward(lambda: self._after_reducer(wait))
            else:
                self._end_done()
        except Exception as error:
            self.fail(error)

    def _after_reducer(self, wait: _Begun) -> None:
        try:
            self._say("end", wait, wait.here())
            self._end_done()
        except Exception as error:
            self.fail(error)

    @contextmanager
    def _wait(self, pending: _Pending | None, unknown: _Begun | None = None) -> Iterator[None]:
        """Somebody stands still; a wait inside a wait is the outer one's."""
        thread = self._waiting_here
        if getattr(thread, "waits", False) or not self.wanted():
            yield
            return
        begun = pending.begun if pending is not None else unknown or _Begun(COLLECTIVE, _UNKNOWN, here())
        wait = begun.wait()
        thread.waits = True
        self._say("begin", wait, wait.here())
        try:
            yield
        finally:
            thread.waits = False
            over = wait.here()
            self._elsewhere(wait, over)
            self._say("end", wait, over)
            if pending is not None:
                self._say("end", begun, over)

    def _end_done(self) -> None:
        """Those that are done and that nobody waited for: the work, and what it holds, is let go."""
        for number, each in tuple(self._pending.items()):
            if not each.work.is_completed():
                return
            self._end(number)

    def _end(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._say("end", pending.begun, pending.begun.noticed())

    def _say(self, kind: Kind, begun: _Begun, mark: TimeMark | None, nbytes: int = 0) -> None:
        for each in self.listeners:
            if each.wanted():
                if id(each) not in self._told:
                    self._told.add(id(each))
                    each.seen()
                each.span(kind, begun.what, begun.key, nbytes, mark)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(each) for each in value) if isinstance(value, (list, tuple)) else 0


def _on_gpu(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_cpu and value.device.type != "virtual"
    return isinstance(value, (list, tuple)) and any(map(_on_gpu, value))


def _at_end_of_backward(do: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(do)


_shared = Shared(_Watch)


def watch_collectives(listener: Listener) -> Callable[[], None]:
    """Report to ``listener`` until what is returned has been called.

    Raises:
        Exception: this torch lacks what it takes; nothing of it is left then.
    """
    return _shared.join(listener)
