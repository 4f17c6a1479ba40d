"""Which modules make up a unit, found in any module tree; the policy's ``[units]`` patterns come first.

Note: [How units are found]
    Outermost repeated blocks: going down from the root through modules that merely hold others, children of one class
    that appear twice or more and have children of their own are units.  Then size: a leaf with enough parameters of its
    own is one.  The rest stays with the root.  Small neighbours are joined.  Modules that ranks may enter differently (a
    mixture's experts) stay in the unit around them: by their name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from offload.errors import AttachError
from offload.policy import Policy
from zhooks import tree
from zhooks.layout.ignored import Ignored

HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(slots=True)
class Group:
    """A unit in the making: a name, the modules it is entered through, its parameters by name."""

    name: str
    entries: list[nn.Module]
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    #: The further names of parameters that have several: tied ones, and those of modules that appear in several places.
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self, name: str) -> tuple[str, ...]:
        """Every name of one of its parameters."""
        return (name, *self.aliases.get(name, ()))

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params.values())


def find_units(model: nn.Module, policy: Policy, ignored: Ignored | None = None) -> list[Group]:
    """Partition the model's parameters into units, in the order of registration; each that is not ignored in exactly one.

    Raises:
        AttachError: a pattern of the policy matches no module.
    """
    chosen = _by_pattern(model, policy) if policy.units.classes or policy.units.names else _by_structure(model, policy)
    left = set() if ignored is None else ignored.identities()
    taken = set(left)

    def take(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
        found = {inner: param for inner, param in tree.named_parameters(module, name) if id(param) not in taken}
        taken.update(map(id, found.values()))
        return found

    # Weights that are too large to be gathered whole are units wherever they lie: tiles of one are never needed at once.
    found = [(name, module) for name, module in tree.named_modules(model) if is_tile(module)]
    tiles = [Group(name, [module], take(name, module)) for name, module in found]
    groups = [Group(name, _callable(module), take(name, module)) for name, module in chosen]
    groups = [group for group in groups if group.params]
    groups = [*_join_small(groups, policy.units.min_numel), *(tile for tile in tiles if tile.params)]
    rest = {name: param for name, param in tree.named_parameters(model) if id(param) not in taken}
    if rest:
        groups.append(_rest(model, rest, len(taken) == len(left)))
    _enter_aliases(model, groups)
    _name_aliases(model, groups)
    order = {id(param): place for place, param in enumerate(tree.parameters(model))}
    return sorted(groups, key=lambda group: min(order[id(param)] for param in group.params.values()))


def is_tile(module: nn.Module) -> bool:
    """Its class says so by ``zhooks_tile = True``: a block of a layer, as in ``examples/tiled_linear.py``."""
    return getattr(type(module), "zhooks_tile", False) is True


def _callable(module: nn.Module) -> list[nn.Module]:
    """The module, or the nearest below it that are called: nobody calls a ModuleList."""
    if not isinstance(module, NEVER_CALLED):
        return [module]
    return [inner for _, child in tree.named_children(module) for inner in _callable(child)]


def _by_pattern(model: nn.Module, policy: Policy) -> list[tuple[str, nn.Module]]:
    classes, names = set(policy.units.classes), policy.units.names
    found: list[tuple[str, nn.Module]] = []
    used: set[str] = set()
    inside: set[int] = set()
    # A module that appears in several places may be called by each of its names; its first is what its unit is called.
    first = {id(module): name for name, module in tree.named_modules(model)}
    for every, module in tree.named_modules(model, remove_duplicate=False):
        by_class = type(module).__name__ if type(module).__name__ in classes else None
        by_name = [pattern for pattern in names if fnmatchcase(every, pattern)]
        used.update(by_name if by_class is None else (by_class, *by_name))
        name = first[id(module)]
        if (by_class or by_name) and id(module) not in inside:
            found.append((name, module))
            inside.update(id(child) for child in tree.modules(module))
    missing = sorted((classes | set(names)) - used)
    if missing:
        present = sorted({type(module).__name__ for module in tree.modules(model)})
        raise AttachError(
            f"[units] needs {', '.join(missing)} to match a module, found none. "
            f"Classes in this model: {', '.join(present)}."
        )
    return found


def _by_structure(model: nn.Module, policy: Policy) -> list[tuple[str, nn.Module]]:
    found = list(_walk(model, ""))
    floor = max(policy.units.min_numel, 1)
    blocks = {id(child) for _, module in found for child in tree.modules(module)}
    for name, module in tree.named_modules(model):
        own = sum(param.numel() for param in tree.own_parameters(module))
        leaf = next(tree.children(module), None) is None
        if leaf and id(module) not in blocks and own >= floor and not _is_expert(name) and name:
            found.append((name, module))
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Outermost repeated blocks below ``module``."""
    children = [(f"{prefix}.{name}" if prefix else name, child) for name, child in tree.named_children(module)]
    counts = Counter(type(child) for _, child in children if _has_own_structure(child))
    for name, child in children:
        if _is_expert(name) or next(tree.parameters(child), None) is None:
            continue
        repeated = counts[type(child)] > 1 and not isinstance(child, HOLDERS)
        # An encoder and a decoder of one class are not blocks: each holds a list of them.
        if repeated and (isinstance(module, HOLDERS) or not _holds_blocks(child)):
            yield name, child
        else:
            yield from _walk(child, name)


