"""Recomputation, unit by unit: a forward keeps a unit's inputs, and backward runs the unit again for the rest.

``run/hooks.py`` enters it once a unit's parameters are there and leaves it before they go; torch's own checkpoint does the
saving and the second forward.  It never replaces a ``forward`` and never decides where inputs are kept: they pass through the
saved-tensor hooks around it.

Note: [Which modules recompute]
    Modules that a unit is entered through, but never those of a unit that is entered through the model itself: its modules
    are what no unit took, not blocks.  A leaf of ``torch.nn`` keeps little more than its inputs anyway (a linear layer
    exactly those), so running it twice would buy nothing; recurrent layers keep every time step and do count.

Note: [The outermost recomputes]
    Inside a unit that will be recomputed nothing else need be.  The same holds inside a checkpoint of the user's own: it is
    recognised by the innermost pair of saved-tensor hooks.  Both are as true in the second forward as in the first, which
    must save the same tensors.

Note: [Buffers]
    A second forward would move running statistics a second time, and a forward that reads what it moves (spectral norm)
    would compute something else.  So it runs on copies of the buffers as the first forward found them, and the module's own
    are put back.  Large buffers that a first forward left alone are taken to be constants and not copied.

Note: [Attributes]
    The same holds of other attributes of modules (a recurrent state, a counter, a list of losses): what a first forward has
    set, or changed the items of (list, dict, set, deque), a second forward finds as the first did, and leaves as it is.  What
    is changed deeper inside an object is not seen, but of weights that are tensor subclasses.  A tensor that is written in
    place has lost what the first forward read.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from offload.device import checkpoint_keeps_generator, random_state, set_random_state
from offload.errors import CapabilityError, ShardedOpError
from offload.text import counted
from zhooks import tree
from zhooks.activation.objects import Found
from zhooks.activation.residual import Residual
from zhooks.layout import is_tile
from zhooks.refusals import modified
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit

if TYPE_CHECKING:
    from zhooks.activation.saved import SavedParameters

Make = Callable[..., Generator[None, None, None]]

#: A larger buffer is watched before it is copied at every forward.
_SMALL_NBYTES = 64 << 10
_CALLED = "torch.utils.checkpoint"


def recomputed(model: nn.Module, units: Iterable[Unit]) -> dict[int, tuple[Unit, nn.Module]]:
    """The modules that are recomputed, by id; see Note [Which modules recompute]."""
    found: dict[int, tuple[Unit, nn.Module]] = {}
    for unit in units:
        if any(entry is model for entry in unit.entries):
            continue
        for entry in unit.entries:
            if not _keeps_only_inputs(entry):
                found[id(entry)] = (unit, entry)
    return found


def _keeps_only_inputs(module: nn.Module) -> bool:
    leaf = next(tree.children(module), None) is None
    layer = type(module).__module__.startswith("torch.nn.") or is_tile(module)
    return leaf and layer and not isinstance(module, nn.RNNBase)


def nothing_recomputed(model: nn.Module, units: Sequence[Unit]) -> str:
    """The warning for a model without such modules."""
    return (
        '[activation] checkpoint = "unit" needs units that keep more than their inputs, found none in the '
        f"{type(model).__name__}: of its {counted(len(units), 'unit')} each is a single layer, or the whole model. Nothing is "
        'recomputed, and no memory is saved. Choose the blocks as units, for example with [units] names = ["layers.*"] or '
        'classes = ["Block"]; attachment.describe() lists the units.'
    )


@dataclass(slots=True, eq=False)
class _Kept:
    """A buffer as a forward found it."""

    table: dict[str, Tensor | None]
    name: str
    found: Tensor
    version: int
    copy: Tensor


#: What ``unit.show`` puts in place, which is no state.
_NOT_STATE = frozenset({"_flat_weights", "_flat_weight_refs", "_parameters", "_buffers", "_modules"})
_CONTAINERS = (list, dict, set, deque)
_ABSENT = object()


def _items(value: Any) -> list[int] | None:
    """What is in a container, by identity."""
    if not isinstance(value, _CONTAINERS):
        return None
    return [id(item) for pair in value.items() for item in pair] if isinstance(value, dict) else [*map(id, value)]


@dataclass(slots=True, eq=False)
class _Attribute:
    """An attribute of a module as a forward found it; ``copy``: of a container, what was in it."""

    table: dict[str, Any]
    name: str
    found: Any
    copy: Any
    version: int

    def swap(self, value: Any) -> Any:
        """Set it; returns what it was."""
        before = self.table.get(self.name, _ABSENT)
        if value is _ABSENT:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = value
        return before


class _Attributes:
    """The attributes of the modules below one module; see Note [Attributes]."""

    def __init__(self, module: nn.Module, unit: str) -> None:
        self._modules, self._unit = list(tree.modules(module)), unit

    def _tables(self) -> Iterator[dict[str, Any]]:
        for module in self._modules:
            yield vars(module)
            for param in module._parameters.values():
                # A quantised weight: its first forward may move what it carries to the module.
                if param is not None and type(param) not in (Tensor, nn.Parameter) and not isinstance(param, ShardedTensor):
                    yield vars(param)

    def keep(self) -> list[_Attribute]:
        """All attributes, before a forward."""
        kept = []
        for table in self._tables():
            for name, found in table.items():
                if name not in _NOT_STATE:
                    held = copy(found) if isinstance(found, _CONTAINERS) else found
                    kept.append(_Attribute(table, name, found, held, found._version if isinstance(found, Tensor) else 0))
        return kept

    def learn(self, kept: list[_Attribute]) -> None:
        """That forward is over: leave those that it changed.

        Raises:
            ShardedOpError: it wrote a tensor in place.
        """
        known: dict[int, set[str]] = {}
        changed = []
        for one in kept:
            known.setdefault(id(one.table), set()).add(one.name)
            if isinstance(one.found, Tensor) and one.found._version != one.version:
                raise ShardedOpError(
                    f'Unit {self._unit} cannot run its forward again. Expected a forward that [activation] checkpoint = "unit" '
                    'can run again, found that it '
                    f"wrote the tensor {one.name} of a module in place, so that the second forward would read another value. "
                    f"Assign a new tensor, register {one.name} as a buffer, or set checkpoint = \"none\"."
                )
            if one.table.get(one.name, _ABSENT) is not one.found or _items(one.found) != _items(one.copy):
                one.found = one.copy
                changed.append(one)
        for table in self._tables():
            changed += [
                _Attribute(table, name, _ABSENT, None, 0)
                for name in table
                if name not in known.get(id(table), ()) and name not in _NOT_STATE
            ]
        kept[:] = changed


class _Buffers:
    """The buffers below one module; see Note [Buffers]."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [inner._buffers for inner in tree.modules(module) if inner._buffers]
        self._constant: set[tuple[int, str]] = set()

    def keep(self) -> list[_Kept]:
        """Copies of the buffers that the coming forward may change."""
        kept = []
        with torch.no_grad():
            for table in self._tables:
                for name, buffer in table.items():
                    if buffer is not None and (id(table), name) not in self._constant:
                        kept.append(_Kept(table, name, buffer, buffer._version, buffer.detach().clone()))
        return kept

    def learn(self, kept: list[_Kept]) -> None:
        """That forward is over: leave out the large ones that it did not change."""
        for one in [one for one in kept if one.copy.nbytes > _SMALL_NBYTES]:
            if one.table.get(one.name) is one.found and one.found._version == one.version:
                self._constant.add((id(one.table), one.name))
                kept.remove(one)


