"""What autograd saves: gathered parameters pass as references, large values go to the stash, the rest is left alone.

``run/runtime.py`` enters it around a forward whose units will be released or whose activations have a tier.  A reference costs
no memory; when backward asks for it the unit is gathered again, whatever module hooks saw or missed.  It never keeps a gathered
buffer alive.

Note: [Hook pairs nest]
    torch calls only the innermost pair of saved-tensor hooks, so ours hands what is not a parameter to the pair outside
    it (the user's ``save_on_cpu``, a checkpoint around the model) and takes the version check over from torch, which
    skips it for hooked tensors.  Where there is such a pair, activations are its business and stash and partition stay out.

Note: [What is stashed]
    Plain strided tensors on the device of compute that the forward made: no parameters (whatever buffer they lie in), no
    leaves that want a gradient, which their owner keeps alive anyway, and nothing whose bytes are not its values (sparse,
    quantized, conjugated or negated views, subclasses).  A write after saving is an error, as it is in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from offload.errors import AttachError
from offload.events import Bus
from offload.memory import Arena
from offload.policy import Policy
from offload.stash import Limits, Saved, Stash
from offload.store import Pools, Store
from offload.tier import Tier
from offload.user_warnings import warn_user
from zhooks import tree
from zhooks.activation.inputs import Input, Inputs
from zhooks.activation.recompute import Recompute, nothing_recomputed, recomputed
from zhooks.activation.residual import Residual
from zhooks.activation.undivided import DividedInput, Division, Undivided, open_division
from zhooks.comm import Comm
from zhooks.grad import in_backward, refuse_saved
from zhooks.layout import Ignored, hollow, is_divided, part_of, rewrap
from zhooks.refusals import modified, too_old
from zhooks.unit import Flat, Unit

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True, slots=True)
class Reference:
    """A view of a gathered buffer that autograd saved: identity is offset, size and stride of the flat's storage."""

    flat: Flat
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A DTensor that autograd saved: what became of its part, its DTensorSpec, and what tells of later writes through it."""

    part: Any
    spec: Any
    probe: Tensor | None
    version: int

    def again(self, part: Tensor) -> Tensor:
        """The DTensor, around the part that was read back; an error where it was written since."""
        if self.probe is not None and self.probe._version != self.version:
            raise modified(f"tensor of shape {list(self.spec.shape)}", self.probe._version, self.version)
        return rewrap(part, self.spec)


class SavedParameters:
    """The saved-tensor hooks of one attachment."""

    def __init__(self, gather: Callable[[Flat], None], model: nn.Module, comm: Comm, bus: Bus, ignored: Ignored) -> None:
        """``gather`` brings a flat's values back for a backward; parameters that are ``ignored`` stay where they are."""
        frozen = [tensor for one in ignored.frozen.values() for tensor in one.tensors()]
        self._ignored = (*(param for param in ignored.params.values() if type(param) is nn.Parameter), *frozen)
        self._gather, self.residual = gather, Residual(bus)
        self._model: nn.Module | None = model
        self._comm, self._bus = comm, bus
        self._outer: Pair | None = None
        self._live: dict[int, Flat] = {}
        self._staying: list[Flat] = []
        self._passing: set[int] = set()
        self.stash: Stash | None = None
        #: Where inputs of recomputed units are kept, if not where the model made them.
        self.inputs: Inputs | None = None
        self.partition = Undivided()
        self.recompute: Recompute | None = None
        #: The ranks cannot communicate any more.
        self.parted: bool = False
        #: The module entered last, for the names of what is stashed.
        self.where: str = "model"

    @property
    def kept(self) -> bool:
        """Whether activations are kept elsewhere than autograd would, or are counted."""
        return self.stash is not None or self.partition.divides or self.inputs is not None or self.residual.asked

    def follow(self, policy: Policy, units: Sequence[Unit], store: Store | None, arena: Arena | None) -> None:
        """From the next forward on what autograd saves stays, goes to its tier or is computed again, as this policy says."""
        model = self._model
        assert model is not None
        self.stash = open_stash(policy, store, self._bus, self)
        self.residual.follow(policy.activation, self._comm.tp.axis.world, partial(tree.buffers, model))
        self.partition = open_division(Division(policy, self._comm, self.stash, self._bus, model, self.holds))
        again = recomputed(model, units) if policy.activation.checkpoint == "unit" else {}
        # A stage of a pipeline may have no block, where the others have.
        if policy.activation.checkpoint == "unit" and not again and not self._comm.pipelined:
            warn_user(nothing_recomputed(model, units))
        self.inputs = open_inputs(policy, arena, self._bus, len(again))
        self.recompute = Recompute(again, self) if again else None

    # A pass, as the hooks see it.

    def entered(self, module: nn.Module, args: Any, kwargs: Any, *, where: str, begins: str | None, unit: bool) -> None:
        """A forward enters ``module``, called ``where``, with parameters and hooks in place.

        Args:
            begins: the path of the pass that begins here, None where one is under way or backward runs.
            unit: a unit is entered through the module.
        """
        self.where = where
        if begins is not None:
            self.residual.forget_calls()
            self.partition.begin(begins)
        if unit and self.residual.counts and not in_backward():
            self.residual.entering(module, args, kwargs)
        if self.recompute is not None:
            self.residual.inputs = True
            self.recompute.enter(module, args, kwargs)
            self.residual.inputs = False

    def left(self, module: nn.Module, failed: bool) -> None:
        """That module has run, or raised; its parameters are still in place."""
        if self.recompute is not None:
            self.recompute.leave(module, failed)

    @property
    def recomputes(self) -> bool:
        """A unit's second forward runs."""
        return self.recompute is not None and self.recompute.again

    def abandon(self) -> None:
        """A pass was left without its hooks running."""
        if self.recompute is not None:
            self.recompute.abandon()

    def saving_inputs(self, unit: Unit, given: Sequence[Tensor], name: Callable[[int], str]) -> AbstractContextManager[object]:
        """What is saved inside are the inputs ``given`` to ``unit``; ``name`` says what to call each."""
        kept = nullcontext() if self.inputs is None else self.inputs.saving()
        both = ExitStack()
        both.enter_context(self.partition.inputs(unit.name, self.where, given, name))
        both.enter_context(kept)
        return both

    def end(self, failed: bool) -> None:
        """It is over, or raised.

        Raises:
            DivergenceError: what ranks should hold alike they do not.
        """
        if failed:
            self.partition.abandon()
        else:
            self.partition.end()

    def backward_over(self) -> None:
        """What was gathered ahead of it and never asked for goes."""
        self.partition.drop_unasked()

    def part(self) -> None:
        """The attachment is over; a graph that somebody keeps refers to this, and must not keep the model."""

        def refuse(flat: Flat) -> None:
            raise too_old(f"parameter of unit {flat.name}")

        self.parted, self._gather = True, refuse
        self._model = self.recompute = None
        self._ignored = ()
        self.residual.part()

    def watch(self, flats: list[Flat]) -> None:
        """Take over these flats (all of the attachment)."""
        self.forget()
        self._staying = [flat for flat in flats if not flat.releasable]

    def live(self, flat: Flat) -> None:
        """``flat`` has just been gathered: tensors on its storage are its parameters."""
        if flat.full is None:
            return
        address = torch._C._storage_address(flat.full)  # type: ignore[attr-defined]
        if flat.releasable:
            self._live[address] = flat
        else:
            self._passing.add(address)

    def holds(self, address: int) -> bool:
        """The storage there is that of gathered parameters."""
        return address in self._live or address in self._passing

    def forget(self) -> None:
        """All buffers are laid out anew."""
        self._live.clear()

    def gone(self, flat: Flat) -> None:
        """``flat`` is about to be released."""
        if flat.full is not None:
            self._live.pop(torch._C._storage_address(flat.full), None)  # type: ignore[attr-defined]

    def enter(self) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._outer = cast("Pair | None", tuple(outer)) if outer is not None else None
        stash = self.stash if self._outer is None else None
        partition = self.partition if self._outer is None and self.partition.divides else None
        counts = self.residual.counts and self._outer is None
        self.residual.stale |= not self.residual.counts
        if partition is not None:
            partition.active = True
        if stash is not None or partition is not None or counts:
            self._passing.clear()
            self._passing.update(torch._C._storage_address(param) for param in self._ignored)  # type: ignore[attr-defined]
            for flat in self._staying:
                self.live(flat)
        count = self.residual.begin(stash, self._passing, self._live) if counts else None
        torch._C._autograd._push_saved_tensors_default_hooks(*self._pair(self._outer, stash, partition, count))

    def exit(self, failed: bool) -> None:
        self.partition.active = False
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self.residual.end(failed=failed)

    def _pair(
        self, outer: Pair | None, stash: Stash | None, partition: Undivided | None, count: Residual | None
    ) -> Pair:
        live, address = self._live, torch._C._storage_address  # type: ignore[attr-defined]
        inputs = self.inputs if outer is None else None

        def pack(tensor: Tensor) -> Any:
            divided = partition.take(tensor, count) if partition is not None else None
            if divided is not None:
                return divided
            if is_divided(tensor):
                part, spec, version = part_of(tensor), cast(Any, tensor)._spec, int(tensor._version)
                if live.get(address(part)) is not None:
                    return Wrapped(pack(part), spec, None, version)
                # The pair of hooks outside ours shall see what autograd saved.
                return outer[0](tensor) if outer is not None else Wrapped(pack(part), spec, hollow(tensor), version)
            if type(tensor) is not Tensor:
                refuse_saved(tensor)
            flat = live.get(address(tensor)) if type(tensor) is Tensor else None
            # A buffer that a failed gather gave up may have left its address to somebody else.
            if flat is not None and flat.full is not None and address(flat.full) == address(tensor):
                return Reference(
                    flat, flat.version(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                )
            if outer is not None:
                return outer[0](tensor)
            if inputs is not None and inputs.open and type(tensor) is Tensor:
                kept = inputs.keep(tensor, self.where)
                if kept is not None:
                    kept.extent = kept.extent or (count and count.keep(kept.copy))
                    return kept
            if stash is not None and type(tensor) is Tensor and self._stashes(stash, tensor):
                saved = stash.put(tensor)
                if saved is not None:
                    if count is not None:
                        count.stashed(stash)
                    return saved
            return tensor.detach(), tensor._version, count and count.keep(tensor)

        def unpack(packed: Any) -> Tensor:
            kind = type(packed)
            if kind is Reference:
                return self._restore(packed)
            if kind is Wrapped:
                return cast(Tensor, packed.again(unpack(packed.part)))
            if outer is not None:
                return outer[1](packed)
            if kind is DividedInput:
                return self._whole(packed)
            if kind is Saved or kind is Input:
                if packed.probe._version != packed.version:
                    raise modified(f"tensor of shape {list(packed.shape)}", packed.probe._version, packed.version)
                if kind is Input:
                    return cast(Input, packed).copy.detach()
                assert stash is not None
                return stash.open(packed)
            tensor, version, _ = packed
            if tensor._version != version:
                raise modified(f"tensor of shape {list(tensor.shape)}", tensor._version, version)
            return cast(Tensor, tensor)

        return pack, unpack

    def _whole(self, part: DividedInput) -> Tensor:
        if part.probe._version != part.version:
            raise modified(f"tensor of shape {list(part.shape)}", part.probe._version, part.version)
        if self.parted:
            raise AttachError(
                f"Cannot run {part.key} backward. Expected backward before detach, found inputs that are partitioned over "
                "ranks which no longer exchange them. Run backward() first, or the forward again."
            )
        return part.open()

    def _stashes(self, stash: Stash, tensor: Tensor) -> bool:
        """See Note [What is stashed]."""
        return (
            tensor.device == stash.device
            and tensor.layout is torch.strided
            and not (tensor.requires_grad and tensor.is_leaf)
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and torch._C._storage_address(tensor) not in self._passing  # type: ignore[attr-defined]
        )

    def _restore(self, reference: Reference) -> Tensor:
        flat = reference.flat
        if flat.version() != reference.version:
            raise modified(f"parameter of unit {flat.name}", flat.version(), reference.version)
        self._gather(flat)
        assert flat.full is not None
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=reference.dtype, device=flat.full.device)
            storage = flat.full.untyped_storage()
            return empty.set_(storage, reference.offset, reference.shape, reference.stride)


def open_inputs(policy: Policy, arena: Arena | None, bus: Bus, units: int) -> Inputs | None:
    """Where inputs of recomputed units are kept; None where that is where the model made them, or on another tier.

    Args:
        units: how many modules recompute.
    """
    chosen = policy.activation
    if arena is None or policy.device.arena != "all" or chosen.checkpoint != "unit" or chosen.tier != "device":
        return None
    return Inputs(arena, bus, units)


def open_stash(policy: Policy, pools: Pools | None, bus: Bus, saved: SavedParameters) -> Stash | None:
    """Where the policy puts activations; None where they stay on the device."""
    tier, chosen = Tier(policy.activation.tier), policy.activation
    if tier is Tier.DEVICE or pools is None:
        return None
    return Stash(pools, tier, Limits(chosen.min_bytes, chosen.keep), bus, lambda: saved.where)
