"""How an optimizer updates parameters: by ranges, or only whole; found out by letting a twin of it step on small stand-ins.

The user's optimizer, its states, the random generators and the ranks are left as they were; no class is known by its name, but
torch's own that go by ranges are not tried.

Note: [What is tried]
    The twin shares the optimizer's class and has copies of its options and attributes.  It first steps on stand-ins that are
    sharded as parameters are: what passes there passes on ranges, with the arithmetic it has there.  What asks for more than
    a range is tried again on plain stand-ins, all together, then with one of them alone, and with the gradients of one of
    them changed: its owner may only update a parameter by itself if that comes to the same.  Sharded stand-ins have a few
    thousand elements, for some optimizers treat small parameters in another way; plain ones are small, for what is done to
    a matrix may take long.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
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
from zhooks.optim.groups import OF_PARAMS, names_of, options_kept, step_of
from zhooks.optim.kernel import BY_RANGES
from zhooks.optim.references import kept_elsewhere, numbers_of
from zhooks.optim.states import tensors_in
from zhooks.tensor import ParamShard, ShardedTensor, ShardGroup

__all__ = ["Place", "StateKind", "Verdict", "marked", "marks_of", "probe", "stand_in_of", "step_stand_in"]

#: Two steps: many optimizers make states in the first and use them in the second.
_STEPS = 2
#: What becomes of the gradients of one stand-in, to see whether others follow.
_FACTORS = (float("nan"), 1e4, 0.0)
#: Updates that differ by less than this part of the largest are the same: products of several matrices round otherwise.
_SAME = 0.02
#: What torch says where a compiled function is called under this stance.
_COMPILES = "Detected recompile when torch.compile stance is 'fail_on_recompile'"


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter as far as its update depends on it: its group, dtype, dimensions, what the optimizer has noted of it, and
    what the user has, in attributes of it."""

    group: int
    dtype: torch.dtype
    dims: int
    flags: tuple[tuple[Hashable, Hashable], ...] = ()
    marks: tuple[tuple[str, Hashable], ...] = ()


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


class _CannotTry(Exception):
    """There is no twin, or it will not step: nothing is known of the optimizer."""


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
    except _CannotTry:
        return Verdict()
    why = next((why for asks, why in asked.values() if asks is _Asks.WHOLE), None)
    if why is None:
        return Verdict()
    # Totals are sums in another order on ranges; beside an owner there is no need for that.
    whole = frozenset(place for place, (asks, _) in asked.items() if asks is not _Asks.ELEMENTS)
    try:
        return Verdict(whole, _problem(optimizer, samples, whole))
    except _Communicates:
        return Verdict(whole, "its step itself communicates between ranks; use its variant for one process")
    except _Keeps as error:
        return Verdict(whole, str(error))
    except _CannotTry as error:
        # Not even plain stand-ins will do: where ranges were refused, the refusal stands.
        if why.endswith(str(error)):
            return Verdict(whole, f"a trial of its step raised {error}")
        return Verdict(whole, f"{why}; a trial of its step on whole parameters raised {error}") if why else Verdict()


# On ranges.


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


def _asked(optimizer: Optimizer, place: Place, sample: nn.Parameter) -> tuple[_Asks, str]:
    """What a step on sharded stand-ins of this place asks for, and the refusal of what it may not have."""
    transport, device = _Pretended(), torch.device("cpu")
    values = [_drawn(place, 100 + number, _LARGE) for number in range(2)]
    layout = flat_layout([value.numel() for value in values], world=2, itemsize=place.dtype.itemsize)
    group = ShardGroup("probe", 0, device, layout, transport, replicated=False, buffer_nbytes=1 << 30)
    specs = [
        ParamShard(f"stand-in {index}", value, group, index, layout.pieces(index, 0), device)
        for index, value in enumerate(values)
    ]
    params = [
        marked(nn.Parameter(ShardedTensor(spec.pick(value).clone(), spec)), sample)
        for spec, value in zip(specs, values, strict=True)
    ]
    twin = _twin_of(optimizer, {place: params}, {place: sample})
    try:
        for step in range(_STEPS):
            for index, (param, spec) in enumerate(zip(params, specs, strict=True)):
                param.grad = ShardedTensor(spec.pick(_drawn(place, 10 * index + step, _LARGE)).clone(), spec)
            _step(twin, "fail_on_recompile")
    except ShardedOpError as error:
        return _Asks.WHOLE, str(error)
    except _Communicates as error:
        raise _CannotTry(str(error)) from error
    except Exception as error:
        # What is compiled takes plain tensors: with fullgraph = True it would raise, without it would run uncompiled.
        plain = isinstance(error, TypeError) or str(error).startswith(_COMPILES)
        return _Asks.WHOLE, "" if plain else f"a trial of its step on ranges raised {_named(error)}"
    states = [state for param in params for state in tensors_in(twin.state.get(param, {}))]
    if any(state.dim() > 0 and not isinstance(state, ShardedTensor) for state in states):
        # Every rank would keep all of them.
        return _Asks.WHOLE, "states that are not ranges"
    return (_Asks.TOTALS if transport.totals else _Asks.ELEMENTS), ""


