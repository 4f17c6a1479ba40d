"""What a pickle describes, as plain data: its instructions are interpreted here, and nothing it names is imported or called.

``torch_file.py`` reads the pickle of a file of ``torch.save`` with it.  Containers, numbers, texts and tensors become what they
are; whatever else a pickle would build is a `Made`, which says what of and does nothing.

Note: [Bounds]
    Every instruction costs bytes of the file, and none makes more than one object: memory is bounded by the file.  Calls that
    copy what they are given may copy so much in all, for the memo can give them one long row again and again.  Keys of
    dicts are plain values, so that nothing deep is ever hashed; who walks through the result bounds the walk (`plain`).
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from offload.text import one_line

__all__ = ["Made", "Named", "PickleError", "interpret", "keyed", "plain"]

#: Objects of one value that `plain` copies.
_NODES = 1_000_000
#: Items and bytes that the calls of one pickle copy.
_COPIED_MOST = 64 << 20
_SCALARS = (str, int, float, bool, bytes, type(None))


class PickleError(ValueError):
    """Bytes that are no pickle, or one with instructions that no file of tensors needs."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or a function that a pickle names; nobody looks for it."""

    module: str
    name: str

    def __str__(self) -> str:
        return one_line(f"{self.module}.{self.name}")


@dataclass(eq=False, slots=True)
class Made:
    """An object that a pickle would make by calling ``what`` with ``args``; ``state`` and ``items`` are given to it after."""

    what: Named
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.what}, which was not read: nothing that a pickle names is run>"


Call = Callable[[tuple[Any, ...]], Any]
_MARK = object()


