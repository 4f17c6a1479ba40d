"""Where an inf or a nan came up first: on which rank, and whether in a parameter, in what a unit made, or in a gradient.

Note: [Judged at the step]
    A gradient that is not finite is nothing wrong as long as nobody steps with it: a scaler skips the step.  So ranks agree at
    the end of backward that there was one, in the exchange that backward ends with, and look at gradients themselves only when
    an optimizer is about to use them.  Nothing is read back from the device before backward is over.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offload.errors import NonFiniteError
from offload.policy import Policy
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import flats_of, part_of
from zhooks.optim import Step, Steps, params_of
from zhooks.run import Runtime
from zhooks.tensor import overflowed
from zhooks.unit import Unit

__all__ = ["NonFinite"]

#: Values whose flags are remembered: those of many forwards between two steps.
_KEPT = 1 << 14


class NonFinite:
    """[resilience] nonfinite, for one attachment.

    Args:
        units: those of the attachment, as they are laid out now.
        virtual: tensors have no values that could be looked at.
    """

    waited_for = True

    def __init__(self, comm: Comm, units: Sequence[Unit], runtime: Runtime, steps: Steps, *, virtual: bool) -> None:
        self._virtual = virtual
        self._comm, self._units, self._runtime, self._steps = comm, units, runtime, steps
        # What was made and sent since gradients were last agreed on: where, and its sum.
        self._made: deque[tuple[str, Tensor]] = deque(maxlen=_KEPT)
        self._sent: deque[tuple[str, Tensor]] = deque(maxlen=_KEPT)
        # Some rank's gradient was not finite, and gradients have not been found finite since; where it came up here.
        self._bad, self._fresh, self._origin = False, False, {"made": "", "sent": ""}
        self._hooks: RemovableHandle | None = None

    def open(self, policy: Policy) -> None:
        """Look where the policy says so, from now on or, between steps, instead of where another one did."""
        self._look(policy.resilience.nonfinite == "name" and not self._virtual)

    def close(self) -> None:
        self._look(False)

    def _look(self, now: bool) -> None:
        if now is (self._hooks is not None):
            return
        reducer = self._runtime.reducer
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = self._runtime.given = self._runtime.made = None
            reducer.riders.remove(self)
            self.forget()
            return
        self._hooks = reducer.hooks.register(self._sending, None)
        self._runtime.given, self._runtime.made = self.given, self.made
        reducer.riders.append(self)

    # What passes by.

    def given(self, value: Any) -> None:
        """A forward begins, with these arguments."""
        if self._fresh:
            self._made.clear()
            self._sent.clear()
            self._fresh = False
        self._note(self._made, "the model's input", value)

    def made(self, unit: str, value: Any) -> None:
        """A module that ``unit`` is entered through has made this."""
        self._note(self._made, f"the output of unit {unit}", value)

    def _sending(self, name: str, partial: Tensor) -> None:
        self._note(self._sent, f"the gradient of {name}", partial)

    @torch.no_grad()
    def _note(self, into: deque[tuple[str, Tensor]], where: str, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() and leaf.itemsize > 1:
                # The fastest pass there is, without memory.  An inf or a nan always shows in a sum; finite values whose sum
                # overflows look like one, and are found finite at the step.
                values = part_of(leaf).detach()
                into.append((where, values.sum(dtype=torch.promote_types(values.dtype, torch.float32))))

    # Riding with the end of backward: see ``Rider`` in grad/reduce.py.

    def board(self) -> Sequence[int]:
        """Whether a gradient of this rank alone was not finite."""
        return (int(bool(_first(self._sent))),)

    def arrive(self, largest: Sequence[int]) -> None:
        self._fresh = True
        if not largest[0] or self._bad:
            return
        self._bad = True
        self._origin = {"made": _first(self._made), "sent": _first(self._sent)}

    def forget(self) -> None:
        self._bad = self._fresh = False
        self._made.clear()
        self._sent.clear()

    # Steps.

    def before(self, step: Step) -> None:
        """Judge the gradients that the step is to use; where it has a closure, after its first call.

        Raises:
            NonFiniteError: the step would use gradients that are not finite; on every rank, and nothing has been updated.
        """
        optimizer, closure = step.optimizer, step.closure
        if self._hooks is None:
            return
        if self._runtime.scaling.on or getattr(optimizer, "found_inf", None) is not None:
            self._runtime.due()
        elif closure is None:
            self._judge(optimizer, "Nothing has been updated")
        else:
            ended = f"{type(optimizer).__name__}.step has ended after its first call of the closure"
            step.call_with(JudgedClosure(closure, partial(self._judge, optimizer, ended)))

    def _judge(self, optimizer: Optimizer, outcome: str) -> None:
        """Raise where this optimizer would use gradients that are not finite.  Collective where there may be some."""
        self._runtime.due()
        if not self._suspected():
            return
        if self._anywhere(_unusable(params_of(optimizer))):
            if not self._bad:
                # It was another rank's.
                self._origin = {"made": "", "sent": ""}
            self._bad = self._bad or not self._runtime.reducer.replicas.jobs
            raise NonFiniteError(self._words(type(optimizer).__name__, outcome))
        # Those of parameters that another optimizer steps may be what is not finite.
        mine = [param for flat in flats_of(self._units) for param in flat.params]
        self._bad = self._anywhere(_unusable(mine))

    def _suspected(self) -> bool:
        """Ranks that divide layers between them have agreed with those alone that have the same part: collective over tp.

        What replicas that are jobs of their own have sent shows in the mean alone, in all of them.
        """
        if self._runtime.reducer.replicas.jobs:
            return True
        return self._anywhere(self._bad) if self._comm.tp.axis.world > 1 else self._bad

    def _anywhere(self, here: bool) -> bool:
        return any(ControlPlane(self._comm.stage, "finite gradients").any([here]))

    def _words(self, name: str, outcome: str) -> str:
        """What happened, the same on every rank.  Collective."""
        ranks = ControlPlane(self._comm.stage, "finite gradients", "")
        mine = {"rank": self._comm.stage.axis.ranks[ranks.rank], "update": self._update(), **self._origin}
        said = [json.loads(raw) for raw in ranks.texts(json.dumps(mine), first_only=True)]
        words: str = ranks.on_first(lambda: _story(said, outcome, self._runtime.reducer.replicas.jobs) if said else "")
        return f"{name}.step in step {self._steps.number} {words}"

    def _update(self) -> str:
        """The first parameter of this rank's ranges that is not finite already."""
        for unit in self._units:
            for flat in unit.flats:
                if flat.kind.master.is_floating_point and flat.shard_numel and not torch.isfinite(flat.shard).all():
                    shard = flat.shard
                    bad = [index for index in range(len(flat.specs)) if not torch.isfinite(flat.local(index, shard)).all()]
                    return f"{flat.specs[bad[0]].name} of unit {unit.name}" if bad else unit.name
        return ""