# On plain parameters.

_One = tuple[Place, int]
"""A plain stand-in: its place, and the number of it there."""


def _problem(optimizer: Optimizer, samples: Mapping[Place, nn.Parameter], whole: frozenset[Place]) -> str:
    """Why the parameters of ``whole`` cannot be updated one by one, by whoever owns them."""
    every = [(place, number) for place in samples for number in range(2)]

    def updates(which: Sequence[_One], **more: Any) -> tuple[dict[_One, Tensor], dict[str, str]]:
        return _updates(optimizer, samples, which, **more)

    together, counted = updates(every)
    if not any(float(update.abs().max()) > 0 for update in together.values()):
        return "its step does not change the parameters of its groups: it updates others that it keeps elsewhere"
    for place in samples:
        for factor in _FACTORS:
            factors = {(place, 1): factor}
            try:
                changed, _ = updates(every, factors=factors)
            except _CannotTry as error:
                try:
                    updates([(place, 1)], factors=factors)
                except _CannotTry:
                    # A gradient that is not finite, or 0, may be an error; then it is that of the one parameter.
                    if not math.isfinite(factor) or factor == 0:
                        continue
                return f"a trial of its step with other gradients of one of the parameters raised {error}"
            for one, update in together.items():
                if one != (place, 1) and (place in whole or one[0] in whole) and not _same(changed[one], update):
                    if not _same(updates(every)[0][one], update):
                        return "its step draws random numbers, so that the same gradients give other updates"
                    return "the update of a parameter depends on the gradients of others"
    # The first alone is the first still, the second is not: some go by the place in the list.
    for one in every:
        if one[0] in whole and not _same(updates([one])[0][one], together[one]):
            return "the update of a parameter depends on which other parameters are in the step"
    try:
        _, alone = updates([])
    except _CannotTry as error:
        return f"a step without parameters, which a rank may have to make, raises {error}"
    differ = sorted(key for key in counted.keys() | alone.keys() if counted.get(key) != alone.get(key))
    if not differ:
        return ""
    if all({counted.get(key), alone.get(key)} <= {"True", "False", None} for key in differ):
        # That a step has noted something once (a warning it gave) is undone by owners, and does no harm where nothing follows.
        noted, forgotten = updates(every)[0], updates(every, as_owner=True)[0]
        if all(torch.equal(noted[one], forgotten[one]) for one in every):
            return ""
    return (
        f"a step changes its {', '.join(differ[:3])} by the parameters it updates, so that ranks, which update different ones, "
        "would go on with different values"
    )


def _updates(
    optimizer: Optimizer,
    samples: Mapping[Place, nn.Parameter],
    which: Sequence[_One],
    *,
    factors: Mapping[_One, float] | None = None,
    as_owner: bool = False,
) -> tuple[dict[_One, Tensor], dict[str, str]]:
    """What steps of a twin on plain stand-ins change in them, and in its numbers.

    Args:
        as_owner: what a step changes in those numbers is undone, as after a round of an owner.
    Raises:
        _CannotTry: it raises.
        _Keeps: it has kept a stand-in, or states that no rank could give away.
    """
    values = {(place, number): _drawn(place, 100 + number, _SMALL) for place, number in which}
    params = {one: marked(nn.Parameter(value.clone()), samples[one[0]]) for one, value in values.items()}
    by_place: dict[Place, list[nn.Parameter]] = {}
    for (place, _), param in params.items():
        by_place.setdefault(place, []).append(param)
    twin = _twin_of(optimizer, by_place, samples)
    try:
        for step in range(_STEPS):
            for (place, number), param in params.items():
                param.grad = _drawn(place, 10 * number + step, _SMALL) * (factors or {}).get((place, number), 1.0)
            with options_kept(twin) if as_owner else nullcontext():
                _step(twin)
    except _Communicates:
        raise
    except Exception as error:
        raise _CannotTry(_named(error)) from error
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
    return {one: param.detach() - values[one] for one, param in params.items()}, numbers_of(twin)


def _same(one: Tensor, other: Tensor) -> bool:
    bound = _SAME * float(other.abs().max())
    return bool(torch.isfinite(one).all()) and float((one - other).abs().max()) <= bound


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


# Twins and their steps.


class _Silent(TorchDispatchMode):
    """No collective starts inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise _Communicates(func._schema.name)
        return func(*args, **(kwargs or {}))


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


def _twin_of(
    optimizer: Optimizer, params: Mapping[Place, Sequence[nn.Parameter]], samples: Mapping[Place, nn.Parameter]
) -> Any:
    """Another optimizer of its class, options and attributes, of stand-ins; what it keeps of parameters elsewhere is of others.

    Raises:
        _CannotTry: something it keeps cannot be copied.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            # So small that a trial of a large model costs nothing, and never a stand-in.
            memo[id(param)] = nn.Parameter(torch.zeros((1,) * param.dim(), dtype=param.dtype, device="cpu"))
    twin: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    state: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)
    memo[id(optimizer.state)] = state
    state.update({param: dict(place.flags) for place, mine in params.items() for param in mine if place.flags})
    groups: list[dict[str, Any]] = []
    try:
        for number, group in enumerate(optimizer.param_groups):
            mine = [(place, param) for place, some in params.items() if place.group == number for param in some]
            groups.append({**_options(group, memo), "params": [param for _, param in mine]})
            if "param_names" in group:
                names = names_of(group)
                groups[-1]["param_names"] = [names.get(id(samples[place]), "") for place, _ in mine]
        memo[id(optimizer.param_groups)] = groups
        for key, value in vars(optimizer).items():
            if isinstance(value, OrderedDict) and key.endswith("_hooks"):
                twin.__dict__[key] = OrderedDict()
            elif key not in ("state", "param_groups"):
                twin.__dict__[key] = copy.deepcopy(value, memo)
    except Exception as error:
        raise _CannotTry(f"{type(error).__name__}: {error}") from error
    twin.__dict__.update(state=state, param_groups=groups)
    return twin


