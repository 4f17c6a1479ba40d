"""How an optimizer updates parameters: by ranges, or only whole; found out by letting a twin of it step on small stand-ins.

``owners.py`` asks once an optimizer.  The user's optimizer, its states, the random generators and the ranks are left as they
were; no class is known by its name, but torch's own that go by ranges are not tried.

Note: [What is tried]
    The twin shares the optimizer's class and has copies of its options and attributes.  It first steps on stand-ins that are
    sharded as parameters are: what passes there passes on ranges, with the arithmetic it has there.  What asks for more than
    a range is tried again on plain stand-ins, all together, then with one of them alone, and with the gradients of one of
    them changed: its owner may only update a parameter by itself if that comes to the same.  Sharded stand-ins have a few
    thousand elements, for some optimizers treat small parameters in another way; plain ones are small, for what is done to
    a matrix may take long.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from offload.errors import ShardedOpError
from zhooks.comm import DONE, Alone, Call, Work
from zhooks.layout import SHARD, Axis, Layout, flat_layout
from zhooks.optim.counters import numbers_of, options_kept
from zhooks.optim.kernel import BY_RANGES, step_of
from zhooks.optim.owned_states import tensors_in
from zhooks.optim.references import kept_elsewhere
from zhooks.optim.stand_ins import LARGE, CannotTry, Place, drawn, gradient_of, marked, twin_of, value_of
from zhooks.tensor import ParamShard, ShardedTensor, ShardGroup

__all__ = ["Verdict", "probe"]

#: Two steps: many optimizers make states in the first and use them in the second.
_STEPS = 2
#: What becomes of the gradients of one stand-in, to see whether others follow.
_FACTORS = (float("nan"), 1e4, 0.0)
#: Updates that differ by less than this part of the largest are the same: products of several matrices round otherwise.
_SAME = 0.02
#: What torch says where a compiled function is called under this stance.
_COMPILES = "Detected recompile when torch.compile stance is 'fail_on_recompile'"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found.

    Attributes:
        whole: the places whose parameters must be updated whole.
        problem: why that cannot be left to owners; "" where it can.
    """

    whole: frozenset[Place] = frozenset()
    problem: str = ""


class _Asks(Enum):
    """What a step asked of a sharded stand-in."""

    ELEMENTS = "elements"
    TOTALS = "totals"
    WHOLE = "whole"


class _Keeps(Exception):
    """The step put a parameter where it does not belong, or something else into the states of one."""


class _Communicates(Exception):
    """The step called a collective."""


def probe(optimizer: Optimizer, samples: Mapping[Place, nn.Parameter]) -> Verdict:
    """How ``optimizer`` updates parameters of these places, each with one of its parameters.

    What cannot be tried is taken for an optimizer by ranges: there each operation is right, or refused by name.
    """
    if type(optimizer) in BY_RANGES:
        return Verdict()
    with _nothing_changed():
        found = _tried(optimizer, samples)
        if not found.problem or not any(place.flags for place in samples):
            return found
        # A step may note flags itself, beside states that a stand-in has not: of those that had none, it must do.
        bare = {replace(place, flags=()): sample for place, sample in reversed(list(samples.items()))}
        again = _tried(optimizer, bare)
        if again.problem or not again.whole:
            return found
        return Verdict(frozenset(place for place in samples if replace(place, flags=()) in again.whole))


def _tried(optimizer: Optimizer, samples: Mapping[Place, nn.Parameter]) -> Verdict:
    try:
        asked = {place: _asked(optimizer, place, sample) for place, sample in samples.items()}
        if all(asks is not _Asks.WHOLE for asks, _ in asked.values()):
            return Verdict()
        # Totals are sums in another order on ranges; beside an owner there is no need for that.
        whole = frozenset(place for place, (asks, _) in asked.items() if asks is not _Asks.ELEMENTS)
    except CannotTry:
        return Verdict()
    why = next(why for asks, why in asked.values() if asks is _Asks.WHOLE)
    try:
        return Verdict(whole, _problem(optimizer, samples, whole))
    except _Communicates:
        return Verdict(whole, "its step itself communicates between ranks; use its variant for one process")
    except _Keeps as error:
        return Verdict(whole, str(error))
    except CannotTry as error:
        # Not even plain stand-ins will do: where ranges were refused, the refusal stands.
        if why.endswith(str(error)):
            return Verdict(whole, f"a trial of its step raised {error}")
        return Verdict(whole, f"{why}; a trial of its step on whole parameters raised {error}") if why else Verdict()