class _Again:
    """Around a second forward, which may come more than once: the buffers that the first one found, its parameters."""

    def __init__(self, kept: list[_Kept], state: list[_Attribute], flats: Sequence[Flat], name: str) -> None:
        self._kept, self._state, self._name = kept, state, name
        self._flats = [(flat, flat.version()) for flat in flats]
        self._own: list[Tensor | None] = []
        self._set: list[Any] = []

    def __enter__(self) -> None:
        for flat, version in self._flats:
            if flat.version() != version:
                raise modified(f"parameter of unit {self._name}", flat.version(), version)
        self._own = [one.table[one.name] for one in self._kept]
        with torch.no_grad():
            for one in self._kept:
                one.table[one.name] = one.copy.clone()
        self._set = [
            one.swap(copy(one.found) if isinstance(one.found, _CONTAINERS) else one.found) for one in self._state
        ]

    def __exit__(self, *exc: object) -> None:
        for one, own in zip(self._kept, self._own, strict=True):
            one.table[one.name] = own
        for attribute, value in zip(self._state, self._set, strict=True):
            attribute.swap(value)


class _Counted:
    """Around a second forward: what it saves goes to the checkpoint that asked for it, and is counted on the way."""

    def __init__(self, around: AbstractContextManager[None], residual: Residual) -> None:
        self._around, self._residual = around, residual
        self._pushed = False

    def __enter__(self) -> None:
        self._around.__enter__()
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None or not self._residual.counts:
            return
        count, save = self._residual.again, outer[0]

        def pack(tensor: Tensor) -> Any:
            count(tensor)
            return save(tensor)

        torch._C._autograd._push_saved_tensors_default_hooks(pack, outer[1])
        self._pushed = True

    def __exit__(self, *exc: Any) -> None:
        if self._pushed:
            self._pushed = False
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self._around.__exit__(*exc)


class _SameRandom:
    """Around a second forward: the device's generator is as the first one found it, and afterwards as it was."""

    def __init__(self, device: torch.device, around: AbstractContextManager[None]) -> None:
        self._device, self._around = device, around
        self._first = self._before = random_state(device)

    def __enter__(self) -> None:
        self._around.__enter__()
        self._before = random_state(self._device)
        set_random_state(self._device, self._first)

    def __exit__(self, *exc: Any) -> None:
        set_random_state(self._device, self._before)
        self._around.__exit__(*exc)