#: Updates by a smaller rate are lost in the rounding of the values, and warm-up begins at 0.
_LEAST_RATE = 1e-3
_TRIAL_RATE = 1e-2


def _options(table: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Copies of a group's options on the host, where nothing can be captured; updates by its learning rates can be seen."""
    made = {}
    for key, option in table.items():
        if key in OF_PARAMS:
            continue
        # torch copies no tensor that some operation has made.
        value = copy.deepcopy(option.detach() if isinstance(option, Tensor) else option, memo)
        if isinstance(value, Tensor):
            value = value.cpu()
        if key == "lr" or key.endswith("_lr"):
            if isinstance(value, Tensor):
                value = torch.where(value.abs() < _LEAST_RATE, torch.full_like(value, _TRIAL_RATE), value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LEAST_RATE:
                value = _TRIAL_RATE
        made[key] = False if key == "capturable" else value
    return made


# Stand-ins.

#: What a sharded parameter has of its own.
_OURS = ("local_shard",)
#: Each has trials of its own.
_MOST_VALUES = 4


def marked(param: nn.Parameter, sample: nn.Parameter) -> nn.Parameter:
    """The parameter, which stands for ``sample``, with what the user noted on that."""
    for key, value in vars(sample).items():
        if key not in _OURS:
            setattr(param, key, value)
    return param


def marks_of(params: Sequence[nn.Parameter]) -> list[tuple[tuple[str, Hashable], ...]]:
    """What the user noted on each of them, in plain attributes that have few values: a name or a number is of one alone."""
    noted = [
        {key: value for key, value in vars(param).items() if key not in _OURS and isinstance(value, (bool, int, str))}
        for param in params
    ]
    values: dict[str, set[Hashable]] = {}
    for one in noted:
        for key, value in one.items():
            values.setdefault(key, set()).add(value)
    return [tuple(sorted((key, one[key]) for key in one if len(values[key]) <= _MOST_VALUES)) for one in noted]


#: Shapes by dimensions.
_LARGE: dict[int, tuple[int, ...]] = {0: (), 1: (4096,), 2: (160, 128), 3: (4, 40, 128), 4: (16, 16, 4, 4)}
_SMALL: dict[int, tuple[int, ...]] = {0: (), 1: (24,), 2: (24, 16), 3: (4, 6, 8), 4: (4, 4, 3, 3)}


def _drawn(place: Place, seed: int, shapes: Mapping[int, tuple[int, ...]]) -> Tensor:
    """Random values of a place's dims and dtype, the same for the same seed."""
    shape = shapes.get(place.dims, shapes[4] + (1,) * (place.dims - 4))
    generator = torch.Generator().manual_seed(seed)
    dtype = place.dtype if place.dtype.is_floating_point else torch.float32
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


# What an optimizer will keep.

StateKind = tuple[int, torch.dtype, int]
"""A parameter as far as states depend on it: its group, the dtype that is updated, its dimensions."""


def stand_in_of(optimizer: Optimizer, kinds: Iterable[StateKind]) -> tuple[Optimizer, dict[StateKind, nn.Parameter]] | None:
    """An optimizer of the same class and options over one small parameter on the CPU of each kind, after its first step.

    None where there can be none: the optimizer needs a closure, or its constructor other arguments.
    """
    params = {kind: nn.Parameter(torch.zeros((3,) * max(1, kind[2]), dtype=kind[1], device="cpu")) for kind in kinds}
    made: Callable[..., Optimizer] = type(optimizer)
    # Whatever it raises, it is another's code that was not made for this.
    try:
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            groups = [
                {**_options(group, {}), "params": [param for kind, param in params.items() if kind[0] == number]}
                for number, group in enumerate(optimizer.param_groups)
            ]
            named = inspect.signature(type(optimizer).__init__).parameters
            defaults = {key: value for key, value in optimizer.defaults.items() if key in named}
            stand_in = made([group for group in groups if group["params"]], **_options(defaults, {}))
            step_stand_in(stand_in)
            return stand_in, params
    except Exception:
        return None


def step_stand_in(stand_in: Optimizer) -> None:
    """A step with gradients of ones, outside the hooks that steps have.

    Raises:
        Exception: whatever the optimizer raises.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        for group in stand_in.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        step_of(stand_in)(stand_in)
