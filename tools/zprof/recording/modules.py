"""Owns the question where the program is: in which module's forward, in whose backward, in an optimizer's step, or in a call
about a whole model.

``tracker`` asks when a storage is made. It installs torch's global module hooks and removes them; it never touches a
module, a tensor or a graph.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registry

from zprof.recording.marks import Marks

__all__ = ["BACKWARD", "OPTIMIZER", "OUTSIDE", "Doing", "Place", "Places", "ignore_warning_of_compile"]

#: Keys of what belongs to no module.
OUTSIDE, BACKWARD, OPTIMIZER = "(outside modules)", "(backward)", "(optimizer)"

#: Looking for what a module is part of means reading the heap, some 50 ms; not done for ever.
MOST_SEARCHES = 16
#: Parts of a path that wrappers of torch put in.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

_task = torch._C._current_graph_task_id
_node: Callable[[], Any] = torch._C._current_autograd_node


class Doing:
    """What the program does while it makes a storage."""

    FORWARD, BACKWARD, STEP, NOTHING = "forward", "backward", "step", "nothing"


Place = tuple[str, str]
"""What the program does, and the key of where."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A forward or a step that has begun."""

    subject: int
    path: str
    task: int
    doing: str
    #: The Python frame it runs in: distinguishes a call that is still open from one that an exception ended unheard.
    caller: tuple[int, CodeType] | None


