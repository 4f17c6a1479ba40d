"""The optimizers of one attachment: which there are, in an order that is the same on every rank.

Note: [Known on every rank]
    An optimizer becomes known on all ranks at once: at its first step, where it is compared over the ranks, or in a
    collective verb that is given it or finds it.  So its place in the order is the same everywhere, whatever addresses say.
    It is kept weakly, and when it dies is each rank's own affair (a cycle waits for the collector): whoever does something
    collective with the known ones asks ``agreed`` for those that are alive on every rank.

Note: [Met]
    ``Optimizer.load_state_dict`` puts a new ``state`` in place of the old one, ``add_param_group`` makes the list of groups
    longer.  So a step looks whether the optimizer still holds what it had when it was last met, and meets it again where it
    does not.  Of ``state`` only the identity is kept, for the old states shall go; another may come to have the same, so a hook
    of ``load_state_dict`` ends what was kept, too.  Updates in backward (``overlap.py``) go by the same record: they are right
    for an optimizer that has stepped with the states it holds.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.errors import CheckpointError, DivergenceError, ShardedOpError
from zhooks.comm import ControlPlane, Facts, Transport, text_digest
from zhooks.grad import in_backward
from zhooks.optim.groups import holders, params_of
from zhooks.optim.kernel import BY_RANGES
from zhooks.optim.owners import Owners
from zhooks.optim.states import OwnedStates, shard_vectors, tensors_in
from zhooks.tensor import ParamShard, ShardedTensor, ShardedVector

if TYPE_CHECKING:
    from zhooks.optim.step_pipeline import Step

__all__ = ["Optimizers", "about_state", "of_another_layout", "optimizer_facts", "partitions"]

_Held = tuple[nn.Parameter, ParamShard, str, Tensor]
"""A parameter, its description, and one state of it by name."""


@dataclass(slots=True, eq=False)
class Met:
    """What an optimizer held when it was last met, see Note [Met]: another one once its states are others.

    Attributes:
        state: the identity of its ``state``.
        groups: how many it had.
        stepped: it has begun a step with these states.
    """

    state: int
    groups: int = 0
    stepped: bool = False


class Optimizers:
    """The known optimizers of one attachment.

    Args:
        params: says which parameters are attached.
        stage: the ranks of the model.
        check: called before one is compared; refuses a model that cannot be stepped.
        admitted: called with each that becomes known.
    Attributes:
        owners: the parameters that they update whole.
    """

    def __init__(
        self,
        params: Callable[[], list[nn.Parameter]],
        stage: Transport,
        owners: Owners,
        check: Callable[[], None],
        admitted: Callable[[Optimizer], None],
    ) -> None:
        self._params, self._stage, self.owners, self._check, self._admitted = params, stage, owners, check, admitted
        self._order: list[weakref.ref[Optimizer]] = []
        #: Those first seen in a backward, with a number that stands for what they hold.
        self._unordered: list[tuple[int, weakref.ref[Optimizer]]] = []
        #: Of those that hold nothing of the model, too.
        self._met: weakref.WeakKeyDictionary[Optimizer, Met] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def open(self, known: Iterable[Optimizer]) -> None:
        """Those in ``known`` are known already."""
        for optimizer in known:
            self.admit(optimizer)

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._order.clear()
        self._unordered.clear()
        self._met.clear()

    # How one becomes known.

    def before(self, step: Step) -> None:
        """Every step.  Collective where the optimizer holds other things than it did, see Note [Met].

        Raises:
            CheckpointError: ranks hold different states; nothing has been updated.
            DivergenceError: ranks step other optimizers; nothing has been updated.
            CapabilityError: Accelerate was asked for mixed precision, which it leaves out for this model; or the package that
                updates whole parameters is not there.
            ShardedOpError: the optimizer partitions the parameters itself; nothing has been updated.
        """
        met = self.met(step.optimizer)
        if met is None or met.groups != len(step.optimizer.param_groups):
            self.meet(step.optimizer, "step")

    def meet(self, optimizer: Optimizer, verb: str) -> None:
        """Compare it over the ranks and make full tensors among its states ranges.  Collective.

        Raises:
            CheckpointError, DivergenceError, CapabilityError: as ``before``; nothing has been changed.
        """
        params = self._params()
        if not _places(optimizer, params):
            self._note(optimizer)
            return
        self._check()
        found, kind = self.owners.facts(optimizer), type(optimizer).__name__
        whole = self.whole(optimizer)
        met, held = self._met.get(optimizer), [one for one in self._held(optimizer) if id(one[0]) not in whole]
        for _, spec, key, value in held if type(optimizer) in BY_RANGES else ():
            if value.shape != spec.shape:
                raise CheckpointError(
                    f"{kind}.{verb} expected the state {key} of {spec.name} to have the parameter's shape {tuple(spec.shape)}, "
                    f"found {tuple(value.shape)}: states of another model were loaded. Load this model's."
                )
        # Ranks need not come to a step in backward (an optimizer a parameter) in one order.
        fresh = (met is None or met.groups != len(optimizer.param_groups)) and not in_backward()
        facts = {**optimizer_facts(optimizer, params), "updates": found} if fresh else {}
        states = "\n".join(f"{spec.name} {key} {about_state(value)}" for _, spec, key, value in held)
        problem = ControlPlane(self._stage, verb).differ({"optimizer": {**facts, "states": f"{text_digest(states):x}"}})
        if problem and not ControlPlane(self._stage, verb, "the optimizer's state").agree(states):
            raise CheckpointError(
                f"{kind}.{verb} expected the same optimizer states on every rank, found different ones: load_state_dict was "
                "called on only some ranks, or with different files. Load the same state on all ranks, or rank 0's with "
                "attachment.load_state_dict."
            )
        if problem:
            raise DivergenceError(problem)
        problem = partitions(optimizer) or self.owners.refusal(optimizer)
        if problem:
            raise ShardedOpError(f"{problem} ({verb}.)")
        if whole and in_backward():
            raise ShardedOpError(
                f"{kind}.{verb} expected a first step after backward, because it updates whole parameters, whose owner ranks "
                "are chosen then; found one inside backward. Step it after backward."
            )
        self.owners.choose(optimizer, verb)
        self._make_ranges(optimizer, held)
        self.admit(optimizer)
        self._note(optimizer)

    def _held(self, optimizer: Optimizer) -> list[_Held]:
        """Its states of the model's parameters, but for numbers and vectors."""
        specs = {id(param): spec for flat in self.owners.flats() if flat.holds for param, spec in flat.members()}
        return [
            (param, specs[id(param)], key, value)
            for param in params_of(optimizer)
            if id(param) in specs
            for key, value in optimizer.state.get(param, {}).items()
            if isinstance(value, Tensor) and value.dim() and not isinstance(value, ShardedVector)
        ]

    def _make_ranges(self, optimizer: Optimizer, held: Sequence[_Held]) -> None:
        """Full tensors and ranges of another layout among ``held`` become ranges.  Collective: alike on every rank."""
        ranges = [((param, spec, key), value, param) for param, spec, key, value in held if isinstance(value, ShardedTensor)]
        for (param, spec, key), value in of_another_layout(ranges, self._stage):
            optimizer.state[param][key] = ShardedTensor(spec.take(value).clone(), spec)
        for param, spec, key, value in held:
            if not isinstance(value, ShardedTensor) and value.shape == spec.shape:
                optimizer.state[param][key] = ShardedTensor(spec.take(value).clone(), spec)
        shard_vectors(optimizer)

    def choose_owners(self, optimizer: Optimizer, verb: str) -> None:
        """States that are about to be loaded into it find out who keeps them.  Collective.

        Raises:
            DivergenceError: ranks have other optimizers.
            CheckpointError, CapabilityError: as ``before``.
        """
        problem = ControlPlane(self._stage, verb).differ({"optimizer": {"updates": self.owners.facts(optimizer)}})
        if problem:
            raise DivergenceError(problem)
        self.owners.choose(optimizer, verb)

    def meet_again(self) -> None:
        """Ranks may have come further than others in meeting them: each is met again at its next step."""
        for met in self._met.values():
            met.groups = -1

    def _note(self, optimizer: Optimizer) -> None:
        """It has been met, as it is now."""
        met = self.met(optimizer)
        if met is None:
            met = self._met[optimizer] = Met(id(optimizer.state))
        met.groups = len(optimizer.param_groups)

    def admit(self, optimizer: Optimizer) -> None:
        """It is known from now on, on every rank: whoever calls does so on all of them."""
        if all(known is not optimizer for known in self._alive()):
            if in_backward():
                number = text_digest(repr(optimizer_facts(optimizer, self._params())))
                self._unordered.append((number, weakref.ref(optimizer)))
            else:
                self._order.append(weakref.ref(optimizer))
            self._admitted(optimizer)
            # It must keep nobody alive.
            me = weakref.ref(self)

            def loaded(optimizer: Optimizer) -> None:
                known = me()
                if known is not None:
                    known._met.pop(optimizer, None)

            self._handles.append(optimizer.register_load_state_dict_post_hook(loaded))

    # Which there are.

    def here(self) -> list[Optimizer]:
        """Known ones that are alive on this rank, for whoever looks without communicating."""
        return _once(self._alive())

    def met(self, optimizer: Optimizer) -> Met | None:
        """What is known of the states it holds; None of states that nobody has compared."""
        met = self._met.get(optimizer)
        return met if met is not None and met.state == id(optimizer.state) else None

    def steps(self, optimizer: Optimizer) -> None:
        """It begins a step, with the states it has."""
        met = self.met(optimizer)
        if met is not None:
            met.stepped = True

    def stepped(self) -> list[Optimizer]:
        """Those that have begun a step with the states they hold now, alive on this rank."""
        return [one for one in list(self._met) if (met := self.met(one)) is not None and met.stepped]

    def whole(self, optimizer: Optimizer) -> frozenset[int]:
        """The parameters that it updates whole, by identity."""
        return frozenset(id(one.param) for one in self.owners.whole(optimizer))

    def agreed(self, verb: str) -> list[Optimizer]:
        """Known ones that are alive on every rank, in the common order.  Collective."""
        if self._unordered:
            # Those first seen in a backward, by what they hold.
            self._unordered.sort(key=lambda entry: entry[0])
            if not ControlPlane(self._stage, verb, "optimizers").agree(str([number for number, _ in self._unordered])):
                raise _others(verb, "those that stepped in backward", self._stage)
            self._order.extend(known for _, known in self._unordered)
            self._unordered = []
        found = [known() for known in self._order]
        if found:
            dead = ControlPlane(self._stage, verb).any([one is None for one in found])
            for one, gone in zip(found, dead, strict=True):
                if one is not None and gone:
                    self._met.pop(one, None)
            found = [one for one, gone in zip(found, dead, strict=True) if not gone]
            self._order = [weakref.ref(one) for one in found if one is not None]
        return _once(one for one in found if one is not None)

    def every(self, verb: str) -> list[Optimizer]:
        """``agreed``, and where they leave parameters to be trained by others: those, stepped or not.  Collective.

        Raises:
            DivergenceError: ranks have others.
            CheckpointError: two of them cannot be told apart.
        """
        known, params = self.agreed(verb), self._params()
        stepped = {id(param) for one in known for param in params_of(one)}
        if any(param.requires_grad and id(param) not in stepped for param in params):
            known = _once([*known, *self._search(verb, params, lambda one: True)])
        return known

    def with_ranges(self, verb: str) -> list[Optimizer]:
        """``agreed``, and any other that holds ranges (another's states loaded, no step since), all met.  Collective.

        Raises:
            CheckpointError, DivergenceError: as ``every``, or ranks hold different states; nothing has been changed.
        """
        known, params = self.agreed(verb), self._params()

        def has_ranges(one: Optimizer) -> bool:
            states = [one.state.get(param, {}) for param in params]
            ranges = (ShardedTensor, ShardedVector)
            return any(isinstance(of, OwnedStates) or any(isinstance(each, ranges) for each in tensors_in(of)) for of in states)

        found = _once([*known, *self._search(verb, params, has_ranges)])
        for one in found:
            self.meet(one, verb)
        return found

    def _alive(self) -> list[Optimizer]:
        references = [*self._order, *(known for _, known in self._unordered)]
        return [found for found in (known() for known in references) if found is not None]

    def _search(self, verb: str, params: Sequence[Tensor], wanted: Callable[[Optimizer], bool]) -> list[Optimizer]:
        """Optimizers of ``params`` that are not known yet, admitted in an order all ranks share.  Collective."""
        known = {id(one.state) for one in self.here()}

        def look() -> list[Optimizer]:
            return [one for one in holders(params) if id(one.state) not in known and wanted(one)]

        if not any(ControlPlane(self._stage, verb).any([bool(look())])):
            return []
        # One that nobody refers to any more may be found on some ranks alone.
        gc.collect()
        found = _once(sorted(look(), key=lambda one: _told_apart(one, params)))
        names = [_told_apart(one, params) for one in found]
        if not ControlPlane(self._stage, verb, "optimizers").agree(str(names)):
            raise _others(verb, f"{len(found)} ({', '.join(type(one).__name__ for one in found)})", self._stage)
        for one, before, after in zip(found, names, names[1:], strict=False):
            if before == after:
                raise CheckpointError(
                    f"{verb} expected optimizers that can be told apart, found two {type(one).__name__} with the "
                    "same parameters, options and counters, neither of which has stepped. Pass both to the call, or each to "
                    "attachment.state_dict(optimizer) before it, in the same order on all ranks."
                )
        for one in found:
            self.admit(one)
        return found


