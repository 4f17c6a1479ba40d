"""What a pickle describes, as plain data: an unpickler that imports nothing and calls nothing that a pickle names.

Containers, numbers, texts and tensors become what they are; whatever else a pickle would build is a `Made`.

Note: [Bounds]
    Every instruction costs bytes of the file, and none makes more than one object: memory is bounded by the file.  That is
    why the memo is Python's dict and not the array of the C unpickler.  Calls that copy what they are given may copy so much
    in all, for the memo can give them one long row again and again.  Keys of dicts are plain values, so that nothing deep is
    ever hashed; who walks through the result bounds the walk (`plain`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any, ClassVar

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

    def append(self, item: Any) -> None:
        """As a pickle adds to what it makes of a list."""
        self.items.append(item)


Call = Callable[[tuple[Any, ...]], Any]


def interpret(raw: bytes | IO[bytes], calls: Mapping[str, Call], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of one pickle.

    Args:
        raw: its bytes, or a file, which stands behind the pickle afterwards.
        calls: what stands for a call of these names, by "module.name"; of every other name there is a `Made`.
        persistent: what stands for a reference out of the pickle (a storage).
    Raises:
        PickleError: it is none, or has instructions that are not needed for data.
    """
    try:
        return _Unpickler(BytesIO(raw) if isinstance(raw, bytes) else raw, calls, persistent).load()
    except (PickleError, OSError):
        raise
    # What the standard library raises for bytes that are no pickle is of any kind.
    except Exception as error:
        raise PickleError(f"{type(error).__name__}: {error}"[:200]) from error


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise PickleError(f"the instruction {bytes([code])!r}")


#: Instructions that make plain values and rows, add to rows, or look a value up.
_AS_THEY_ARE = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE,
    pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES,
    pickle.BINBYTES8, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.EMPTY_TUPLE, pickle.TUPLE,
    pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.LIST, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
    pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID, pickle.APPEND, pickle.APPENDS,
)  # fmt: skip


class _Unpickler(pickle._Unpickler):
    """The instructions that data needs; those that would call or change something are replaced."""

    def __init__(self, file: IO[bytes], calls: Mapping[str, Call], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._calls, self._persistent, self._copied = calls, persistent, 0
        self.stack: list[Any]

    if TYPE_CHECKING:

        def pop_mark(self) -> list[Any]: ...

    def find_class(self, module: str, name: str) -> Any:
        return Named(module, name)

    def persistent_load(self, about: Any) -> Any:
        if self._persistent is None:
            raise PickleError("a reference to a storage")
        return self._persistent(about)

    def _make(self) -> None:
        """REDUCE and NEWOBJ."""
        args, what = self.stack.pop(), self.stack.pop()
        if not isinstance(what, Named) or not isinstance(args, tuple):
            raise PickleError("a call of something without a name")
        call = self._calls.get(str(what))
        if call is not None:
            self._copied += sum(len(each) for each in args if isinstance(each, (str, bytes, list, tuple, dict)))
            if self._copied > _COPIED_MOST:
                raise PickleError("copies without end")
        self.stack.append(Made(what, args) if call is None else call(args))

    def _make_with_options(self) -> None:
        """NEWOBJ_EX; keywords are left out."""
        self.stack.pop()
        self._make()

    def _state(self) -> None:
        """BUILD; of an OrderedDict it is what a module said of its version."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif not isinstance(target, dict):
            raise PickleError(f"attributes of a {type(target).__name__}")

    def _item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._assign([(key, value)])

    def _items(self) -> None:
        items = self.pop_mark()
        self._assign(list(zip(items[::2], items[1::2], strict=True)))

    def _assign(self, pairs: list[tuple[Any, Any]]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update(keyed(pairs))
        else:
            raise PickleError(f"items of a {type(target).__name__}")

    def _members(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        target.update(map(_key, items))

    dispatch: ClassVar[dict[int, Any]] = _Instructions(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _AS_THEY_ARE}
        | {
            pickle.REDUCE[0]: _make, pickle.NEWOBJ[0]: _make, pickle.NEWOBJ_EX[0]: _make_with_options, pickle.BUILD[0]: _state,
            pickle.SETITEM[0]: _item, pickle.SETITEMS[0]: _items, pickle.ADDITEMS[0]: _members,
        }
    )  # fmt: skip


def _key(value: Any) -> Any:
    """A key that is a plain value, or a short row of such: see Note [Bounds].  An object of one number is what it is of."""
    if isinstance(value, (*_SCALARS, Named, Made)):
        return value
    if isinstance(value, tuple) and len(value) <= 64 and all(isinstance(item, _SCALARS) for item in value):
        return value
    raise PickleError(f"a {type(value).__name__} as a key")


def keyed(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
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