def _holds_blocks(module: nn.Module) -> bool:
    """Somewhere below is a list of repeated modules that have children of their own."""
    for holder in tree.modules(module):
        if isinstance(holder, HOLDERS):
            counts = Counter(type(child) for _, child in tree.named_children(holder) if _has_own_structure(child))
            if counts and max(counts.values()) > 1:
                return True
    return False


def _has_own_structure(module: nn.Module) -> bool:
    return next(tree.children(module), None) is not None and next(tree.parameters(module), None) is not None


def _is_expert(name: str) -> bool:
    return any("expert" in part.lower() for part in name.split("."))


def _join_small(groups: list[Group], floor: int) -> list[Group]:
    """Join neighbours below ``floor`` elements."""
    joined: list[Group] = []
    for group in groups:
        last = joined[-1] if joined else None
        if last is not None and last.numel < floor and group.numel < floor:
            last.entries.extend(group.entries)
            last.params.update(group.params)
            last.name = f"{last.name.split('..')[0]}..{group.name}"
        else:
            joined.append(group)
    return joined


def _rest(model: nn.Module, params: dict[str, nn.Parameter], everything: bool) -> Group:
    """What no unit took belongs to the root, entered through the root or through the modules that own it."""
    entries = {id(model): model}
    # Where one unit is the whole model, hooking the root alone costs less than hooking every layer.
    if not everything:
        modules = dict(tree.named_modules(model))
        for name in params:
            owner = modules[name.rpartition(".")[0]]
            entries.setdefault(id(owner), owner)
    return Group(type(model).__name__, list(entries.values()), params)


def _name_aliases(model: nn.Module, groups: Sequence[Group]) -> None:
    """Parameters are called as ``model.named_parameters()`` calls them; a rule may call them by any of their names."""
    found: dict[int, dict[str, None]] = {}
    for name, param in tree.named_parameters(model, remove_duplicate=False):
        found.setdefault(id(param), {})[name] = None
    for group in groups:
        group.params = {next(iter(found[id(param)])): param for param in group.params.values()}
        aliases = {name: tuple(found[id(param)])[1:] for name, param in group.params.items()}
        group.aliases = {name: others for name, others in aliases.items() if others}


def _enter_aliases(model: nn.Module, groups: Sequence[Group]) -> None:
    """A module that uses a parameter of a unit it does not lie in is one more way into that unit (tied weights)."""
    home = {id(param): group for group in groups for param in group.params.values()}
    below = {id(group): {id(m) for entry in group.entries for m in tree.modules(entry)} for group in groups}
    for module in tree.modules(model):
        for param in tree.own_parameters(module):
            group = home.get(id(param))
            if group is not None and id(module) not in below[id(group)]:
                group.entries.append(module)
                below[id(group)].add(id(module))
