"""``[optimizer] kernel = "numba"``: Adam, AdamW, SGD and Lion updated by our own kernels, one pass over each flat's range.

``tiered_update.py`` calls ``update`` for one flat at a time, with everything in host memory.  Groups, schedulers and state
dicts of the optimizer stay what torch makes them; an optimizer or an option the kernels lack is refused by name.  It never
falls back to another kernel by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload import kernels
from offload.errors import ShardedOpError
from offload.kernels import Noise
from offload.pages import aligned
from offload.store import Mode
from zhooks.optim.kernel import Arguments, FlatUpdate, grad_of
from zhooks.optim.rounding import Rounding
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["NumbaKernel"]


class Rule(Protocol):
    """How one kind of optimizer is updated."""

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states a parameter of the group has, shaped like it."""

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        """The numbers of one parameter's step, counters moved on; equal for parameters that may share a pass."""

    def run(self, how: object, master: Tensor, grad: Tensor, states: Sequence[Tensor], more: Any) -> None:
        """One pass; ``more``: the kernels' ``copy``, ``scale`` and ``noise``."""


class AdamRule:
    """torch.optim.Adam and AdamW."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["step"] += 1
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return kernels.Adam(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self._decoupled or bool(group.get("decoupled_weight_decay", False)),
            step=int(state["step"]),
            maximize=bool(group["maximize"]),
        )

    def run(self, how: object, master: Tensor, grad: Tensor, states: Sequence[Tensor], more: Any) -> None:
        assert isinstance(how, kernels.Adam)
        kernels.adam(how, master, grad, states[0], states[1], **more)


class SgdRule:
    """torch.optim.SGD; a momentum buffer that does not exist yet takes the first gradient."""

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        return kernels.Sgd(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            first=bool(group["momentum"]) and state.get("momentum_buffer") is None,
        )

    def run(self, how: object, master: Tensor, grad: Tensor, states: Sequence[Tensor], more: Any) -> None:
        assert isinstance(how, kernels.Sgd)
        kernels.sgd(how, master, grad, states[0] if states else None, **more)


class LionRule:
    """Lion as its authors published it: groups with lr, betas and weight_decay, one state exp_avg."""

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return kernels.Lion(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))

    def run(self, how: object, master: Tensor, grad: Tensor, states: Sequence[Tensor], more: Any) -> None:
        assert isinstance(how, kernels.Lion)
        kernels.lion(how, master, grad, states[0], **more)


_UNSUPPORTED = {"amsgrad": False, "differentiable": False, "capturable": False}


def rule_for(optimizer: Optimizer) -> Rule:
    """The kernels' rule for an optimizer.

    Raises:
        ShardedOpError: there is none, or the optimizer uses an option the kernels lack.
    """
    kind: Any = type(optimizer)
    rules: dict[Any, Rule] = {
        torch.optim.Adam: AdamRule(decoupled=False),
        torch.optim.AdamW: AdamRule(decoupled=True),
        torch.optim.SGD: SgdRule(),
    }
    rule = rules.get(kind)
    if rule is None and kind.__name__ == "Lion" and all({"betas", "weight_decay"} <= g.keys() for g in optimizer.param_groups):
        rule = LionRule()
    if rule is None:
        raise _refused(optimizer, "")
    for group in optimizer.param_groups:
        for option, plain in _UNSUPPORTED.items():
            if group.get(option, plain) != plain:
                raise _refused(optimizer, f" with {option}={group[option]}")
    return rule


def _refused(optimizer: Optimizer, found: str) -> ShardedOpError:
    return ShardedOpError(
        f'[optimizer] kernel = "numba" needs Adam, AdamW, SGD or Lion with plain options, found '
        f'{type(optimizer).__name__}{found}. Use kernel = "torch".'
    )


@dataclass(slots=True)
class Run:
    """Neighbouring ranges that one pass covers: the numbers, and the first and the whole of each tensor."""

    how: object
    tensors: list[Tensor]
    numel: int
    last: int
    noise: Noise | None = None

    def takes(self, number: int, how: object, tensors: Sequence[Tensor]) -> bool:
        """The next parameter's ranges follow in the same memory, at the same distance everywhere."""
        if self.noise is not None or number != self.last + 1 or how != self.how or len(tensors) != len(self.tensors):
            return False
        gaps = {mine_to_next(mine, new) for mine, new in zip(self.tensors, tensors, strict=True)}
        if len(gaps) != 1:
            return False
        gap = gaps.pop()
        if gap is None or gap < self.numel:
            return False
        self.numel, self.last = gap + tensors[0].numel(), number
        return True

    def whole(self) -> list[Tensor]:
        return [tensor.as_strided((self.numel,), (1,)) for tensor in self.tensors]


def mine_to_next(mine: Tensor, new: Tensor) -> int | None:
    """Elements from the start of one range to the start of another in the same storage; None across storages."""
    if mine.untyped_storage()._cdata != new.untyped_storage()._cdata or mine.dtype != new.dtype:
        return None
    return int(new.storage_offset()) - int(mine.storage_offset())