def partitions(optimizer: object) -> str:
    """What is wrong with an optimizer that gives every rank whole parameters of its own to step; "" where it does not."""
    known: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if known is None or not isinstance(optimizer, known.ZeroRedundancyOptimizer) or optimizer.world_size == 1:
        return ""
    inner = getattr(optimizer, "_optim_constructor", None)
    name = inner.__name__ if isinstance(inner, type) else "AdamW"
    return (
        "ZeroRedundancyOptimizer steps only some of the parameters on each rank. Expected an optimizer that steps all of them, "
        f"because the model is already partitioned, found one that divides them over {optimizer.world_size} ranks. Use the "
        f"optimizer inside it: {name}(model.parameters(), ...); stages 1 to 3 partition its states."
    )


def of_another_layout(
    ranges: Sequence[tuple[Any, ShardedTensor, Any]], stage: Transport
) -> Iterator[tuple[Any, Tensor]]:
    """The whole values of those that some rank cannot copy range by range: (what, value, where it goes).  Collective."""
    if not ranges:
        return
    pairs = [(value, into) for _, value, into in ranges]
    other = [one.shape != two.shape or one.local_shard.spec.key() != two.local_shard.spec.key() for one, two in pairs]
    flags = ControlPlane(stage, "compare layouts").any(other)
    for (what, value, _), flag in zip(ranges, flags, strict=True):
        if flag:
            yield what, value.full_tensor()