# One trial.


class _Pretended(Alone):
    """The first of two ranks, whose other says nothing: what is combined stays what it is."""

    def __init__(self) -> None:
        super().__init__(Axis(SHARD, (0, 1), 0))
        self.totals = 0

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        self.totals += 1

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        full[: shard.numel()].copy_(shard)
        full[shard.numel() :].copy_(shard)
        return DONE


class _Silent(TorchDispatchMode):
    """No collective starts inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise _Communicates(func._schema.name)
        return func(*args, **(kwargs or {}))


def _asked(optimizer: Optimizer, place: Place, sample: nn.Parameter) -> tuple[_Asks, str]:
    """What a step on sharded stand-ins of this place asks for, and the refusal of what it may not have."""
    transport = _Pretended()
    values = [drawn(place, 100 + copy, LARGE) for copy in range(2)]
    layout = flat_layout([value.numel() for value in values], world=2, itemsize=place.dtype.itemsize)
    group = ShardGroup("probe", 0, torch.device("cpu"), layout, transport, replicated=False, buffer_nbytes=1 << 30)
    params: list[nn.Parameter] = []
    for index, value in enumerate(values):
        spec = ParamShard(f"stand-in {index}", value, group, index, layout.pieces(index, 0), torch.device("cpu"))
        params.append(marked(nn.Parameter(ShardedTensor(spec.pick(value).clone(), spec)), sample))
    twin = twin_of(optimizer, {place: params}, {place: sample})
    try:
        for step in range(_STEPS):
            for index, param in enumerate(params):
                spec = param._spec  # type: ignore[attr-defined]
                param.grad = ShardedTensor(spec.pick(drawn(place, 10 * index + step, LARGE)).clone(), spec)
            _step(twin, "fail_on_recompile")
    except ShardedOpError as error:
        return _Asks.WHOLE, str(error)
    except _Communicates as error:
        raise CannotTry(str(error)) from error
    except Exception as error:
        if str(error).startswith(_COMPILES):
            # What is compiled takes plain tensors: with fullgraph = True it would raise, without it would run uncompiled.
            return _Asks.WHOLE, ""
        return _Asks.WHOLE, "" if isinstance(error, TypeError) else f"a trial of its step on ranges raised {_named(error)}"
    if any(_is_own(state) for param in params for state in tensors_in(twin.state.get(param, {}))):
        return _Asks.WHOLE, "states that are not ranges"
    return (_Asks.TOTALS if transport.totals else _Asks.ELEMENTS), ""


def _is_own(state: Tensor) -> bool:
    """A state of the whole parameter beside ranges: every rank would keep all of it."""
    return state.dim() > 0 and not isinstance(state, ShardedTensor)


Trial = dict[tuple[Place, int], Tensor]
"""The updates that stand-ins got, by place and number."""


def _problem(optimizer: Optimizer, samples: Mapping[Place, nn.Parameter], whole: frozenset[Place]) -> str:
    """Why the parameters of ``whole`` cannot be updated one by one, by whoever owns them."""
    every = [(place, number) for place in samples for number in range(2)]
    together, counted = _updates(optimizer, samples, every)
    if not any(float(update.abs().max()) > 0 for update in together.values()):
        return "its step does not change the parameters of its groups: it updates others that it keeps elsewhere"
    for place in samples:
        for factor in _FACTORS:
            try:
                changed, _ = _updates(optimizer, samples, every, {(place, 1): factor})
            except CannotTry as error:
                # A gradient that is not finite, or 0, may be an error; then it is that of the one parameter.
                if _raises_alone(optimizer, samples, (place, 1), factor):
                    continue
                return f"a trial of its step with other gradients of one of the parameters raised {error}"
            for one, update in together.items():
                if one != (place, 1) and (place in whole or one[0] in whole) and not _same(changed[one], update):
                    again, _ = _updates(optimizer, samples, every)
                    if not _same(again[one], update):
                        return "its step draws random numbers, so that the same gradients give other updates"
                    return "the update of a parameter depends on the gradients of others"
    # The first alone is the first still, the second is not: some go by the place in the list.
    for one in [(place, number) for place in samples if place in whole for number in range(2)]:
        only, _ = _updates(optimizer, samples, [one])
        if not _same(only[one], together[one]):
            return "the update of a parameter depends on which other parameters are in the step"
    try:
        _, alone = _updates(optimizer, samples, [])
    except CannotTry as error:
        return f"a step without parameters, which a rank may have to make, raises {error}"
    changed_options = sorted(key for key in counted.keys() | alone.keys() if counted.get(key) != alone.get(key))
    if changed_options and all({counted.get(key), alone.get(key)} <= {"True", "False", None} for key in changed_options):
        # That a step has noted something once (a warning it gave) is undone by owners, and does no harm where nothing follows.
        noted, forgotten = (_updates(optimizer, samples, every, as_owner=owner)[0] for owner in (False, True))
        if all(torch.equal(noted[one], forgotten[one]) for one in every):
            return ""
    if changed_options:
        return (
            f"a step changes its {', '.join(changed_options[:3])} by the parameters it updates, so that ranks, which update "
            "different ones, would go on with different values"
        )
    return ""


def _named(error: Exception) -> str:
    """The first line of an error: those of a compiler go on with advice to its authors."""
    if isinstance(error, KeyError):
        return f"KeyError: {error} (it reads a state or an option that no step has made)"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _object_in(value: Any) -> str:
    """The class of the first thing in a state that is no plain data; "" where all is."""
    if isinstance(value, (Tensor, bool, int, float, complex, str, type(None))):
        return ""
    if isinstance(value, Mapping):
        return next(filter(None, map(_object_in, (*value, *value.values()))), "")
    if isinstance(value, (list, tuple, Set, deque)):
        return next(filter(None, map(_object_in, value)), "")
    return type(value).__name__


def _raises_alone(optimizer: Optimizer, samples: Mapping[Place, nn.Parameter], one: tuple[Place, int], factor: float) -> bool:
    try:
        _updates(optimizer, samples, [one], {one: factor})
    except CannotTry:
        return not math.isfinite(factor) or factor == 0
    return False


def _updates(
    optimizer: Optimizer,
    samples: Mapping[Place, nn.Parameter],
    which: Sequence[tuple[Place, int]],
    factors: Mapping[tuple[Place, int], float] | None = None,
    as_owner: bool = False,
) -> tuple[Trial, dict[str, str]]:
    """What steps of a twin on plain stand-ins change in them, and in its numbers.

    Args:
        as_owner: what a step changes in those numbers is undone, as after a round of an owner.

    Raises:
        CannotTry: it raises.
        _Keeps: it has kept a stand-in, or states that no rank could give away.
    """
    params = {one: marked(nn.Parameter(value_of(*one)), samples[one[0]]) for one in which}
    before = {one: param.detach().clone() for one, param in params.items()}
    by_place: dict[Place, list[nn.Parameter]] = {}
    for (place, _), param in params.items():
        by_place.setdefault(place, []).append(param)
    twin = twin_of(optimizer, by_place, samples)
    try:
        for step in range(_STEPS):
            for one, param in params.items():
                param.grad = gradient_of(*one, step) * (factors or {}).get(one, 1.0)
            with options_kept(twin) if as_owner else nullcontext():
                _step(twin)
    except _Communicates:
        raise
    except Exception as error:
        raise CannotTry(_named(error)) from error
    kept = kept_elsewhere(twin, params.values())
    if kept:
        raise _Keeps(f"its step keeps parameters in {kept}, although each round has different ones: keep that in state[param]")
    for param in params.values():
        for key, value in twin.state.get(param, {}).items():
            found = _object_in(value)
            if found:
                raise _Keeps(
                    f"its step keeps a {found} in state[param][{key!r}], which cannot be saved or given to another rank: only "
                    "numbers, texts, tensors and lists and dicts of them can"
                )
    return {one: param.detach() - before[one] for one, param in params.items()}, numbers_of(twin)


def _same(one: Tensor, other: Tensor) -> bool:
    bound = _SAME * float(other.abs().max())
    return bool(torch.isfinite(one).all()) and float((one - other).abs().max()) <= bound


def _step(twin: Any, stance: str = "force_eager") -> None:
    # A compiled step is tried as it is written: what it computes is the same, and nobody waits for compilers.
    with torch.no_grad(), torch.compiler.set_stance(stance), _Silent():  # type: ignore[no-untyped-call]
        step_of(twin)(twin)


@contextmanager
def _nothing_changed() -> Iterator[None]:
    """Random generators are what they were, and no warning is for the user."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.inference_mode(False), torch.device("cpu"):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        if arrays is not None:
            numpy.random.set_state(arrays)
