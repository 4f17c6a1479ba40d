"""Owns the level "alloc": every torch storage of a process, by category and module, from torch's own hooks.

The recorder starts it where a level above "events" is asked for. It only infers, so what the runtime says of a storage stands;
it keeps no tensor alive, and a mistake of its own ends the tracking with a warning, never the run.

Note: [What is counted]
    The storages whose memory torch allocated (those it may resize), each with the bytes it holds, from the return of the
    operation that made it until it dies. Memory that an operation takes and gives back before it returns was never a storage
    anybody could see; memory of numpy, files mapped and other processes is theirs. Storages of the recording's own thread, of
    autograd's threads that work for it and of threads that Python starts while it lasts are seen when made; those of threads
    that ran before or are not Python's, and of compiled code, when they first come into an operation here.

Note: [Categories]
    A parameter is what a module or an optimizer lists as one; a gradient what is found in ``.grad`` when it has been
    accumulated; optimizer is what a step made and left alive. An activation was made in a forward, recomputed ones included,
    or from something that requires grad, while grad was enabled; temporary in a backward, a step, or a forward without grad.
    Everything else, inputs and buffers among it, is other.
"""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zprof.recording.hooks import (
    Accumulated,
    end_in_children,
    hear_resizes,
    hear_threads,
    pop_when_safe,
    unchanged_when_left,
)
from zprof.recording.mode import Ear, storages_of
from zprof.recording.modules import BACKWARD, OPTIMIZER, OUTSIDE, Doing, Places, modules_alive
from zprof.recording.quiet import pop, push
from zprof.recording.sampler import has_accelerator
from zprof.recording.stacks import Stacks
from zprof.recording.storages import Storages
from zprof.rows import CATEGORIES, TIERS, placed

if TYPE_CHECKING:
    from zprof.recording.recorder import Recorder

__all__ = ["Tracker", "open_part"]

#: Keys of what was made before the recording, and of what nobody here made.
BEFORE, ELSEWHERE = "(before the recording)", "(made elsewhere)"

_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

_WHAT = {(category, tier): placed(category, tier) for category in CATEGORIES for tier in TIERS}
_PLAIN = frozenset({Tensor, nn.Parameter})
_PARAMETERS = frozenset(placed("parameter", tier) for tier in TIERS)


