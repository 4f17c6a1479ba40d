"""``[budget] device``: what an attachment will hold on the device, the states of its optimizers included, and its refusal.

``attach.py`` asks before it builds anything and again in ``apply``; torch's step hooks ask for optimizers that only the first
step shows.  It never allocates on the device and moves nothing.

Note: [States ahead]
    Only an optimizer knows what it will keep.  So one of the same class and options steps once on the CPU, over parameters of a
    few elements, and what it then holds in their shape is what it will hold of ours.  Where there can be none such (a closure,
    a constructor with other arguments), the states count once they exist: after that step.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.budget import shown
from offload.device import open_device
from offload.errors import BudgetError
from offload.policy import Policy
from offload.tier import Tier
from zhooks.agree import least
from zhooks.arena_plan import beside
from zhooks.comm import Comm
from zhooks.flat import Flat
from zhooks.tiers import limit_of
from zhooks.unit import Unit

__all__ = ["DeviceBudget", "device_floor", "state_nbytes"]

_Place = tuple[int, torch.dtype, int]
"""A parameter as far as states depend on it: its group, the dtype that is updated, its dimensions."""


class DeviceBudget:
    """One attachment's ``[budget] device``.

    Attributes:
        spared: told what is left for gathered units once an optimizer that ``room`` did not know has its states counted.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.spared: Callable[[int], None] = lambda room: None
        self._limit: int | None = None
        self._policy = Policy()
        self._units: Sequence[Unit] = ()
        self._counted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Their states could not be foreseen: they count after their first step.
        self._unforeseen: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def open(self, policy: Policy, device: torch.device) -> bool:
        """Take up this policy; whether any rank has a bound.  Collective."""
        seam = open_device(device)
        try:
            self._limit = limit_of(policy, Tier.DEVICE, seam, self._comm)
        finally:
            seam.close()
        self._policy = policy
        return self._limit is not None

    def room(self, units: Sequence[Unit], optimizers: Iterable[Optimizer] = ()) -> int:
        """Bytes of gathered units that may stay between forward and backward: what the bound leaves.  Collective.

        Args:
            units: as they are, or as they will be built.
            optimizers: those that are known, beside the ones that have stepped.
        Raises:
            BudgetError: it does not hold what rests on the device and the units in flight; on every rank.
        """
        known = {*self._counted, *optimizers}
        self._counted.clear()
        self._unforeseen.clear()
        room, foreseen = self._room(units, known, "")
        self._counted.update(foreseen)
        return room

    def follow(self, units: Sequence[Unit]) -> None:
        """These are the units, from now on."""
        self._units = units

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook.  Collective at the first step of an optimizer that holds parameters of the model.

        Raises:
            BudgetError: its states would not fit; nothing has been updated, on any rank.
        """
        # Ranks need not come to a step in backward (an optimizer a parameter) in one order.
        if self._limit is None or optimizer in self._counted or torch._C._current_graph_task_id() != -1:
            return
        ours = {id(param) for unit in self._units for flat in unit.flats for param in flat.params}
        if any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            after = " Nothing has been updated: go on with the step after attachment.apply(policy)."
            room, foreseen = self._room(self._units, {*self._counted, optimizer}, after)
            self.spared(room)
            if optimizer not in foreseen:
                self._unforeseen.add(optimizer)
        self._counted.add(optimizer)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook.  Collective after the first step of an optimizer whose states could not be foreseen.

        Raises:
            BudgetError: its states do not fit; the step has been made on every rank, and the next one is refused.
        """
        if optimizer in self._unforeseen and torch._C._current_graph_task_id() == -1:
            self._unforeseen.discard(optimizer)
            self._counted.discard(optimizer)
            after = " The step has been made, and what follows is refused until attachment.apply(policy) makes room."
            room, _ = self._room(self._units, {*self._counted, optimizer}, after)
            self._counted.add(optimizer)
            self.spared(room)

    def _room(self, units: Sequence[Unit], optimizers: Iterable[Optimizer], after: str) -> tuple[int, list[Optimizer]]:
        """What is left beside the states of these optimizers, and which of them could be foreseen.  Collective."""
        assert self._limit is not None
        flats = [flat for unit in units for flat in unit.flats]
        rounded = self._policy.optimizer.rounding == "stochastic"
        found = {optimizer: state_nbytes(optimizer, flats, wide=rounded) for optimizer in optimizers}
        floor = device_floor(self._policy, units, whole_sums=self._comm.pp.axis.world > 1) + beside(self._policy, units)
        room = least(self._comm.stage, self._limit - floor - sum(nbytes for nbytes, _ in found.values()))
        assert room is not None
        if room >= 0:
            return room, [optimizer for optimizer, (_, foreseen) in found.items() if foreseen]
        states = self._limit - room - floor
        tier, what = "", f"{shown(floor)} in all"
        if states:
            of = ", ".join(sorted({type(optimizer).__name__ for optimizer in found}))
            tier = 'set [optimizer] tier = "host", '
            what = f"{shown(floor)}, and for the states of {of}, {shown(states)}: {shown(floor + states)} in all"
        raise BudgetError(
            f"[budget] device: expected room for what rests there and the units in flight, {what}, found "
            f"{shown(self._limit)}. Raise it, {tier}lower [schedule] prefetch or [units] max_numel, or place more on another "
            f"tier.{after}"
        )