class _Stacks(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        #: Calls about a whole model, such as "detach", and how many frames were open when each began.
        self.calls: list[tuple[str, int]] = []
        #: Of a thread that began during the recording: its autograd numbers nodes for itself.
        self.numbered_apart = False


class Places:
    """The open forwards and steps of every thread, and the names of the modules met.

    Args:
        entered: called with a root module at every outermost forward, before it runs.
        failed: called with an error of ours, which must not reach the forward it happened in.
    """

    def __init__(self, entered: Callable[[nn.Module], None], failed: Callable[[Exception], None]) -> None:
        self.entered, self.failed = entered, failed
        self._stacks = _Stacks()
        self._marks = Marks()
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._main: weakref.ref[nn.Module] | None = None
        self._searches = 0
        self._undo: list[Callable[[], None]] = []
        self._silent = False
        #: The name of a parameter's module, by the parameter; set by whoever knows.
        self.owner: Callable[[Any], str | None] = lambda variable: None

    def start(self) -> None:
        """Install the hooks of modules and steps, where they are not, and hear them."""
        self._silent = False
        if not self._undo:
            self._undo.append(registry.register_module_forward_pre_hook(self._begin).remove)
            self._undo.append(registry.register_module_forward_hook(self._end, always_call=True).remove)
            self._undo.append(ignore_warning_of_compile())

    def silence(self) -> None:
        """Hear nothing until `start`. The hooks stay: torch.compile compiles anew where others are there than before."""
        self._silent = True
        self._stacks = _Stacks()

    def pause(self) -> None:
        """Remove them; the names of modules stay known."""
        while self._undo:
            self._undo.pop()()
        self._stacks = _Stacks()

    def close(self) -> None:
        """Remove them, and know nothing any more."""
        self.pause()
        self._names.clear()
        self._main = None

    # Where the program is.

    def now(self) -> Place:
        """What the program does on this thread, and the module's path or one of the keys above."""
        task = _task()
        frames, calls = self._stacks.frames, self._stacks.calls
        if calls and calls[-1][1] == len(frames) and task < 0:
            return Doing.NOTHING, f"({calls[-1][0]})"
        if frames:
            top = frames[-1]
            # A forward inside a backward recomputes; a backward inside a forward, or a step, has a number of its own.
            if top.task == task:
                return top.doing, top.path
        if task >= 0:
            return Doing.BACKWARD, self._backward()
        return Doing.NOTHING, OUTSIDE

    def _backward(self) -> str:
        node = _node()
        if node is None:
            return BACKWARD
        if node.name() == "torch::autograd::AccumulateGrad":
            return self.owner(node.variable) or BACKWARD
        if self._stacks.numbered_apart:
            return BACKWARD
        return self._marks.of(node) or BACKWARD

    def begin_forward(self, module: nn.Module, caller: FrameType) -> None:
        """The forward of ``module`` begins on this thread, before our hooks could hear it; ``caller`` calls its hooks."""
        self._enter(module, caller)

    def begin_thread(self) -> None:
        """This thread has begun just now."""
        self._stacks.numbered_apart = True

    def begin_call(self, name: str) -> None:
        """A call about a whole model begins on this thread, such as "detach"."""
        self._stacks.calls.append((name, len(self._stacks.frames)))

    def end_call(self, name: str) -> None:
        """It ends."""
        calls = self._stacks.calls
        while any(begun == name for begun, _ in calls) and calls.pop()[0] != name:
            pass

    def begin_step(self, optimizer: object) -> None:
        """A step of ``optimizer`` begins on this thread."""
        # Our hook is called by the tracker's, that by its guard, and that by the wrapper torch puts around ``step``.
        caller = sys._getframe(3)
        self._drop_stale(caller)
        self._stacks.frames.append(_Frame(id(optimizer), OPTIMIZER, _task(), Doing.STEP, (id(caller), caller.f_code)))

    def end_step(self, optimizer: object) -> None:
        """It ends."""
        self._leave(id(optimizer))

    # The hooks. What dynamo traces must see nothing: it would break its graph, or bake the hook's state into it.

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._silent:
            return
        try:
            self._enter(module, sys._getframe(1))
        except Exception as error:
            self.failed(error)

    def _enter(self, module: nn.Module, caller: FrameType) -> None:
        frames = self._stacks.frames
        if frames and (frames[-1].doing == Doing.STEP or frames[0].subject == id(module)):
            self._drop_stale(caller)
        outermost = not frames
        path = self.path_in(module, None if outermost else frames[-1].path)
        # The frame that calls the hooks goes on to call the forward.
        place = (id(caller), caller.f_code) if outermost else None
        frames.append(_Frame(id(module), path, _task(), Doing.FORWARD, place))
        self._marks.mark(path)
        if outermost:
            self.entered(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._silent:
            return
        self._leave(id(module))

    def _leave(self, subject: int) -> None:
        frames = self._stacks.frames
        for index in range(len(frames) - 1, -1, -1):
            if frames[index].subject == subject:
                del frames[index:]
                break
        self._marks.mark(frames[-1].path if frames else OUTSIDE)

    def _drop_stale(self, caller: FrameType) -> None:
        """Forget forwards and steps that an exception ended without a sign: their Python frame is not among the open ones.

        ``caller`` is the frame of what begins now, which may lie where a stale one lay.
        """
        frames = self._stacks.frames
        open_now: set[tuple[int, CodeType]] = set()
        frame = caller.f_back
        while frame is not None:
            open_now.add((id(frame), frame.f_code))
            frame = frame.f_back
        for index, entered in enumerate(frames):
            if entered.caller and entered.caller not in open_now:
                del frames[index:]
                return

    # Names.

    def path_in(self, module: nn.Module, outer: str | None) -> str:
        """The path of a module whose forward begins in that of ``outer``, or in none."""
        path = self.path_of(module)
        if path is not None:
            return path
        if outer is None:
            self.name(self._whole(module))
            return self.path_of(module) or type(module).__name__
        self._name_again()
        # Perhaps not registered under what is called: a module in a plain list, or one made on the way.
        return self.path_of(module) or f"{outer}.{type(module).__name__}"

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module met before."""
        known = self._names.get(id(module))
        return None if known is None or known[0]() is not module else known[1]

    def _name_again(self) -> None:
        """Modules may have been added to the main model since."""
        main = None if self._main is None else self._main()
        if main is not None:
            self.name(main)

    def name(self, root: nn.Module) -> None:
        """Give every module of ``root`` its path: plain below the first root that has parts, under its class elsewhere."""
        has_parts = next(root.children(), None) is not None
        if has_parts and (self._main is None or self._main() is None):
            self._main = weakref.ref(root)
        main = self._main is not None and self._main() is root
        prefix = "" if main else f"{type(root).__name__}."
        for name, module in root.named_modules():
            if self.path_of(module) is None:
                path = prefix + plain_path(name) if name else type(root).__name__
                self._names[id(module)] = weakref.ref(module), path.rstrip(".") or type(root).__name__

    def named(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of every module of ``root``."""
        self.name(root)
        for module in root.modules():
            yield self._names[id(module)][1], module

    def _whole(self, module: nn.Module) -> nn.Module:
        """The module that ``module`` is a part of, however deep, or itself."""
        if self._searches >= MOST_SEARCHES or next(module.children(), None) is None:
            return module
        self._searches += 1
        parents: dict[int, nn.Module] = {}
        for candidate in modules_alive():
            for child in candidate._modules.values():
                if child is not None:
                    parents.setdefault(id(child), candidate)
        seen = {id(module)}
        while id(module) in parents and id(parents[id(module)]) not in seen:
            module = parents[id(module)]
            seen.add(id(module))
        return module


def plain_path(name: str) -> str:
    """A module's name without the parts that torch's wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def modules_alive() -> list[nn.Module]:
    """Every module of the process that was built."""
    return [found for found in gc.get_objects() if issubclass(type(found), nn.Module) and "_modules" in found.__dict__]


def ignore_warning_of_compile() -> Callable[[], None]:
    """A compiled module warns of global hooks at every call; ours count its extra call as the same module."""
    known = list(warnings.filters)
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    ours = [entry for entry in warnings.filters if entry not in known]

    def undo() -> None:
        for entry in ours:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]

    return undo