def open_part(recorder: Recorder) -> Tracker:
    """The tracker of a recorder, not yet started."""
    return Tracker(
        recorder.storages,
        stacks=recorder.level == "stack",
        waits=recorder.level == "ops",
        ended=lambda why: recorder.note("storages", {"why": why}),
    )


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method that torch calls: does nothing once the tracking has ended, and never lets an error of ours out."""

    @functools.wraps(method)
    def call(self: Tracker, *args: Any) -> None:
        if self.deaf or torch.compiler.is_compiling():
            return
        try:
            method(self, *args)
        except Exception as error:
            self.failed(error)

    return call


class Tracker:
    """Reports to ``storages`` every storage that torch makes.

    Args:
        stacks: keys also say which lines of code made them, the user's innermost first.
        waits: begin paused, see `pause`; threads that Python starts are then not heard, for only this one can be paused.
        ended: called with why the tracking ended before the recording, so that readers do not take what was seen for all.
    """

    def __init__(
        self, storages: Storages, *, stacks: bool = False, waits: bool = False, ended: Callable[[str], None] | None = None
    ) -> None:
        self._storages = storages
        self._waits = self._paused = waits
        self._thread = threading.get_ident()
        self._ended = ended
        self._stacks = Stacks() if stacks else None
        self._places = Places(self._entered, self.failed)
        self._places.owner = self._owner
        #: Storages that are not counted, by address: foreign, empty, without memory.
        self._besides: dict[int, weakref.ref[Any]] = {}
        self._ear = Ear(self, storages._live, self._besides)
        self._host = "host" if has_accelerator() else "device"
        self._named: dict[int, list[tuple[str, weakref.ref[nn.Module]]]] = {}
        self._made_in_step: list[tuple[int, weakref.ref[Any]]] = []
        self._state_seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        #: By address: a weak reference would keep a wrapper such as zhooks from swapping the parameter.
        self._hooked: dict[int, RemovableHandle] = {}
        self._running = False

    # Its life.

    def start(self) -> None:
        """Begin on this thread; what is alive already is taken first.

        Raises:
            BaseException: whatever torch raised; then nothing of the tracker is left in it.
        """
        try:
            self._thread = threading.get_ident()
            if not self._waits:
                self._take_what_is_alive(BEFORE)
            self._running = True
            self._install()
        except BaseException:
            self.close()
            raise

    def _install(self) -> None:
        # First: of what it hangs in torch, the second may fail.
        self._undo.append(self._places.close)
        self._places.start()
        if self._paused:
            self._places.silence()
        self._undo.append(registry.register_module_parameter_registration_hook(self._registered).remove)
        self._undo.append(register_optimizer_step_pre_hook(self._begin_step).remove)
        self._undo.append(register_optimizer_step_post_hook(self._end_step).remove)
        self._undo.append(hear_resizes(self._storage_resized))
        if not self._waits:
            self._undo.append(hear_threads(self._thread_begins))
        end_in_children(self._end_in_child)
        if not self._paused:
            push(self._ear)
        self._undo.append(self._stop_hearing)

    @property
    def places(self) -> Places:
        """Where the program is, and the names of its modules."""
        return self._places

    def heard(self, kind: str, name: str) -> None:
        """A call about a whole model, such as "detach", begins or ends on this thread."""
        if self.deaf or self._paused:
            return
        if kind == "begin":
            self._places.begin_call(name)
        elif kind == "end":
            self._places.end_call(name)

    def pause(self) -> bool:
        """Have torch run its operations as without us, until `resume`; False where that cannot begin here.

        Storages that die meanwhile are heard; those that are made are met later, if they live on.
        """
        if not self._paused:
            if threading.get_ident() != self._thread or not unchanged_when_left():
                return False
            self._places.silence()
            pop(self._ear)
            self._paused = True
        return True

    def resume(self, within: nn.Module | None = None, caller: FrameType | None = None) -> bool:
        """Hear again; False where that cannot begin here.

        Args:
            within: its forward begins just now. caller: the frame that calls its hooks.
        """
        if self._paused and not self.deaf:
            if threading.get_ident() != self._thread or not unchanged_when_left():
                return False
            try:
                self._take_what_is_alive(ELSEWHERE)
                self._places.start()
                if within is not None and caller is not None:
                    self._places.begin_forward(within, caller)
            except Exception as error:
                self.failed(error)
                return True
            push(self._ear)
        self._paused = False
        return True

    def close(self) -> None:
        """Leave torch as it was. On another thread than it began on, the mode stays there, and does nothing."""
        while self._undo:
            self._undo.pop()()
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        self._besides.clear()
        self._named.clear()

    def _thread_begins(self) -> None:
        if not self.deaf:
            self._places.begin_thread()
            push(self._ear)

    def _end_in_child(self) -> None:
        """Nothing that a worker does shall cost what it costs to be heard."""
        with suppress(Exception):
            self.close()

    def leave(self) -> Callable[[], None]:
        """As `close`, wherever the program is: the mode does nothing from now on, and is taken off when that is safe, or when
        what is returned is called."""
        self._ear.deaf = True
        if self._stop_hearing in self._undo:
            self._undo.remove(self._stop_hearing)
        self.close()
        return pop_when_safe(self._ear)

    def _stop_hearing(self) -> None:
        self._ear.deaf = True
        pop(self._ear)

    @property
    def deaf(self) -> bool:
        """Nothing is heard: it failed, it was closed, or this is a forked child."""
        return self._ear.deaf

    def failed(self, error: Exception) -> None:
        """Something unforeseen: the tracking ends, the run goes on."""
        self._ear.deaf = True
        if self._ended is not None:
            with suppress(Exception):
                self._ended(f"{type(error).__name__}: {error}")
        # Where warnings are errors, this one must not reach the training script.
        with suppress(Warning):
            warnings.warn(
                f"zprof alloc: expected to follow every storage, found {type(error).__name__}: {error}; storages made from now "
                "on are not recorded. Please report it.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _take_what_is_alive(self, unknown: str) -> None:
        """Models, optimizers and all other tensors that Python can reach; those of nobody are ``unknown``."""
        modules = modules_alive()
        inside = {id(child) for module in modules for child in module._modules.values()}
        # The largest is the main one, whose modules are named plainly.
        for root in sorted((module for module in modules if id(module) not in inside), key=_size, reverse=True):
            self._take_module(root)
        optimizers, tensors = [], []
        for found in gc.get_objects():
            kind = type(found)
            if issubclass(kind, Optimizer):
                optimizers.append(found)
            elif issubclass(kind, Tensor):
                tensors.append(found)
        for optimizer in optimizers:
            self._take_gradients(optimizer)
            self._take_state(optimizer)
        for tensor in tensors:
            for storage in storages_of(tensor):
                if not self._knows(storage._cdata):
                    self._hold("other", unknown, storage)
        # Named again when they run, and their gradients heard then: a model that is wrapped first is wrapped as it is.
        self._named.clear()

    # What the ear reports.

    def met(self, tensor: Tensor) -> None:
        """A storage made elsewhere comes into an operation."""
        self._hold("other", ELSEWHERE, tensor.untyped_storage(), self._lines())

    def made(self, tensor: Tensor, args: Iterable[Any]) -> None:
        """An operation has made a storage."""
        doing, key = self._places.now()
        storage = tensor.untyped_storage()
        if doing == Doing.FORWARD:
            category = "activation" if torch.is_grad_enabled() else "temporary"
        elif doing == Doing.NOTHING:
            category = ("activation" if _trains(args) else "other") if torch.is_grad_enabled() else "temporary"
        else:
            category = "temporary"
            if doing == Doing.STEP:
                self._made_in_step.append((storage._cdata, weakref.ref(storage)))
        self._hold(category, key, storage, self._lines())

    def resized(self, tensor: Tensor) -> None:
        """A storage has a new size, or a tensor a new storage."""
        storage = tensor.untyped_storage()
        if self._storages.knows(storage._cdata):
            self._storage_resized(storage)
        else:
            self._besides.pop(storage._cdata, None)
            self.made(tensor, ())

    @_guarded
    def _storage_resized(self, storage: Any) -> None:
        said = self._storages.said(storage._cdata)
        if said is not None:
            self._storages.hold(said[0], said[1], storage, guess=True)
        else:
            self._besides.pop(storage._cdata, None)
            doing, key = self._places.now()
            self._hold("other" if doing == Doing.NOTHING else "temporary", key, storage, self._lines())

    def _lines(self) -> str:
        return "" if self._stacks is None else self._stacks.here()

    def _knows(self, address: int) -> bool:
        return address in self._besides or self._storages.knows(address)

    def _hold(self, category: str, key: str, storage: Any, stack: str = "") -> None:
        if not storage.nbytes() or not storage.resizable() or storage.device.type == "meta" or not storage.data_ptr():
            address, besides = storage._cdata, self._besides
            besides[address] = weakref.ref(storage, lambda gone: _forget(besides, address, gone))
            return
        tier = self._host if storage.device.type == "cpu" else "device"
        self._storages.hold(_WHAT[category, tier], key, storage, guess=True, stack=stack)

    # Parameters and buffers.

    @_guarded
    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        """A module being built lists a parameter; its path is not known yet."""
        for storage in storages_of(parameter):
            said = self._storages.said(storage._cdata)
            if said is None or said[0] not in _PARAMETERS:
                self._hold("parameter", type(module).__name__, storage)
                self._named.clear()

    @_guarded
    def _entered(self, root: nn.Module) -> None:
        """An outermost forward begins: parameters may have been added, or moved to other memory."""
        named = self._named.get(id(root))
        if named is None or named[0][1]() is not root:
            self._take_module(root)
            return
        for path, held in named:
            module = held()
            if module is None or path != self._places.path_of(module):
                self._take_module(root)
                return
            for parameter in module._parameters.values():
                if parameter is not None and type(parameter) in _PLAIN:
                    said = self._storages.said(_address(parameter))
                    if said is None or said[0] not in _PARAMETERS:
                        self._take_parameter(path, parameter)

    def _take_module(self, root: nn.Module) -> None:
        """Name everything a model holds."""
        named = self._named[id(root)] = []
        seen: set[int] = set()
        for path, module in self._places.named(root):
            named.append((path, weakref.ref(module)))
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._take_parameter(path, parameter)
            for buffer in module._buffers.values():
                for storage in storages_of(buffer):
                    if storage._cdata not in seen:
                        seen.add(storage._cdata)
                        self._hold("other", path, storage)

    def _take_parameter(self, path: str, parameter: Any) -> None:
        for storage in storages_of(parameter):
            self._hold("parameter", path, storage)
        if type(parameter) not in _PLAIN:
            # A wrapper may swap the parameter, and put its gradient there itself: it is looked for when a step begins.
            if storages_of(parameter):
                self._take_gradient(parameter)
            return
        # Before the start is over, only where a backward may come without a forward: a graph holds the parameter already.
        due = self._running or parameter._use_count() > 1
        if due and parameter.is_leaf and parameter.requires_grad and not self._hears(parameter):
            self._hooked[id(parameter)] = parameter.register_post_accumulate_grad_hook(Accumulated(self.accumulated))
        self._take_gradient(parameter)

    def _hears(self, parameter: Tensor) -> bool:
        """The parameter has our hook; one of an earlier parameter at its address is gone with that one's hooks."""
        handle = self._hooked.get(id(parameter))
        return handle is not None and handle.hooks_dict_ref() is parameter._post_accumulate_grad_hooks

    def _owner(self, parameter: Any) -> str | None:
        for storage in storages_of(parameter):
            said = self._storages.said(storage._cdata)
            if said is not None:
                return said[1]
        return None

    @_guarded
    def accumulated(self, parameter: Tensor) -> None:
        """A backward has added to the gradient of ``parameter``."""
        if not self._paused:
            self._take_gradient(parameter)

    def _take_gradient(self, parameter: Any) -> None:
        grad = parameter.grad
        for storage in storages_of(grad):
            self._hold("gradient", self._owner(parameter) or BACKWARD, storage)

    # Optimizers.

    @_guarded
    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._paused:
            return
        self._places.begin_step(optimizer)
        self._made_in_step.clear()
        self._take_gradients(optimizer)

    @_guarded
    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._paused:
            return
        self._places.end_step(optimizer)
        made, self._made_in_step = self._made_in_step, []
        left = [storage for _, held in made if (storage := held()) is not None]
        if left or self._state_seen.get(optimizer) != id(optimizer.state):
            self._take_state(optimizer)
        for storage in left:
            said = self._storages.said(storage._cdata)
            if said is not None and said[0].startswith("temporary"):
                self._hold("optimizer", OPTIMIZER, storage)

    def _take_gradients(self, optimizer: Optimizer) -> None:
        for parameter in _parameters_of(optimizer):
            addresses = [_address(parameter)] if type(parameter) in _PLAIN else [one._cdata for one in storages_of(parameter)]
            if any((said := self._storages.said(address)) is None or said[0] not in _PARAMETERS for address in addresses):
                self._take_parameter(OUTSIDE, parameter)
            elif addresses:
                self._take_gradient(parameter)

    def _take_state(self, optimizer: Optimizer) -> None:
        self._state_seen[optimizer] = id(optimizer.state)
        for parameter, state in optimizer.state.items():
            owner = (self._owner(parameter) if isinstance(parameter, Tensor) else None) or OPTIMIZER
            for value in state.values() if isinstance(state, dict) else ():
                for storage in storages_of(value):
                    said = self._storages.said(storage._cdata)
                    # A state that is the parameter, or its gradient, itself.
                    if said is None or not said[0].startswith(("parameter", "gradient")):
                        self._hold("optimizer", owner, storage)


def _parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _size(model: nn.Module) -> int:
    return sum(1 if type(parameter) not in _PLAIN else parameter.numel() for parameter in model.parameters())


def _trains(args: Iterable[Any]) -> bool:
    """Something given to the operation requires grad."""
    for value in args:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _trains(value):
            return True
    return False


def _forget(besides: dict[int, weakref.ref[Any]], address: int, gone: weakref.ref[Any]) -> None:
    if besides.get(address) is gone:
        del besides[address]