class JudgedClosure:
    """A closure whose gradients are judged once: the first call comes before any update, later ones are an optimizer's trials
    (a line search), which may overflow."""

    def __init__(self, closure: Callable[[], Any], judge: Callable[[], None]) -> None:
        self._closure, self._judge = closure, judge
        self._judged = False

    def __call__(self) -> Any:
        value = self._closure()
        if not self._judged:
            self._judged = True
            self._judge()
        return value


def _unusable(params: Iterable[Tensor]) -> bool:
    """Some gradient of these is not finite on this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(overflowed([param.grad for param in params], "cpu").any().item())


def _first(noted: deque[tuple[str, Tensor]]) -> str:
    """Where the first of these is that is not finite, and "" where all are."""
    if not noted:
        return ""
    device = noted[0][1].device
    finite = torch.isfinite(torch.stack([value.double().to(device) for _, value in noted])).tolist()
    return next((where for (where, _), fine in zip(noted, finite, strict=True) if not fine), "")


def _story(said: Sequence[dict[str, Any]], outcome: str, jobs: bool) -> str:
    """From what each rank found, and what became of the step, to one sentence."""
    sent = [one for one in said if one["sent"]]
    local = ", ".join(f"rank {one['rank']} ({one['sent']})" for one in sent) or "no rank"
    updated = next((one for one in said if one["update"]), None)
    made = next((one for one in sent if one["made"]), None)
    if updated is not None:
        origin = (
            f"a parameter has not been finite since the previous update, or since it was loaded: {updated['update']}, on "
            f"rank {updated['rank']}"
        )
        advice = "Load the last checkpoint and lower the learning rate"
    elif made is not None:
        origin = f"the first appeared in forward, in {made['made']} on rank {made['rank']}"
        advice = f"Look at the batch of rank {made['rank']}"
    elif sent:
        origin = f"the first appeared in backward, in {sent[0]['sent']} on rank {sent[0]['rank']}"
        advice = f"Look at the batch and the loss of rank {sent[0]['rank']}"
    elif jobs:
        origin, advice = "the gradients of each rank were finite: it came from another replica", "Look at that replica's error"
    else:
        origin = "the gradients of each rank were finite: their sum is not, or it was changed afterwards"
        advice = "Lower the loss"
    return (
        f"expected finite gradients, found an inf or a nan; {origin}. Not finite before the mean over the ranks: {local}. "
        f'{advice}. {outcome}: skip the step with zero_grad(), or set [resilience] nonfinite = "ignore".'
    )