def device_floor(policy: Policy, units: Sequence[Unit], *, whole_sums: bool = False) -> int:
    """Bytes on the device whatever is kept: parameters, masters and gradients that rest there, gathered units, sums in flight.

    Args:
        whole_sums: microbatches of a pipeline add up unreduced: every sum is held until the last.
    """
    flats = [flat for unit in units for flat in unit.flats]
    gathered = sorted((unit.full_nbytes for unit in units if unit.releasable), reverse=True)
    sums = sorted((flat.layout.padded * flat.kind.reduce.itemsize for flat in flats if flat.kind.trainable), reverse=True)
    # Of a world of one gradients go where they rest, unless they are cast, or looked at before.
    alone = (
        flats[0].layout.world == 1
        and policy.precision.loss_scale is None
        and all(flat.kind.tiers.gradient is Tier.DEVICE and flat.kind.reduce == flat.kind.master for flat in flats)
    )
    flying = 1 if flats[0].layout.world == 1 else 1 + policy.schedule.max_reductions
    under_way = 0 if alone else sum(sums if whole_sums else sums[:flying])
    return sum(map(_resting, flats)) + sum(gathered[: 1 + policy.schedule.prefetch]) + under_way


def _resting(flat: Flat) -> int:
    """Bytes of a flat's parameters, masters and gradient that rest on the device."""
    kind, resting = flat.kind, 0
    if flat.ownership.resident:
        resting += flat.full_nbytes
    elif kind.tiers.parameter is Tier.DEVICE:
        resting += flat.shard_numel * (kind.compute if kind.apart else kind.master).itemsize
    masters_apart = kind.apart or (flat.ownership.resident and not flat.aliased)
    if masters_apart and (not kind.apart or kind.tiers.optimizer is Tier.DEVICE):
        resting += flat.shard_numel * kind.master.itemsize
    if kind.trainable and kind.tiers.gradient is Tier.DEVICE:
        resting += flat.shard_numel * kind.master.itemsize
    return resting


# What an optimizer keeps.


def state_nbytes(optimizer: Optimizer, flats: Sequence[Flat], *, wide: bool = False) -> tuple[int, bool]:
    """Bytes of this rank's states on the device, those it has and those it will make, and whether the latter could be foreseen;
    see Note [States ahead].

    Args:
        wide: bf16 parameters are updated in fp32 and have states in it.
    """
    numels = {id(param): numel for flat in flats for param, numel in _on_device(flat)}
    held, coming = 0, list[tuple[_Place, int]]()
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            numel = numels.get(id(param), 0)
            states = optimizer.state.get(param) if numel else None
            if states:
                held += numel * _itemsize(states, param.shape)
            elif numel:
                dtype = torch.float32 if wide and param.dtype is torch.bfloat16 else param.dtype
                coming.append(((number, dtype, param.dim()), numel))
    made = _made(optimizer, {place for place, _ in coming})
    return held + sum(made[place] * numel for place, numel in coming if made is not None), made is not None


def _on_device(flat: Flat) -> Iterator[tuple[nn.Parameter, int]]:
    """Trainable parameters whose states rest on the device, and the elements of each that this rank owns."""
    if flat.kind.trainable and flat.kind.tiers.optimizer is Tier.DEVICE:
        for index, param in enumerate(flat.params):
            yield param, flat.span(index)[1]


def _itemsize(states: Any, shape: torch.Size) -> int:
    """Bytes of state for each element of a parameter of ``shape``."""
    values = states.values() if isinstance(states, dict) else ()
    return sum(value.dtype.itemsize for value in values if isinstance(value, Tensor) and value.dim() and value.shape == shape)


def _made(optimizer: Optimizer, places: set[_Place]) -> dict[_Place, int] | None:
    """Bytes of state an element that a first step of this optimizer makes for parameters of each kind."""
    if not places:
        return {}
    params = {place: nn.Parameter(torch.zeros((3,) * max(1, place[2]), dtype=place[1])) for place in places}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [param for place, param in params.items() if place[0] == number]
        if mine:
            options = {key: _on_cpu(value) for key, value in group.items() if key not in ("params", "param_names")}
            # It asks for a device to capture on.
            groups.append({**options, **({"capturable": False} if "capturable" in options else {}), "params": mine})
    kind: Any = type(optimizer)
    # Whatever it raises, it is another's code that was not made for this.
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.no_grad():
            warnings.simplefilter("ignore")
            named = inspect.signature(kind.__init__).parameters
            stand_in = kind(groups, **{key: _on_cpu(value) for key, value in optimizer.defaults.items() if key in named})
            for param in params.values():
                param.grad = torch.ones_like(param)
            step = kind.step
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(stand_in)
            return {place: _itemsize(stand_in.state.get(param), param.shape) for place, param in params.items()}
    except Exception:
        return None


def _on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