class NumbaKernel:
    """One pass over a flat's range where its parameters share a group and a step, else one a run of neighbours."""

    def __init__(self, rounding: Rounding | None = None) -> None:
        self._rounding = rounding

    def writes_copy(self, flat: Flat) -> bool:
        return flat.storage.copy is not None and not self._rounds(flat)

    def apart(self, optimizer: Optimizer) -> bool:
        return True

    def check(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        flat = update.flat
        rule_for(optimizer)
        if arguments.given:
            raise ShardedOpError(
                f'[optimizer] kernel = "numba" needs {type(optimizer).__name__}.step() without arguments, which its kernel '
                f'does not support, found {", ".join(arguments.given)}. Use kernel = "torch".'
            )
        if flat.kind.master is not torch.float32 and not self._rounds(flat):
            raise ShardedOpError(
                f'[optimizer] kernel = "numba" needs fp32 parameters, found {flat.kind.master} in unit {flat.name}. Use '
                'kernel = "torch", keep the parameters in fp32 and set [precision] param, or set rounding = "stochastic".'
            )
    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        # Before any counter moves: a step that is refused has not happened.
        self.check(optimizer, update, arguments)
        rule, flat = rule_for(optimizer), update.flat
        scale = _left_to_the_kernel(optimizer)
        copy = flat.storage.copy if self.writes_copy(flat) else None
        target = None if copy is None else copy.tensor(Mode.WRITE_ALL)
        runs = [] if scale is None else self._runs(rule, optimizer, update, target)
        if copy is not None and target is not None:
            _cast_between(runs, flat.storage.open(), target)
            copy.touch()
        for run in runs:
            master, grad, *states = run.whole()
            kept, rounded = (states, None) if target is None else (states[:-1], states[-1])
            rule.run(run.how, master, grad, kept, {"copy": rounded, "scale": scale, "noise": run.noise})

    def _runs(self, rule: Rule, optimizer: Optimizer, update: FlatUpdate, copy: Tensor | None) -> list[Run]:
        flat = update.flat
        index = {id(param): number for number, param in enumerate(flat.params)}
        members = [
            (index[id(param)], param, group)
            for group, params in zip(optimizer.param_groups, update.groups, strict=True)
            for param in params
        ]
        runs: list[Run] = []
        made: dict[str, Tensor] = {}
        written: list[ShardedTensor] = []
        for number, param, group in sorted(members, key=lambda member: member[0]):
            grad = grad_of(param)
            if grad is None:
                continue
            assert isinstance(grad, ShardedTensor)
            state = optimizer.state[param]
            how = rule.begin(group, state)
            kept = [_state(state, key, flat, number, made) for key in rule.states(group)]
            sharded: Any = param
            tensors = [sharded._local, grad._local, *(tensor._local for tensor in kept)]
            tensors += [] if copy is None else [flat.local(number, copy)]
            written += [sharded, *kept]
            if not tensors[0].numel():
                continue
            if self._rounds(flat):
                runs += self._noisy(flat, number, how, tensors)
            elif not (runs and runs[-1].takes(number, how, tensors)):
                runs.append(Run(how, tensors, tensors[0].numel(), number))
        for tensor in written:
            tensor._written()
        return runs

    def _rounds(self, flat: Flat) -> bool:
        """The masters are bf16, and updates of them are rounded stochastically."""
        return self._rounding is not None and flat.kind.master is torch.bfloat16

    def _noisy(self, flat: Flat, number: int, how: object, tensors: Sequence[Tensor]) -> Iterator[Run]:
        """One pass a run of the parameter: noise goes by the place in it."""
        assert self._rounding is not None
        for at, noise in self._rounding.over(flat, number):
            yield Run(how, [tensor[at] for tensor in tensors], at.stop - at.start, number, noise)


def _cast_between(runs: Sequence[Run], master: Tensor, copy: Tensor) -> None:
    """What no run will write of the copy: parameters without a gradient, of other optimizers, and padding."""
    last, ends = 0, copy.numel()
    ranges = [(int(run.tensors[-1].storage_offset() - copy.storage_offset()), run.numel) for run in runs]
    for start, numel in [*sorted(ranges), (ends, 0)]:
        if last < start:
            copy[last:start].copy_(master[last:start])
        last = max(last, start + numel)


def _left_to_the_kernel(optimizer: Any) -> float | None:
    """What a GradScaler leaves to optimizers with fused=True: the factor that unscales; None where the step is skipped."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and float(found):
        return None
    return 1.0 if scale is None else 1.0 / float(scale)


def _state(state: dict[str, Any], key: str, flat: Flat, number: int, made: dict[str, Tensor]) -> ShardedTensor:
    """A parameter's state; new ones of a flat lie side by side, so that one pass can cover them."""
    held = state.get(key)
    if isinstance(held, ShardedTensor) and held.dtype is torch.bfloat16:
        # A state dict that torch loaded has the parameter's dtype.
        held = state[key] = ShardedTensor(held._local.float(), held._spec, device=flat.kind.device)
    if held is None:
        if key not in made:
            # Pages of its own: they go back to the system when the states have moved to their tier.
            made[key] = aligned(4 * flat.shard_numel).view(torch.float32)
        held = state[key] = ShardedTensor(flat.local(number, made[key]), flat.specs[number], device=flat.kind.device)
    assert isinstance(held, ShardedTensor)
    return held