def optimizer_facts(optimizer: Optimizer | None, params: Iterable[Tensor]) -> Facts:
    """What must be the same of an optimizer on every rank: its type, which of ``params`` it holds, and its plain numbers."""
    if optimizer is None:
        return {"type": "none"}
    place = {id(param): number for number, param in enumerate(params)}
    facts = {"type": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"}
    for number, group in enumerate(optimizer.param_groups):
        held = [place[id(param)] for param in group["params"] if id(param) in place]
        facts[f"group {number} parameters"] = f"{len(held)} (of digest {text_digest(str(held)):x})"
        for key, value in sorted(group.items(), key=lambda item: str(item[0])):
            if key != "params":
                # Numbers as they are; of anything else, a tensor on a device among them, the type says enough.
                row = isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value)
                plain = row or isinstance(value, (bool, int, float, str, type(None)))
                facts[f"group {number} {key}"] = repr(value) if plain else type(value).__name__
    return facts


def _told_apart(optimizer: Optimizer, params: Sequence[Tensor]) -> tuple[list[int], str, list[str]]:
    """What tells optimizers apart, alike on every rank: parameters, class, options, states and counters."""
    states = [
        f"{key} {float(value) if type(value) is Tensor and value.dim() == 0 else ''}"
        for group in optimizer.param_groups
        for param in group["params"][:1]
        for key, value in sorted(optimizer.state.get(param, {}).items())
    ]
    return _places(optimizer, params), repr(optimizer_facts(optimizer, params)), states


def _places(optimizer: Optimizer, params: Sequence[Tensor]) -> list[int]:
    """Which of ``params`` it holds."""
    place = {id(param): number for number, param in enumerate(params)}
    return [place[id(param)] for param in params_of(optimizer) if id(param) in place]


def _once(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """A wrapper that shows the states of the optimizer inside it is the same one."""
    return list({id(one.state): one for one in reversed(list(optimizers))}.values())[::-1]


def about_state(value: Tensor) -> str:
    """What must be the same of a state on every rank, in words."""
    kind = "range" if isinstance(value, ShardedTensor) else "whole"
    return f"{kind} {value.dtype} {list(value.shape)}"


def _others(verb: str, found: str, stage: Transport) -> DivergenceError:
    return DivergenceError(
        f"{verb} expected the same optimizers of the model on every rank, found different ones: {found} on rank "
        f"{stage.axis.ranks[stage.axis.rank]}. Build the same on all ranks, delete those that only some ranks have, or pass "
        "the one you mean."
    )
