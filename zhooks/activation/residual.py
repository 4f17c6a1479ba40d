"""What forwards leave for their backwards, in bytes: every storage that autograd keeps through our hooks, counted once.

``saved.py`` tells it of each tensor it packs, ``run/hooks.py`` of the units that are entered, and ``report/memory.py`` reads
it.  It keeps no tensor alive and decides nothing about where one is kept.

Note: [When it counts]
    Where a forward has saved-tensor hooks anyway: in the first step, and while somebody observes.  Everywhere from the first
    ``memory()`` on.  An observer alone never brings hooks into a forward that has none: torch.func refuses to work inside them,
    and to be watched must not break a run.  A forward that ``memory()`` has broken so says why, and is not counted again.

Note: [What is counted]
    The storage behind a saved tensor, whole: that is what autograd keeps alive, however small the view.  Not those that
    somebody owns anyway: parameters, the model's buffers, leaves that want a gradient.  Not seen is what is saved outside the
    model's forward (a loss), through hooks further inside (the user's checkpoints), and
    what an operator keeps without telling autograd.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload.errors import PolicyError
from offload.events import Bus
from offload.formulas import Layers
from offload.policy import Activation
from offload.stash import Stash
from offload.text import shown
from zhooks import tree
from zhooks.layout import is_tile

_address = torch._C._storage_address  # type: ignore[attr-defined]
_REFUSED = "saved tensor hooks"
_INPUTS, _SAVED, _NEAR, _AGAIN = range(4)


class Extent:
    """One storage that autograd keeps; given back when the last tensor saved of it is dropped."""

    __slots__ = ("__weakref__",)


class _End(weakref.ref[Any]):
    """What is counted of an object until it is gone.

    It goes anywhere, on any thread, inside any call, where only a note is left; a deque's own append leaves it.  Python code
    there would now and then be what an interrupt meets, whose exception the interpreter drops.
    """

    __slots__ = ("address", "level", "nbytes")

    level: int
    nbytes: int
    address: int

    @classmethod
    def of(cls, counted: object, gone: deque[_End], level: int, nbytes: int, address: int) -> _End:
        made = cls(counted, gone.append)
        made.level, made.nbytes, made.address = level, nbytes, address
        return made


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes on the device.

    Attributes:
        inputs: of units that are recomputed. saved: what else autograd keeps.
        near: what goes to another tier and has not left yet. again: what units have computed a second time.
    """

    inputs: int = 0
    saved: int = 0
    near: int = 0
    again: int = 0

    @property
    def total(self) -> int:
        return self.inputs + self.saved + self.near + self.again


@dataclass(frozen=True, slots=True)
class _Call:
    """A module that units are entered through, as a forward entered it."""

    module: nn.Module
    shape: tuple[int, int, int]
    itemsize: int