@dataclass(slots=True)
class _Open:
    """A first forward under way, torch's checkpoint around it, and how often the module has entered itself."""

    module: nn.Module
    checkpoint: Generator[None, None, None]
    buffers: _Buffers
    kept: list[_Kept]
    attributes: _Attributes
    state: list[_Attribute]
    inside: int = 0


class Recompute:
    """The recomputation of one attachment."""

    def __init__(self, modules: dict[int, tuple[Unit, nn.Module]], saved: SavedParameters) -> None:
        self._make = _checkpoint()
        self._saved = saved
        self._modules = {
            number: (unit, module, _Buffers(module), _Attributes(module, unit.name))
            for number, (unit, module) in modules.items()
        }
        self._open: _Open | None = None
        #: A second forward runs.
        self.again = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """``module`` is about to run with its parameters in place: keep its inputs, and forget what it will save."""
        known = self._modules.get(id(module))
        if known is None or self.again:
            return
        if self._open is not None:
            self._open.inside += self._open.module is module
            return
        if not torch.is_grad_enabled() or _in_checkpoint():
            return
        unit, _, buffers, attributes = known
        leaves, structure = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[place] for place in places]
        # The closure below lives as long as the graph: what it held would be kept beside the inputs that are put away.
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        found = Found(rest, unit.name)
        kept, state = buffers.keep(), attributes.keep()
        around: AbstractContextManager[None] = _Again(kept, state, unit.flats, unit.name)
        device = unit.flats[0].kind.device
        if not checkpoint_keeps_generator(device, given):
            around = _SameRandom(device, around)

        def run(*tensors: Tensor) -> None:
            filled = found.again()
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            again_args, again_kwargs = tree_unflatten(filled, structure)
            self.again = True
            try:
                module(*again_args, **again_kwargs)
            finally:
                self.again = False

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _Counted(around, self._saved.residual)

        generator = self._make(run, contexts, given)
        with self._saved.saving_inputs(unit, given, lambda number: _words((args, kwargs), places[number])):
            next(generator)
        self._open = _Open(module, generator, buffers, kept, attributes, state)

    def leave(self, module: nn.Module, failed: bool) -> None:
        """``module`` has run, or raised."""
        open_ = self._open
        if open_ is None or open_.module is not module or self.again:
            return
        if open_.inside:
            open_.inside -= 1
            return
        if failed:
            self.abandon()
            return
        self._open = None
        open_.buffers.learn(open_.kept)
        try:
            open_.attributes.learn(open_.state)
        except BaseException:
            open_.checkpoint.close()
            raise
        ended = next(open_.checkpoint, True)
        assert ended is True, "torch's checkpoint yields once"

    def abandon(self) -> None:
        """A forward was left in the middle: take torch's saved-tensor hooks off again."""
        open_, self._open, self.again = self._open, None, False
        if open_ is not None:
            open_.checkpoint.close()


def _words(tree: Any, place: int) -> str:
    """An input by its place among the leaves: "input 0", "input mask"."""
    path = tree_flatten_with_path(tree)[0][place][0][1:]
    first = getattr(path[0], "idx", getattr(path[0], "key", "?"))
    return f"input {first}{keystr(path[1:])}"


def _in_checkpoint() -> bool:
    """The innermost saved-tensor hooks are a checkpoint's, in its first or its second forward."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair is not None and getattr(pair[1], "__module__", None) == _CALLED


def _checkpoint() -> Make:
    """torch's checkpoint as a generator: it yields once, where the first forward belongs.

    Raises:
        CapabilityError: this torch has none, or one that is called otherwise.
    """
    make = getattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", None)
    names = list(inspect.signature(make).parameters) if make is not None else []
    fixed = ["fn", "preserve_rng_state", "context_fn", "determinism_check", "debug"]
    early = ["early_stop"] if "early_stop" in names else []
    # Selective checkpointing's tensors, of which there are none here.
    by_name = {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in names else {}
    if make is None or names != [*fixed, *early, "args", *by_name, "kwargs"]:
        raise CapabilityError(
            f"[activation] checkpoint needs torch {torch.__version__} to have a checkpoint that hooks can drive "
            f"({_CALLED}._checkpoint_without_reentrant_generator), found {names or 'none'}; "
            'use torch 2.8 to 2.15, or checkpoint = "none" and torch.utils.checkpoint in the model'
        )
    more = [True] * len(early)

    def made(run: Callable[..., None], contexts: Callable[[], Any], given: list[Tensor]) -> Generator[None, None, None]:
        generator: Generator[None, None, None] = make(run, True, contexts, "default", False, *more, *given, **by_name)
        return generator

    return made
