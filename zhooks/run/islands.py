"""Where a model changes dtype: the modules that [[rule]] has compute in another dtype than what surrounds them, and what
units are given in under ``cast_inputs = "unit"``.

``plan.py`` asks for them once units are known, and before ``apply`` changes anything; ``hooks.py`` casts at them.  Pure:
it reads names and dtypes, and installs nothing.

Note: [Islands]
    The surroundings compute in [precision] param, or in the parameters' own dtype.  An island is a module with parameters
    of which every one below it is ruled to one and the same other dtype, and that is not part of a larger such module: a
    norm whose names a rule matches, or a whole block with all that is in it.  Floating inputs are cast to the island's
    dtype and floating outputs back to that of the surroundings, so no module outside needs to know.  A module whose own
    parameters differ from those of its children is left to itself, for only its forward knows where to cast (a decay kept
    in fp32 beside bf16 projections); a module of ``torch.nn`` cannot, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.errors import AttachError
from offload.policy import Policy
from zhooks import tree
from zhooks.layout import DTYPES, UnitPlan, flats_of

__all__ = ["Island", "Map", "chart"]


@dataclass(frozen=True, slots=True)
class Island:
    """A module, what it computes in, and what surrounds it."""

    module: nn.Module
    inside: torch.dtype
    outside: torch.dtype


@dataclass(frozen=True, slots=True)
class Map:
    """The dtype the policy has the model compute in, None for the parameters' own, and where else it casts.

    Attributes:
        units: modules that units are entered through, and what their inputs are cast to.
    """

    outside: torch.dtype | None
    islands: tuple[Island, ...]
    units: tuple[tuple[nn.Module, torch.dtype], ...] = ()


@dataclass(frozen=True, slots=True)
class _Ruled:
    """Floating parameters by identity: what they compute in, their names, and which of them a rule speaks of."""

    inside: dict[int, torch.dtype]
    names: dict[int, str]
    ruled: frozenset[int]

    def dtypes(self, module: nn.Module, *, recurse: bool) -> set[torch.dtype]:
        """What the parameters of a module compute in."""
        params = tree.parameters(module) if recurse else tree.own_parameters(module)
        return {self.inside[id(param)] for param in params if id(param) in self.inside}

    def island(self, module: nn.Module) -> torch.dtype | None:
        """The one dtype that rules give all parameters of a module, if they do."""
        params = [id(param) for param in tree.parameters(module) if id(param) in self.inside]
        found = {self.inside[param] for param in params}
        return found.pop() if len(found) == 1 and self.ruled.issuperset(params) else None


def chart(model: nn.Module, units: Sequence[UnitPlan], policy: Policy) -> Map:
    """Where ``model`` computes in which dtype under ``policy``.

    Raises:
        AttachError: a rule splits the parameters of a module of ``torch.nn``, which computes in one dtype.
    """
    said = None if policy.precision.param is None else DTYPES[policy.precision.param]
    found: tuple[Island, ...] = ()
    if any(rule.precision.param for rule in policy.rule):
        ruled = _ruled(model, units, policy)
        said = ruled.island(model) or said
        if ruled.island(model) is None:
            found = tuple(_islands(model, units, ruled, said))
    return Map(said, found, tuple(_entries(units, said, found)) if policy.precision.cast_inputs == "unit" else ())


def _entries(
    units: Sequence[UnitPlan], outside: torch.dtype | None, islands: Sequence[Island]
) -> Iterator[tuple[nn.Module, torch.dtype]]:
    """What units are entered through, and the dtype around it; an island casts by itself."""
    inside = {id(module): island.inside for island in islands for module in tree.modules(island.module)}
    cast = {id(island.module) for island in islands}
    for entry in {id(entry): entry for unit in units for entry in unit.group.entries}.values():
        dtype = inside.get(id(entry), outside)
        if dtype is not None and id(entry) not in cast:
            yield entry, dtype


def _islands(
    model: nn.Module, units: Sequence[UnitPlan], ruled: _Ruled, said: torch.dtype | None
) -> Iterator[Island]:
    for name, module in tree.named_modules(model):
        _check(name, module, ruled)
    own = next((flat.kind.master for flat in flats_of(units) if flat.kind.master.is_floating_point), None)
    outside = said or own or torch.float32
    for module, dtype in _outermost(model, ruled, outside):
        yield Island(module, dtype, outside)


def _ruled(model: nn.Module, units: Sequence[UnitPlan], policy: Policy) -> _Ruled:
    # Norms with running statistics mix dtypes by themselves.
    exempt = {id(p) for m in tree.modules(model) if isinstance(m, _NormBase) for p in tree.own_parameters(m)}
    members = [member for unit in units for member in unit.members() if member[0].kind.master.is_floating_point]
    places = [(param, name, flat) for flat, name, param in members if id(param) not in exempt]
    every = {name: unit.group.names(name) for unit in units for _, name, _ in unit.members()}
    said = {name: policy.dtypes(*every[name]).param for _, name, _ in places}
    rules = [rule for rule in policy.rule if rule.precision.param is not None]
    return _Ruled(
        {id(p): flat.kind.master if (word := said[name]) is None else DTYPES[word] for p, name, flat in places},
        {id(param): name for param, name, _ in places},
        frozenset(id(param) for param, name, _ in places if any(rule.matches(*every[name]) for rule in rules)),
    )


def _outermost(model: nn.Module, ruled: _Ruled, outside: torch.dtype) -> Iterator[tuple[nn.Module, torch.dtype]]:
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        dtype = ruled.island(module)
        if dtype is None:
            waiting.extend(reversed(list(tree.children(module))))
        elif dtype != outside:
            seen.update(id(inner) for inner in tree.modules(module))
            yield module, dtype


def _check(name: str, module: nn.Module, ruled: _Ruled) -> None:
    if len(ruled.dtypes(module, recurse=False)) < 2 or not type(module).__module__.startswith("torch.nn."):
        return
    mixed = [id(param) for param in tree.own_parameters(module) if id(param) in ruled.inside]
    if ruled.ruled.isdisjoint(mixed):
        return
    said = ", ".join(f"{ruled.names[one]} in {str(ruled.inside[one]).removeprefix('torch.')}" for one in mixed)
    raise AttachError(
        f"[[rule]] needs all parameters of {name or 'the model'} ({type(module).__name__}) to compute in one dtype, found "
        f'{said}. Let match cover all of them, e.g. "{name}.*".'
    )
