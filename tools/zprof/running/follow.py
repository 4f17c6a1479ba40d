"""Owns which processes that a recorded script starts are recorded, too (``zprof run --children record``), and from when on.

`launch` begins it, and is called back in a child that trains. Until then nothing of a child is recorded, and no file is made.
It needs the standard library alone: every process of multiprocessing loads it, most of them for nothing.

Note: [How a child comes to know]
    A fork has everything already, and `os.register_at_fork` calls us in it. Of other processes Python's multiprocessing hands
    ``current_process()._config`` on to every process that is started, whichever way, and to theirs ("everything in
    self._config will be inherited by descendant processes", it says there). An entry of ours in it calls us where it is
    unpickled, after sys.path and the main module are as in the parent. No function is replaced for it, no environment changed;
    the entry is taken out at the end. A `subprocess` that is Python knows nothing: it is a program of its own.

Note: [From when on]
    From the first of what only training does: a process group is there, an optimizer is made, or a module in training mode that
    has something to learn runs forward with gradients. Workers of a data loader do none of it for themselves, so that those
    made anew in each epoch leave nothing. Ranks know their rank by then.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from zprof.replacing import put_around
from zprof.running.arrival import when_imported

__all__ = ["MOST", "Family", "follow"]

#: Traces of children beside the one of the script.
MOST = 64
_ENTRY = "zprof"


@dataclass(frozen=True, slots=True)
class Family:
    """What a child takes with it.

    Attributes:
        order: the fields of the `launch.Order` of the script.
        output: the script's trace, whole from the root. pid, mono_ns: whose trace that is, and when it was begun.
    """

    order: dict[str, Any]
    output: str
    pid: int
    mono_ns: int


class _Carried:
    """The entry in the configuration of multiprocessing's processes.

    It is pickled by this process for one that it starts, and by nobody else.
    """

    def __init__(self, family: Family) -> None:
        self._family = family

    def __reduce__(self) -> Any:
        # Once the recording is over a process that was made before may still be started.
        return _unpickled, (asdict(self._family) if _family is not None else None,)


def _unpickled(fields: dict[str, Any] | None) -> _Carried | None:
    """In a process that multiprocessing has started."""
    if fields is None:
        return None
    family = Family(**fields)
    # It must start, whatever is wrong with us here.
    with suppress(Exception):
        _arm(family, "spawn")
    return _Carried(family)


def follow(family: Family) -> Callable[[], None]:
    """Record children of this process that train; those that are started after what is returned was called are not."""
    global _family, _registered
    _family = family
    if not _registered:
        os.register_at_fork(after_in_child=_forked)
        _registered = True
    when_imported("multiprocessing.process", lambda: _hand_on(family) if _family is family else None)

    def leave() -> None:
        global _family
        if _family is family:
            _family = None
            process: Any = sys.modules.get("multiprocessing.process")
            if process is not None:
                process.current_process()._config.pop(_ENTRY, None)

    return leave


def _hand_on(family: Family) -> None:
    process: Any = sys.modules["multiprocessing.process"]
    process.current_process()._config[_ENTRY] = _Carried(family)


def _forked() -> None:
    """In a fork."""
    if _armed is not None:
        _armed.disarm()
    if _family is not None:
        # A fork must go on, whatever is wrong with us here.
        with suppress(Exception):
            _arm(_family, "fork")


def _arm(family: Family, how: str) -> None:
    """Wait in this child for what only training does."""
    global _family, _armed
    follow(family)
    _armed = armed = _Armed(family, how)
    when_imported("torch", armed.hook)


class _Armed:
    """What waits in a child until it trains.

    Args:
        how: "fork", or "spawn" for a process that is none of this one's memory.
    """

    def __init__(self, family: Family, how: str) -> None:
        self._family, self._how = family, how
        self._pid = os.getpid()
        self._undo: list[Callable[[], object]] | None = []

    def hook(self) -> None:
        """torch is there."""
        if self._undo is None or os.getpid() != self._pid:
            return
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim import Optimizer

        self._undo.append(register_module_forward_pre_hook(self._forward).remove)
        self._undo.append(put_around(Optimizer, "__init__", self._optimizer))
        distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if hasattr(distributed, "_update_default_pg"):
            self._undo.append(put_around(distributed, "_update_default_pg", self._group))

    def disarm(self) -> None:
        """Leave torch as it was."""
        undo, self._undo = self._undo or [], None
        while undo:
            undo.pop()()

    # What only training does.

    def _forward(self, module: Any, args: Any) -> None:
        torch: Any = sys.modules["torch"]
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._begin("forward")

    def _optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._begin("optimizer")
            original(optimizer, *args, **kwargs)

        return __init__

    def _group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _update_default_pg(group: Any) -> None:
            original(group)
            if group is not None:
                self._begin("process group")

        return _update_default_pg

    def _begin(self, why: str) -> None:
        global _armed
        if self._undo is None or os.getpid() != self._pid:
            return
        try:
            self.disarm()
            _armed = None
            torch: Any = sys.modules["torch"]
            if torch.utils.data.get_worker_info() is None:
                from zprof.running.launch import record_child

                record_child(self._family, self._how, why)
        except Exception as error:
            # What the child does is its own; a filter that makes warnings errors must not reach it either.
            with suppress(Warning):
                said = f"zprof: process {os.getpid()} is not recorded: {type(error).__name__}: {error}"
                warnings.warn(said, RuntimeWarning, stacklevel=2)


_family: Family | None = None
_armed: _Armed | None = None
_registered = False
