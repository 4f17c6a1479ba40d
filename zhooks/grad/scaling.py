"""``[precision] loss_scale``: gradients are scaled inside the model, true outside, and a step that overflowed is skipped.

``run/hooks.py`` passes it what enters and leaves the model, ``reduce.py`` what has been reduced, and torch's step hooks every
optimizer's step; the loop is an ordinary one.  With no loss scale it only remembers what a GradScaler found.

Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2; hysteresis as DeepSpeed has it.

Note: [When the scale changes]
    It backs off when the overflow is known, at the end of backward, once a step; it grows in the step that completes the
    interval, at the first optimizer that makes it.  After each step the scale is that of torch.amp.GradScaler (with
    hysteresis, DeepSpeed's).  An optimizer's step is skipped where a gradient it holds has overflowed: its groups are
    empty copies for the length of the call, so that it finds nothing and its counters stay, while a scheduler sees it called.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from offload.errors import CheckpointError, ScaleError, ShardedOpError
from offload.events import Bus
from offload.policy import Precision
from zhooks.comm import CONTROL, Call, Comm
from zhooks.grad.grad_buffer import GradBuffer
from zhooks.grad.scaled_graph import Boundary, each, prove
from zhooks.layout import SHARD, TP
from zhooks.refusals import too_old
from zhooks.tensor import Engine, Name, Overflows, ShardedTensor, ShardGroup, overflowed
from zhooks.unit import Flat

__all__ = ["LossScale", "Scaling"]

#: What the scale is called in a checkpoint.
_STATE = "loss_scale"

_REENTRANT: Any = CheckpointFunction._backward_cls

#: A rank that has several stages of a pipeline asks the others once for all of them.
_open: weakref.WeakSet[Scaling] = weakref.WeakSet()
_numbers = count()


class LossScale:
    """The scale and its counters: numbers in, a number out."""

    def __init__(self, precision: Precision) -> None:
        self.rules = precision
        given = precision.loss_scale
        self.value = float(precision.initial_scale if given is None or given == "dynamic" else given)
        self.good_steps, self.overflows_left = 0, precision.hysteresis

    @property
    def dynamic(self) -> bool:
        return self.rules.loss_scale == "dynamic"

    def overflowed(self) -> bool:
        """A step overflowed; False where the scale should go down and is at its minimum."""
        self.good_steps = 0
        if not self.dynamic:
            return True
        self.overflows_left -= 1
        if self.overflows_left > 0:
            return True
        self.overflows_left = 1
        before, self.value = self.value, max(self.value * self.rules.backoff_factor, self.rules.min_scale)
        return before > self.rules.min_scale

    def succeeded(self) -> None:
        """A step was made."""
        if not self.dynamic:
            return
        self.good_steps += 1
        if self.good_steps >= self.rules.growth_interval:
            grown = self.value * self.rules.growth_factor
            self.value = grown if grown <= torch.finfo(torch.float32).max else self.value
            self.good_steps, self.overflows_left = 0, self.rules.hysteresis

    def follow(self, precision: Precision) -> None:
        """Other rules; the scale goes on from where it is, unless it is given as a number or scaling was not on."""
        if self.rules.loss_scale is None or precision.loss_scale != "dynamic":
            self.value = LossScale(precision).value
        self.rules = precision
        self.overflows_left = min(self.overflows_left, precision.hysteresis)


class Scaling:
    """The loss scale of one attachment, and its memory of overflows."""

    def __init__(self, comm: Comm, bus: Bus, precision: Precision, engine: Engine) -> None:
        self.comm, self.bus = comm, bus
        self._engine = engine
        self.scale, self.overflows = LossScale(precision), Overflows(bus)
        self._number = next(_numbers)
        self._gradients: tuple[GradBuffer, ...] = ()
        self._flats: list[Flat] = []
        self._found: dict[int, Tensor] = {}
        self._bad: dict[int, Name] = {}
        self._proved: set[int] = set()
        # Since the last step: gradients have landed, some overflowed, the other stages have been asked.
        self._fresh, self._lost, self._asked = False, False, False
        # What the stages have told each other's GradScalers.
        self._elsewhere = False

    @property
    def on(self) -> bool:
        """The policy sets a loss scale."""
        return self.scale.rules.loss_scale is not None

    def open(self) -> None:
        """Steps are called around from now on."""
        _open.add(self)

    def close(self) -> None:
        _open.discard(self)
        # Kept graphs and tensors refer to this, and must not keep the attachment.
        self._engine, self._gradients = Engine(), ()

    # What enters and leaves the model.

    def inward(self, value: Any) -> Any:
        """The outermost forward's arguments: gradients that leave through them are true."""
        return each(value, lambda tensor: self._cross(tensor, inward=False, dtype=None)) if self.on else value

    def outward(self, value: Any) -> Any:
        """The outermost forward's outputs, fp16 ones in fp32: gradients that enter through them become scaled."""
        if not self.on:
            return value

        def leave(tensor: Tensor) -> Tensor:
            return self._cross(tensor, inward=True, dtype=torch.float32 if tensor.dtype is torch.float16 else None)

        return each(value, leave)

    def outside(self, view: Tensor) -> Tensor:
        """A parameter's value, used now; outside of any forward its gradients become scaled as those of outputs."""
        if not self.on or not view.requires_grad or not self._engine.outermost:
            return view
        if isinstance(torch._C._current_autograd_node(), _REENTRANT):
            raise ScaleError(
                "[precision] loss_scale needs parameters to be used in their own modules, found one used in a function "
                "under reentrant checkpointing, where it is unknown whether gradients are scaled. Pass use_reentrant=False."
            )
        return self._cross(view, inward=True, dtype=None)

    def _cross(self, tensor: Tensor, *, inward: bool, dtype: torch.dtype | None) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor if dtype is None else tensor.to(dtype)
        crossed: Tensor = Boundary.apply(self, inward, dtype, tensor)  # type: ignore[no-untyped-call]
        return crossed

    def crossed(self, inward: bool) -> float:
        """A gradient crosses a boundary, into the model or out of it: the factor it is multiplied by."""
        task = torch._C._current_graph_task_id()
        if task not in self._proved:
            if self not in _open:
                raise too_old("backward")
            self._proved.add(task)
            prove(self)
        return self.scale.value if inward else 1.0 / self.scale.value

    def arrived(self) -> None:
        """Gradients, scaled, have reached parameters: not before a boundary was crossed."""
        if not self._proved:
            prove(self)

    # What has been reduced.

    def watch(self, gradients: Iterable[GradBuffer]) -> None:
        """These are reduced, in an order all ranks share."""
        self._gradients = tuple(gradients)
        self._flats = [gradient.flat for gradient in self._gradients]
        self._found, self._bad = {}, {}

    def mean(self, gradient: GradBuffer, out: Tensor, world: int) -> Tensor:
        """``out`` divided by the ranks (where ``world`` says so) and by the scale; what is not finite is remembered."""
        if out.dtype is torch.float16:
            out = out.float()
        number = gradient.flat.number
        found = self._found.get(number)
        if found is None:
            with gradient.context.taking():
                found = self._found[number] = torch.empty(1, dtype=torch.float32, device=out.device)
            found.zero_()
        factor = torch.full((), 1.0 / (world * self.scale.value), dtype=torch.float32, device=out.device)
        torch._amp_foreach_non_finite_check_and_unscale_([out], found, factor)
        return out

    def backward_over(self, landed: bool) -> None:
        """A backward is over, and has reduced gradients or not.  Collective over the stage's ranks where it has.

        Raises:
            ScaleError: it overflowed with the scale at its minimum.
        """
        self._proved.clear()
        if not landed:
            return
        self.overflows.landed()
        self._asked = False
        if not self.on:
            return
        if not self._fresh:
            self._lost = False
        self._fresh = True
        flagged = self._flagged()
        self._bad = self._named(flagged) if flagged else {}
        if self._bad:
            self.overflows.note(self.scale.value, self._bad.values())
            self._lose()

    def _flagged(self) -> list[Flat]:
        """Flats in which something overflowed now, or had overflowed and may have been cleared since."""
        if not self._flats:
            return []
        device = self._flats[0].kind.device
        none = torch.zeros(1, dtype=torch.float32, device=device)
        flags = torch.cat([self._found.get(flat.number, none) for flat in self._flats])
        self._found.clear()
        self._all_reduce("all units", flags)
        before = {flat.number for flat in self._flats if any(id(param) in self._bad for param in flat.params)}
        return [flat for flat, flag in zip(self._flats, flags.tolist(), strict=True) if flag or flat.number in before]

    def _named(self, flats: Sequence[Flat]) -> dict[int, Name]:
        """The parameters of these flats whose gradients, as they are now, are not finite on some rank."""
        params = [(flat.name, spec.name, param) for flat in flats for spec, param in zip(flat.specs, flat.params, strict=True)]
        with torch._C.DisableTorchFunctionSubclass():
            flags = overflowed([param.grad for _, _, param in params], flats[0].kind.device)
        self._all_reduce("parameters", flags)
        return {id(param): (unit, name) for (unit, name, param), flag in zip(params, flags.tolist(), strict=True) if flag}

    def _all_reduce(self, what: str, flags: Tensor) -> None:
        self.comm.stage.all_reduce(Call(CONTROL, "loss scale", what), flags, "max")

    def forget(self) -> None:
        """What was reduced since the last step is dropped: as if no backward had been."""
        self._fresh = self._lost = self._asked = False
        self._bad = {}
        self._found.clear()

    def _lose(self) -> None:
        """This step is lost; the scale backs off once for it."""
        if self._lost:
            return
        self._lost = True
        before = self.scale.value
        possible = self.scale.overflowed()
        self._changed(before)
        if not possible:
            latest = self.overflows.latest
            names = latest[-1].parameters if latest and latest[-1].step == self.overflows.step else ()
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            where = f"{names[0][1]} of unit {names[0][0]}{more}" if names else "another stage"
            raise ScaleError(
                f"[precision] loss_scale needs gradients that are finite at min_scale, {self.scale.rules.min_scale:g}, "
                f"found an overflow in step {self.overflows.step} in {where}. Look for a loss or a layer that overflows by "
                'itself, lower the learning rate, or set param = "bf16"; this step is skipped, and training can continue.'
            )

    def _changed(self, before: float) -> None:
        if self.scale.value != before:
            # Sums that are still held back are scaled as they came.
            for gradient in self._gradients:
                if gradient.partial is not None:
                    gradient.partial.mul_(self.scale.value / before)
            if self.bus.active:
                self.bus.instant("loss scale", f"{self.scale.value:g}")

    # Steps.

    def before_step(self, optimizer: Optimizer, closure: object) -> list[Callable[[], None]]:
        """Skip a step of parameters of the model whose gradients have overflowed; what gives the optimizer its groups back.

        Raises:
            ShardedOpError: a closure, whose backward would come too late to skip the step.
            ScaleError: a GradScaler scales too, or another stage overflowed with the scale at its minimum.
        """
        if not self.on:
            return []
        if closure is not None:
            raise ShardedOpError(
                f"{type(optimizer).__name__}.step(closure) expected a step without a closure, because [precision] loss_scale "
                "skips steps that overflowed; found one. Call the closure yourself, then step()."
            )
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            self.scaler_comes()
        self._engine.due()
        self._ask_other_stages()
        self.overflows.used()
        with torch._C.DisableTorchFunctionSubclass():
            held = [param for group in optimizer.param_groups for param in group["params"]]
            lost = any(id(param) in self._bad and param.grad is not None for param in held)
        hidden: list[Callable[[], None]] = []
        if lost or (self._lost and not self._bad):
            hidden.append(_leave_nothing(optimizer))
        elif self._fresh and not self._lost:
            before = self.scale.value
            self.scale.succeeded()
            self._changed(before)
        self._fresh = False
        return hidden

    def is_mine(self, param: object) -> bool:
        """It is a parameter of this attachment."""
        return isinstance(param, ShardedTensor) and getattr(param.local_shard.spec.group, "watch", None) is self

    def _ask_other_stages(self) -> None:
        """Pipeline stages end their backwards at different times; before a step all have.  Collective over them."""
        if self.comm.pp.axis.world == 1 or self._asked or not self._fresh:
            return
        mine = [stage for stage in self._unasked() if stage._fresh]
        for stage in mine:
            stage._engine.due()
        device = self._flats[0].kind.device if self._flats else "cpu"
        lost = self._any_stage(
            "loss scale", torch.tensor([float(any(stage._lost for stage in mine))], dtype=torch.float32, device=device)
        )
        with ExitStack() as all_of_them:  # each, also where one has no smaller scale to go on with
            for stage in mine:
                stage._asked = True
                if lost:
                    all_of_them.callback(stage._lose)

    def _unasked(self) -> list[Scaling]:
        """This and the other stages of this rank whose gradients the ranks of the pipeline have not been asked about."""
        return [stage for stage in self._beside() if not stage._asked and stage.on is self.on]

    def _beside(self) -> list[Scaling]:
        """All stages of this rank in one pipeline, in the order they were attached in, which is every rank's."""
        ranks = self.comm.pp.axis.ranks
        return sorted((stage for stage in _open if stage.comm.pp.axis.ranks == ranks), key=lambda stage: stage._number)

    def _any_stage(self, what: str, flag: Tensor) -> bool:
        """Whether ``flag`` [1] is set on any stage.  Collective over them, by the way of the stage attached last."""
        self._beside()[-1].comm.pp.all_reduce(Call(CONTROL, what, "all stages"), flag, "max")
        return bool(flag.item())

    # torch.amp.GradScaler.

    def scaler_comes(self) -> None:
        """See ``tensor.Watch``."""
        if self.on:
            raise ScaleError(
                "Gradients are scaled twice. Expected either torch.amp.GradScaler or [precision] loss_scale, found both, so "
                "that gradients are unscaled already. Unset loss_scale, or train without the scaler."
            )

    def ask_stages(self, found: Tensor) -> None:
        """See ``tensor.Watch``.  Collective over the stages, once after each backward.

        They differ in how often a scaler unscales: once for each device and dtype of gradients, and for each optimizer.
        So the first time all gradients of this rank's stages are looked at, and later ones are told what all said then.
        """
        if self.comm.pp.axis.world == 1:
            return
        if not self._asked:
            mine = self._unasked()
            with torch._C.DisableTorchFunctionSubclass():
                grads = [param.grad for stage in mine for flat in stage._flats for param in flat.params]
                flag = overflowed(grads, found.device).sum().reshape(1)
            self._all_reduce("all units", flag)
            lost = self._any_stage("GradScaler", flag)
            for stage in mine:
                stage._asked, stage._elsewhere = True, lost
        if self._elsewhere:
            found.fill_(1.0)

    def apart(self) -> list[ShardGroup]:
        """See ``tensor.Watch``."""
        found: dict[Any, ShardGroup] = {}
        for one in sorted(_open, key=lambda one: one._number):
            if one.comm.pp.axis.world > 1 and not one.comm.pipelined:
                for flat in one._flats:
                    found.setdefault(flat.group.ranks(), flat.group)
        return list(found.values())

    def unscaled(self, grads: Sequence[ShardedTensor], found: Tensor, inv_scale: Tensor) -> None:
        """See ``tensor.Watch``.  The number is read here, where the scaler would read it next."""
        self.overflows.used()
        if not found.item():
            return
        flags = overflowed(grads, found.device)
        grads[0].local_shard.spec.group.all_reduce(flags, "max", (SHARD, TP))
        specs = [grad.local_shard.spec for grad, flag in zip(grads, flags.tolist(), strict=True) if flag]
        names = [(str(getattr(spec.group, "name", "")), spec.name) for spec in specs]
        self.overflows.note(1.0 / float(inv_scale), names)

    # State.

    def change(self, precision: Precision) -> None:
        """Another policy, between steps."""
        before = self.scale.value
        self.scale.follow(precision)
        self._changed(before)

    def saved(self) -> dict[str, Any]:
        """The scale and its counters as plain data, under a name; nothing where nothing is scaled."""
        scale = self.scale
        numbers = {"scale": scale.value, "good_steps": scale.good_steps, "overflows_left": scale.overflows_left}
        return {_STATE: numbers} if self.on else {}

    def checked(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """How to go on with what ``saved()`` returned, once everything else is loaded.

        A scale that the policy gives as a number stays; where none was saved, so does the present one.
        Raises:
            CheckpointError: it is something else.
        """
        state = saved.get(_STATE)
        if state is None or not self.scale.dynamic:
            return lambda: None
        numbers = [state.get(key) for key in ("scale", "good_steps", "overflows_left")] if isinstance(state, Mapping) else []
        scale, good, left = numbers or (None, None, None)
        whole = type(good) is int and type(left) is int
        if type(scale) is not float or not 0 < scale <= torch.finfo(torch.float32).max or not whole:
            raise CheckpointError(
                f"load expected scale, good_steps and overflows_left as saved, found {state}. Load another checkpoint."
            )

        def follow() -> None:
            before, rules = self.scale.value, self.scale.rules
            self.scale.value, self.scale.good_steps = max(scale, rules.min_scale), max(0, good or 0)
            self.scale.overflows_left = min(max(1, left or 1), rules.hysteresis)
            self._changed(before)

        return follow


def _leave_nothing(optimizer: Any) -> Callable[[], None]:
    """Leave a step nothing to do and nothing to count; returns what puts everything back."""
    groups = optimizer.param_groups
    table, hooks, after = optimizer._optimizer_step_pre_hooks, None, optimizer._optimizer_step_post_hooks
    hooks = dict(table)

    def undo() -> None:
        optimizer.param_groups = groups
        table.update(hooks)
        optimizer._optimizer_step_post_hooks = after

    # The table itself: torch has begun to walk through it.
    table.clear()
    optimizer.param_groups = [{**group, "params": []} for group in groups]
    optimizer._optimizer_step_post_hooks = OrderedDict()
    return undo