def interpret(raw: bytes | IO[bytes], calls: Mapping[str, Call], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of one pickle.

    Args:
        raw: its bytes, or a file, which stands behind the pickle afterwards.
        calls: what stands for a call of these names, by "module.name"; of every other name there is a `Made`.
        persistent: what stands for a reference out of the pickle (a storage).
    Raises:
        PickleError: it is none, or has instructions that are not needed for data.
    """
    machine = _Machine(calls, persistent)
    try:
        with warnings.catch_warnings():
            # Of texts of protocol 0, which are refused.
            warnings.simplefilter("ignore", DeprecationWarning)
            for opcode, argument, _ in pickletools.genops(raw):
                if opcode.name == "STOP":
                    return machine.pop()
                machine.step(opcode.name, argument)
    except PickleError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise PickleError(f"{type(error).__name__}: {error}"[:200]) from error
    raise PickleError("no end")


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, calls: Mapping[str, Call], persistent: Callable[[Any], Any] | None) -> None:
        self._calls, self._persistent = calls, persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def pop(self) -> Any:
        found = self._stack.pop()
        if found is _MARK:
            raise PickleError("a mark in the place of a value")
        return found

    def step(self, name: str, argument: Any) -> None:
        """One instruction."""
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple([self.pop() for _ in range(count)][::-1]))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name not in ("PROTO", "FRAME"):
            method = getattr(self, f"_{name.lower()}", None) if name in _METHODS else None
            if method is None:
                raise PickleError(f"the instruction {name}")
            stack.append(method(argument))
            if stack[-1] is _MARK and name != "MARK":
                stack.pop()

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise PickleError("a mark in the place of a value")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        found: list[Any] = []
        while (item := self._stack.pop()) is not _MARK:
            found.append(item)
        return found[::-1]

    # Instructions: each returns what it leaves on the stack, _MARK where that is nothing new.

    def _mark(self, _: Any) -> Any:
        return _MARK

    def _tuple(self, _: Any) -> Any:
        return tuple(self._since_mark())

    def _list(self, _: Any) -> Any:
        return self._since_mark()

    def _dict(self, _: Any) -> Any:
        found: dict[Any, Any] = {}
        _set_items(found, self._since_mark())
        return found

    def _frozenset(self, _: Any) -> Any:
        return frozenset(map(_key, self._since_mark()))

    def _global(self, argument: str) -> Any:
        module, _, name = argument.partition(" ")
        return Named(module, name)

    def _stack_global(self, _: Any) -> Any:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError("an invalid name")
        return Named(module, name)

    def _reduce(self, _: Any) -> Any:
        args, what = self.pop(), self.pop()
        if not isinstance(what, Named) or not isinstance(args, tuple):
            raise PickleError("a call of something without a name")
        call = self._calls.get(str(what))
        if call is None:
            return Made(what, args)
        self._count(sum(len(each) for each in args if isinstance(each, (str, bytes, list, tuple, dict, set, frozenset))))
        return call(args)

    def _count(self, copied: int) -> None:
        """See Note [Bounds]."""
        self._copied += copied
        if self._copied > _COPIED_MOST:
            raise PickleError("copies without end")

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> Any:
        options, args, what = self.pop(), self.pop(), self.pop()
        if not isinstance(what, Named) or not isinstance(args, tuple):
            raise PickleError("a call of something without a name")
        self._count(len(args))
        return Made(what, (*args, options))

    def _build(self, _: Any) -> Any:
        state, target = self.pop(), self._top()
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):
            raise PickleError(f"attributes of a {type(target).__name__}")
        # Of an OrderedDict attributes are what a module said of its version.
        return _MARK

    def _append(self, _: Any) -> Any:
        return self._extend([self.pop()])

    def _appends(self, _: Any) -> Any:
        return self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> Any:
        target = self._top()
        into = target.items if isinstance(target, Made) else target
        if not isinstance(into, list):
            raise PickleError(f"items of a {type(target).__name__}")
        into.extend(items)
        return _MARK

    def _setitem(self, _: Any) -> Any:
        value, key = self.pop(), self.pop()
        return self._assign([key, value])

    def _setitems(self, _: Any) -> Any:
        return self._assign(self._since_mark())

    def _assign(self, items: list[Any]) -> Any:
        target = self._top()
        if isinstance(target, Made):
            target.items.extend(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, dict):
            _set_items(target, items)
        else:
            raise PickleError(f"items of a {type(target).__name__}")
        return _MARK

    def _additems(self, _: Any) -> Any:
        items, target = self._since_mark(), self._top()
        if not isinstance(target, set):
            raise PickleError(f"members of a {type(target).__name__}")
        target.update(map(_key, items))
        return _MARK

    def _binpersid(self, _: Any) -> Any:
        about = self.pop()
        if self._persistent is None:
            raise PickleError("a reference to a storage")
        return self._persistent(about)

    def _pop(self, _: Any) -> Any:
        self._stack.pop()
        return _MARK

    def _pop_mark(self, _: Any) -> Any:
        self._since_mark()
        return _MARK


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
})  # fmt: skip
_FRESH: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_METHODS = frozenset({
    "MARK", "TUPLE", "LIST", "DICT", "FROZENSET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BINPERSID", "POP", "POP_MARK",
})  # fmt: skip


def _key(value: Any) -> Any:
    """A key that is a plain value, or a short row of such: see Note [Bounds].  An object of one number is what it is of."""
    if isinstance(value, (*_SCALARS, Named, Made)):
        return value
    if isinstance(value, tuple) and len(value) <= 64 and all(isinstance(item, _SCALARS) for item in value):
        return value
    raise PickleError(f"a {type(value).__name__} as a key")


def _set_items(into: dict[Any, Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        into[_key(key)] = value


def keyed(pairs: Any) -> dict[Any, Any]:
    """A dict of pairs, keys as in any dict of a pickle.

    Raises:
        PickleError: a key is no plain value.
    """
    return {_key(key): value for key, value in pairs}


def plain(value: Any, tensor: Callable[[Any], Any] = lambda value: value) -> Any:
    """A copy of plain containers and what is in them; ``tensor`` says what becomes of everything that is no container.

    Raises:
        PickleError: it is larger than any state of a run, or holds itself.
    """
    left = [_NODES]

    def copied(value: Any, depth: int) -> Any:
        left[0] -= 1
        if left[0] < 0 or depth > 200:
            raise PickleError("containers in containers without end")
        if isinstance(value, dict):
            return {key: copied(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([copied(item, depth + 1) for item in value])
        return value if isinstance(value, (*_SCALARS, set, frozenset)) else tensor(value)

    return copied(value, 0)
