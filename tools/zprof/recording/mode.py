"""Owns the ear on torch's operations: a dispatch mode that reports storages it has not seen, the cheapest way there is.

``tracker`` pushes it and listens. It never keeps a tensor, changes no argument and no result, and asks nothing about a
storage that it already knows.

Note: [What an operation can make]
    Its schema says whether a result may be new memory: a view or an operation in place gives back what it was given. Those
    results are not looked at. Arguments always are: a storage made on another thread, in compiled code or before the
    recording is met there, before the operation adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from zprof.recording.quiet import Quiet

if TYPE_CHECKING:
    from zprof.recording.tracker import Tracker

__all__ = ["Ear", "plain_parts", "storages_of"]

_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

# A torch without it gives such a tensor's storage, or refuses it, which is heard as any odd tensor's is.
_is_wrapped: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False)

# What a value may be, and what an operation may do.
_NEITHER, _TENSOR, _LIST, _ODD = 0, 1, 2, 3
_KEEPS, _MAKES, _RESIZES = 0, 1, 2

_KINDS: dict[type, int] = {Tensor: _TENSOR, nn.Parameter: _TENSOR, list: _LIST, tuple: _LIST}


class Ear(Quiet):
    """Reports to ``listener`` what it hears on the thread it is pushed on, and on autograd's threads that work for it.

    Args:
        known: addresses of the storages that need no report.
        besides: more of them.
    """

    def __init__(self, listener: Tracker, known: Container[int], besides: Container[int]) -> None:
        super().__init__()
        self._listener, self._known, self._besides = listener, known, besides
        self._operations: dict[int, tuple[Callable[..., Any], int]] = {}
        self._learned: list[Any] = []
        self._kinds = dict(_KINDS)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known_operation = self._operations.get(id(func))
        run, does = known_operation if known_operation is not None else self._learn(func)
        if self.deaf:
            return run(*args, **kwargs) if kwargs else run(*args)
        if types and self.leave(types):
            return NotImplemented
        known, besides, kinds = self._known, self._besides, self._kinds
        try:
            for value in args:
                kind = kinds.get(type(value))
                if kind == _TENSOR:
                    address = _address(value)
                    if address not in known and address not in besides:
                        self._listener.met(value)
                elif kind != _NEITHER:
                    self._look(value, None)
            if kwargs:
                for value in kwargs.values():
                    if kinds.get(type(value)) != _NEITHER:
                        self._look(value, None)
        except Exception as error:
            self._odd(error, args, None)
        out = run(*args, **kwargs) if kwargs else run(*args)
        if does == _KEEPS:
            return out
        try:
            if does == _RESIZES:
                self._resized(out)
            elif kinds.get(type(out)) == _TENSOR:
                address = _address(out)
                if address not in known and address not in besides:
                    self._listener.made(out, args)
            else:
                self._look(out, args)
        except Exception as error:
            self._odd(error, (out,), args)
        return out

    def _look(self, value: Any, made_from: tuple[Any, ...] | None) -> None:
        """The slow way: any value, a list or a type seen for the first time; of arguments, or of what was made of them."""
        kind = self._kinds.get(type(value))
        if kind is None:
            kind = self._kinds[type(value)] = _kind(type(value))
        if kind == _LIST:
            for item in value:
                self._look(item, made_from)
        elif kind in (_TENSOR, _ODD):
            for tensor in plain_parts(value):
                address = _address(tensor)
                if address in self._known or address in self._besides:
                    continue
                if made_from is None:
                    self._listener.met(tensor)
                else:
                    self._listener.made(tensor, made_from)

    def _resized(self, value: Any) -> None:
        if isinstance(value, Tensor):
            for tensor in plain_parts(value):
                self._listener.resized(tensor)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._resized(item)

    def _odd(self, error: Exception, values: tuple[Any, ...], made_from: tuple[Any, ...] | None) -> None:
        """A tensor without a storage of its own is no failure: look at the parts it is made of."""
        try:
            for value in values:
                self._look(value, made_from)
        except Exception as again:
            self.deaf = True
            again.__context__ = error
            self._listener.failed(again)

    def _learn(self, func: Any) -> tuple[Callable[..., Any], int]:
        # An overload only forwards to its C++ operation; operators of higher order have none.
        run = func._op if type(func) is OpOverload else func
        self._learned.append(func)  # a number is its own only while it lives
        learned = self._operations[id(func)] = run, _does(func)
        return learned


def _does(func: Any) -> int:
    """What the operation's schema says of its results."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _MAKES
    if any(argument.is_out for argument in schema.arguments) or schema.name in _RESIZING:
        return _RESIZES
    if any(result.alias_info is None and _holds_tensors(result.type) for result in schema.returns):
        return _MAKES
    return _KEEPS


_RESIZING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::resize_as_sparse_", "aten::set_data"})


def _holds_tensors(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _kind(of: type) -> int:
    if issubclass(of, Tensor):
        plain = of.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        return _TENSOR if plain else _ODD
    return _LIST if issubclass(of, (list, tuple)) else _NEITHER


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with a storage of their own that ``tensor`` is made of: itself, the indices and values of a sparse one, what
    a subclass such as a DTensor says it wraps.
    """
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        inner = [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
        return [part for each in inner if isinstance(each, Tensor) for part in plain_parts(each)]
    layout = tensor.layout
    if layout is torch.strided:
        return [] if _is_wrapped(tensor) else [tensor]
    with torch._C._DisableTorchDispatch():
        if layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storages_of(tensor: object) -> list[torch.UntypedStorage]:
    """The storages behind a tensor, none for what is no tensor or hides its storage in another tensor."""
    if not isinstance(tensor, Tensor):
        return []
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return [part.untyped_storage() for part in plain_parts(tensor)]
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            # A kind of tensor that torch itself gives no storage to.
            return []