class Residual:
    """The count of one attachment; see Note [When it counts]."""

    def __init__(self, bus: Bus) -> None:
        #: ``memory()`` has been called: count, also where that takes hooks.
        self.asked = False
        #: What is packed now are the inputs of a unit that will be recomputed.
        self.inputs = False
        #: The first step is not over.
        self._first = True
        #: A forward was counted; and another was not, since.
        self.counted = self.stale = False
        #: Why nothing can be, in words.
        self.refused = ""
        #: The policy's [activation] and the ranks of the ``tp`` axis; the rest is found in a forward.
        self.terms = Layers(1, 1, 1, 1, 1)
        #: What is smaller stays as it is, where it is.
        self.least_nbytes = 0
        self._own: Callable[[], Iterable[Tensor]] = tuple
        self._peak = Levels()
        self._bus, self._now = bus, [0, 0, 0, 0]
        self._stash: Stash | None = None
        # By the addresses of storages: those that autograd keeps, and those that a unit computed a second time.
        self._extents: dict[int, _End] = {}
        self._twice: dict[int, _End] = {}
        self._gone: deque[_End] = deque()
        self._owned: set[int] = set()
        self._parameters: tuple[Collection[int], ...] = ()
        self._calls: list[_Call] = []
        self._reported, self._over = 0, True

    @property
    def counts(self) -> bool:
        """Where saved-tensor hooks run, they count."""
        return self.asked or self._bus.active or self._first

    def follow(self, policy: Activation, tp: int, own: Callable[[], Iterable[Tensor]]) -> None:
        """Under this policy from now on, with layers divided over ``tp`` ranks; ``own`` are the model's buffers."""
        self._own, self.least_nbytes = own, policy.min_bytes
        self.terms = replace(self.terms, tp=tp, checkpoint=policy.checkpoint, tier=policy.tier, partition=policy.partition)

    def part(self) -> None:
        """The attachment is over: keep nothing of the model."""
        self._own = tuple

    def ask(self, heads: int | None = None) -> Residual:
        """Count from the next forward on; ``heads`` of the attention, where the modules do not say.

        Raises:
            PolicyError: a number of heads below 1.
        """
        if heads is not None:
            if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
                raise PolicyError(
                    f"heads must be a number of attention heads, 1 or more, found {shown(heads)}. Omit it if the model's "
                    "modules define it."
                )
            self.terms = replace(self.terms, heads=heads)
        self.asked = not self.refused
        return self

    # A forward.

    def begin(self, stash: Stash | None, *parameters: Collection[int]) -> Residual:
        """A forward begins, or a part of a backward that saves anew; ``parameters`` are their addresses."""
        self._stash, self._parameters, self.inputs = stash, parameters, False
        self._owned = {_address(buffer) for buffer in self._own() if type(buffer) is Tensor}
        if torch._C._current_graph_task_id() < 0:
            # Something was given back since the last forward: a backward has been, and another step begins.
            self._drain()
            if self._over:
                self._over, self._peak = False, Levels()
                if stash is not None:
                    stash.account.begin_peaks()
            self.counted, self.stale = True, False
            self._tell()
        return self

    def backward_over(self) -> None:
        """A backward has ended; the next forward begins another step."""
        self._over = True
        self.end()
        self._first = False

    def end(self, *, failed: bool = False) -> None:
        """A forward is over, or raised."""
        if not self.counts:
            return
        self.now()
        self._tell()
        if failed:
            self._refuse()

    def forget_calls(self) -> None:
        """A pass begins; what repeats is that of the last pass that was counted, as the bytes are."""
        if self.counts:
            self._calls.clear()

    def entering(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward enters a unit."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
                batch, seq, hidden = value.shape
                self._calls.append(_Call(module, (batch, seq, hidden), value.element_size()))
                return

    def keep(self, tensor: Tensor) -> object:
        """Autograd saves ``tensor``: what is returned must live as long as that is kept."""
        if type(tensor) is not Tensor:
            wrapper: Any = tensor
            names = wrapper.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(wrapper) else ()
            return [self.keep(getattr(wrapper, name)) for name in names]
        if tensor.layout is not torch.strided or (tensor.requires_grad and tensor.is_leaf):
            return None
        address = _address(tensor)
        if self._somebodys(address):
            return None
        if self._gone:
            self._drain()
        end = self._extents.get(address)
        extent = None if end is None else end()
        if end is None or extent is None:
            extent, level, nbytes = Extent(), _INPUTS if self.inputs else _SAVED, tensor.untyped_storage().nbytes()
            self._extents[address] = _End.of(extent, self._gone, level, nbytes, address)
            self._now[level] += nbytes
        elif self.inputs and end.level != _INPUTS:
            end.level = _INPUTS
            self._now[_INPUTS] += end.nbytes
            self._now[_SAVED] -= end.nbytes
        return extent

    def again(self, tensor: Tensor) -> None:
        """A unit computes ``tensor`` a second time, for a checkpoint that drops it when it was read."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or (tensor.requires_grad and tensor.is_leaf):
            return
        number = _address(tensor)
        self._drain()
        if number in self._twice or number in self._extents or self._somebodys(number):
            return
        storage = tensor.untyped_storage()
        # Storages tell of their end; nothing that is ours could ride on what the checkpoint keeps.
        self._twice[number] = _End.of(storage, self._gone, _AGAIN, storage.nbytes(), number)
        self._now[_AGAIN] += storage.nbytes()

    def _somebodys(self, address: int) -> bool:
        return address in self._owned or any(address in known for known in self._parameters)

    def stashed(self, stash: Stash) -> None:
        """A tensor was put away instead; the copies in their own memory may be others now."""
        near = stash.near()
        if near < self._now[_NEAR]:
            self._note_peak()
        self._now[_NEAR] = near

    def _refuse(self) -> None:
        """A forward raised: if it was because it was counted, say so, and count no more."""
        error = sys.exc_info()[1]
        if self.asked and isinstance(error, RuntimeError) and _REFUSED in str(error):
            self.asked, self.refused = False, "the forward uses torch.func, which does not allow saved-tensor hooks"
            error.add_note(
                "zhooks: attachment.memory() had turned on the counting of activations, which needs saved-tensor hooks; "
                "it is off again: repeat the forward."
            )

    # What was counted.

    @property
    def stash(self) -> Stash | None:
        """Where the last forward that was counted put things away."""
        return self._stash

    def now(self) -> Levels:
        """What is kept at this moment."""
        self._drain()
        if self._stash is not None:
            self.stashed(self._stash)
        return Levels(*self._now)

    def most(self) -> Levels:
        """What was kept when the last step kept most."""
        self.now()
        self._note_peak()
        return self._peak

    def layers(self) -> Layers | None:
        """What repeats in the last forward that was counted: modules of one class entered with [batch, seq, hidden]."""
        # Tiles are parts of one layer.
        calls = [call for call in self._calls if not is_tile(call.module)]
        alike = Counter((type(call.module), call.shape, call.itemsize) for call in calls)
        often = [key for key, count in alike.items() if count > 1]
        if not often:
            return None
        kind, shape, itemsize = max(often, key=lambda key: alike[key] * prod(key[1]))
        attention = next(
            (inner for call in self._calls if type(call.module) is kind for inner in tree.modules(call.module)
             if isinstance(inner, nn.MultiheadAttention)),
            None,
        )  # fmt: skip
        batch, seq = shape[:2] if attention is None or attention.batch_first else (shape[1], shape[0])
        heads = self.terms.heads or (0 if attention is None else attention.num_heads)
        count = alike[kind, shape, itemsize]
        return replace(self.terms, count=count, batch=batch, seq=seq, hidden=shape[2], itemsize=itemsize, heads=heads)

    def _drain(self) -> None:
        """Take note of what was given back since the last call."""
        if not self._gone:
            return
        self._note_peak()
        self._over = True
        while self._gone:
            end = self._gone.popleft()
            self._now[end.level] -= end.nbytes
            known = self._twice if end.level == _AGAIN else self._extents
            # Another may lie at the address by now, whose end is to come.
            if known.get(end.address) is end:
                del known[end.address]

    def _note_peak(self) -> None:
        if sum(self._now) > self._peak.total:
            self._peak = Levels(*self._now)

    def _tell(self) -> None:
        """The levels, and of a larger forward than any before what should be kept of it."""
        if not self._bus.active:
            return
        self._bus.counter("saved for backward", "inputs", self._now[_INPUTS])
        self._bus.counter("saved for backward", "other", sum(self._now) - self._now[_INPUTS])
        layers = self.layers()
        if layers is not None and layers.kept_nbytes > self._reported:
            self._reported = layers.kept_nbytes
            self._bus.instant("activation", layers.text(), layers.kept_nbytes)
