"""Owns the count of what steps compute: FLOPs and bytes of every operation, by module and pass, in a few steps of a run.

The recorder opens it at every level once torch is loaded; `zprof.analysis.compute` reads its notes. It knows no time and no
hardware, keeps no tensor, and a mistake of its own ends the counting with a note, never the run.

Note: [Which steps are counted]
    Between the ends of two steps of one optimizer a dispatch mode sees every operation, and its formula is asked for FLOPs:
    after its 1st, 4th, 16th, 64th, ... step, so that batches of other lengths are met and a long run pays nothing. Of several
    optimizers the one that steps least often is taken, for a loop is whole only once that one has come again.

Note: [What is not seen]
    What goes past torch's dispatcher: kernels of Triton that Python launches, replayed CUDA graphs, and what torch.compile
    has compiled. Where a function was compiled nothing is counted, and the note says so; operations without a formula that
    are not torch's own are named.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry
from torch.optim.optimizer import register_optimizer_step_post_hook

from offload.counting import again, counts, flops, moved, name_of
from offload.device import device_name
from zprof.clock import now_ns
from zprof.recording.hooks import pop_when_safe, unchanged_when_left
from zprof.recording.modules import Doing, Places
from zprof.recording.quiet import Quiet, pop, push
from zprof.recording.surroundings import device

__all__ = ["Computing"]

#: Optimizers' steps that say which steps least often; steps after which a count that did not end is dropped.
_RECENT = 64
#: Rows of a note: modules beyond it are one.
_MOST_ROWS = 4096
_MOST_NAMES = 16
_BEYOND = "(other modules)"
#: Their results are memory nobody has written yet.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
#: Whose operations compute nothing, or are counted where they are torch's own.
_OWN = ("aten", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler", "inductor", "fsdp", "_dtensor")

_Row = tuple[str, str, str, str, str]


class Computing:
    """Counts into notes: a `Part` of the recorder.

    Args:
        note: takes the note of one counted step.
    """

    def __init__(self, note: Callable[[str, Mapping[str, object]], None]) -> None:
        self._note = note
        self._aside = self._owed = False
        self._ends: deque[int] = deque(maxlen=_RECENT)
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._open: _Counted | None = None
        self._undo: list[Callable[[], None]] = []
        self._why = ""
        self._places = Places(lambda root: None, lambda error: None)
        self._pid = os.getpid()

    def start(self) -> None:
        """Wait for the first step to end."""
        self._undo.append(register_optimizer_step_post_hook(self._stepped_once).remove)

    def close(self) -> None:
        """Count no more."""
        while self._undo:
            self._undo.pop()()
        self._drop()

    def step_aside(self, aside: bool) -> None:
        """Count nothing while ``aside``; a step that was due then is counted later."""
        self._aside = aside
        if aside and self._open is not None:
            self._drop()
            self._owed = True

    def _stepped_once(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self._step(optimizer)
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")

    def _step(self, optimizer: Any) -> None:
        self._stepped[optimizer] = count = self._stepped.get(optimizer, 0) + 1
        self._ends.append(id(optimizer))
        counted = self._open
        if counted is not None:
            counted.ended.add(id(optimizer))
            if counted.by == id(optimizer):
                self._open = None
                body = counted.close()
                if counted.failed:
                    self._end(counted.failed)
                elif _compiled():
                    self._end("torch.compile has compiled part of it, whose operations are not seen")
                else:
                    self._note("compute", body)
            elif len(counted.ended) > _RECENT or self._ends.count(counted.by) == 0:
                self._drop()
        due = _due(count) or self._owed
        if self._open is None and not self._why and due and self._rarest(id(optimizer)):
            self._owed = self._aside
            if self._aside:
                return
            if _compiled():
                self._end("torch.compile has compiled part of it, whose operations are not seen")
            elif not torch.is_inference_mode_enabled() and torch._C._current_graph_task_id() < 0:
                self._open = _Counted(id(optimizer), self._places)

    def _rarest(self, mine: int) -> bool:
        often = Counter(self._ends)
        return often[mine] == min(often.values())

    def _end(self, why: str) -> None:
        """Nothing is counted from here on."""
        self._drop()
        if not self._why:
            self._why = why
            with suppress(Exception):
                self._note("compute", {"why": why})

    def _drop(self) -> None:
        counted, self._open = self._open, None
        if counted is not None:
            counted.close()


def _due(count: int) -> bool:
    """A power of 4."""
    return count & (count - 1) == 0 and count.bit_length() % 2 == 1


class _Counted:
    """One step being counted."""

    def __init__(self, by: int, places: Places) -> None:
        self.by, self.ended = by, set[int]()
        self.failed = ""
        self.begin_ns = now_ns()
        self._places = places
        places.entered, places.failed = self._entered, self._fail
        self._rows: dict[_Row, list[int]] = {}
        self._unknown: dict[str, int] = {}
        self._inputs: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._trains, self._awaiting = True, ""
        self._mode = _Mode(self)
        self._places.start()
        self._looking = registry.register_module_forward_pre_hook(self._given)
        push(self._mode)

    def close(self) -> dict[str, object]:
        """Take the mode and the hooks off; returns the note."""
        self._mode.deaf = True
        if unchanged_when_left():
            pop(self._mode)
        else:
            pop_when_safe(self._mode)
        self._looking.remove()
        self._places.pause()
        rows = [[*key, *sums] for key, sums in self._rows.items()]
        return {
            "begin_ns": self.begin_ns,
            "end_ns": now_ns(),
            "optimizers": len(self.ended),
            "threads": torch.get_num_threads(),
            "device_name": _device_name(),
            "rows": rows,
            "inputs": [[name, dtype, list(shape), calls] for (name, dtype, shape), calls in self._inputs.items()],
            "uncounted": [[name, calls] for name, calls in self._unknown.items()],
        }

    def _fail(self, error: Exception) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}"

    def _entered(self, root: nn.Module) -> None:
        self._trains = root.training
        self._awaiting = type(root).__name__ if root.training else ""

    def _given(self, module: nn.Module, args: Any) -> None:
        """A forward begins: the first tensor that any module of a model is given is a batch of it."""
        if not self._awaiting or torch.compiler.is_compiling() or not isinstance(args, tuple):
            return
        first = next((each for each in args if isinstance(each, Tensor)), None)
        if first is not None:
            key = self._awaiting, _word(first.dtype), tuple(first.shape)
            if key in self._inputs or len(self._inputs) < _MOST_NAMES:
                self._inputs[key] = self._inputs.get(key, 0) + 1
            self._awaiting = ""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """An operation has run."""
        counted = counts(func)
        reads = list(_tensors((*args, *kwargs.values())))
        writes = list(_tensors((made,)))
        if any(each.is_meta for each in (*reads, *writes)):
            return
        name = name_of(func)
        if not counted:
            if name in _EMPTY or not writes:
                return
            space = getattr(func, "namespace", "") or type(func).__name__
            if space not in _OWN:
                full = f"{space}::{name}"
                if full in self._unknown or len(self._unknown) < _MOST_NAMES:
                    self._unknown[full] = self._unknown.get(full, 0) + 1
            if not _writes(func) and all(_among(each, reads) for each in writes):
                return  # a view: nothing was moved
        doing, path = self._places.now()
        what = self._pass(doing)
        done = int(flops(func, args, kwargs, made)) if counted else 0
        twice = int(again(func, args, done)) if counted else 0
        kind = _device_and_dtype([*reads, *writes])
        key = (path, what, name if counted else "", *kind)
        sums = self._rows.get(key)
        if sums is None:
            if len(self._rows) >= _MOST_ROWS:
                key = (_BEYOND, *key[1:])
            sums = self._rows.setdefault(key, [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += done
        sums[2] += twice
        sums[3] += moved(func, reads, writes) if type(func) is torch._ops.OpOverload else 0

    def _pass(self, doing: str) -> str:
        if doing == Doing.FORWARD and torch._C._current_graph_task_id() >= 0:
            return "recompute"
        if doing == Doing.FORWARD and not self._trains and not torch.is_grad_enabled():
            return "evaluation"
        return {Doing.NOTHING: "outside"}.get(doing, doing)


class _Mode(Quiet):
    """Hands each operation to ``counted`` once it has run."""

    def __init__(self, counted: _Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.deaf and types and self.leave(types):
            return NotImplemented
        out = func(*args, **kwargs)
        if not self.deaf:
            try:
                self._counted.operation(func, args, kwargs, out)
            except Exception as error:
                self.deaf = True
                self._counted._fail(error)
        return out


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or schema.is_mutable


def _among(made: Tensor, reads: Iterable[Tensor]) -> bool:
    address = made.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == address for each in reads)


def _device_and_dtype(tensors: Iterable[Tensor]) -> tuple[str, str]:
    device, dtype = "cpu", ""
    for each in tensors:
        if each.device.type != "cpu":
            device = each.device.type
        if not dtype and (each.is_floating_point() or each.is_complex()):
            dtype = _word(each.dtype)
            if dtype == "float32" and device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
                dtype = "tf32"
    return device, dtype


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiled() -> bool:
    """Dynamo has compiled a function of this process."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    # Of what is compiled as one graph or not at all (``fullgraph``) the frames are not counted.
    return bool(known is not None and (known["frames"]["ok"] or known["stats"]["unique_graphs"]))


def _device_name() -> str:
    found = device()
    return "cpu" if found is None else device_name(torch.device(found))
