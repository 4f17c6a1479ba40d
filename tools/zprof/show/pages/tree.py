"""Owns the data of a flamegraph: the bytes of a moment as a tree of modules, per tier, many small siblings in groups.

``zprof flamegraph`` calls `flamegraph`. It never draws: what it returns is what ``flamegraph.js`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING, Any

from offload.text import as_size
from zprof.analysis.curves import NO_KEY, NO_LINE, lines_recorded
from zprof.rows import BEFORE_STACK, CATEGORIES

if TYPE_CHECKING:
    from zprof.analysis.curves import By
    from zprof.analysis.ledger import Ledger, Moment
    from zprof.trace.reader import Trace

__all__ = ["Node", "flamegraph", "group_small", "tree"]

#: Nodes of one tier's tree in the page.
_MOST_NODES = 12_000
_MOST_DEPTH = 60
#: Siblings that are drawn side by side; of more, those too small to be read are put into so many groups.
_MOST_SIDE = 64
_MOST_GROUPS = 20
_NAME_CHARS = 160


@dataclass(slots=True)
class Node:
    """A module, a category of its bytes, or a line that made them; ``nbytes`` is with all below it."""

    name: str
    nbytes: int = 0
    #: Of leaves, what they are held for.
    category: str = ""
    #: Of a group, how many siblings it is of.
    group: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    def below(self, name: str, category: str = "") -> Node:
        # A category is kept apart from a module of its name.
        return self.children.setdefault(f"{name}\0{category}", Node(name, category=category))


def flamegraph(trace: Trace, step: int | None = None, by: By = "module") -> dict[str, Any]:
    """Everything the page shows of a trace: at each tier's highest moment, of the run or within a step counted from 0; by
    "module" or by "line".

    Raises:
        TraceError: there is no such step, or no line was recorded.
    """
    from zprof.analysis.analysis import Analysis

    if by == "line":
        lines_recorded(trace)
    analysis = Analysis.of(trace)
    header = trace.header
    missing = [line for line in analysis.covered.lines() if not line.startswith("waits")]
    missing += [f"step 0: {analysis.steps.unseen}"] if step == 0 and analysis.steps.unseen is not None else []
    predicted = [f"predicted for {header.simulated}"] if header.simulated else []
    about = [*predicted, f"rank {header.rank} of {header.world}", f"{trace.device} on {header.host}", f"level {trace.level}"]
    return {
        "page": "flamegraph",
        "at": "peak" if step is None else f"step {step}",
        "by": by,
        "rank": header.rank,
        "about": [*about, *missing],
        "missing": missing,
        "argv": " ".join(header.argv)[:400],
        "damage": trace.damage or "",
        "tiers": [
            _tier(analysis.ledger, tier, moment, by) for tier, moment in analysis.moments(step).items() if moment.nbytes > 0
        ],
    }


def tree(held: Iterator[tuple[str, str, int]], root: str, by: By = "module") -> Node:
    """The tree of (key, category, bytes), named ``root``; what stands at or below zero holds nothing and is left out.

    By "module" it is that of modules, below which the lines stand that made each one's bytes; by "line" that of calls, below
    whose last line the modules stand.
    """
    top = Node(root)
    for key, category, nbytes in held:
        if nbytes <= 0:
            continue
        path, *stack = key.split(BEFORE_STACK)
        block, _, module = path.rpartition("/")
        # The line nearest the allocation comes first in a key, and last in a tree.
        calls = stack[_MOST_DEPTH - 1 :: -1]
        if by == "line":
            names, calls = calls or [NO_LINE], [path or NO_KEY]
        else:
            names = [name for name in module.split(".") if name] or [NO_KEY]
        if len(names) > _MOST_DEPTH:
            names[_MOST_DEPTH - 1 :] = [".".join(names[_MOST_DEPTH - 1 :])]
        node = top
        node.nbytes += nbytes
        for name in names:
            node = node.below(name)
            node.nbytes += nbytes
        node = node.below(f"{category} ({block})" if block else category, category)
        node.nbytes += nbytes
        for line in calls:
            node = node.below(line, category)
            node.nbytes += nbytes
    return top


def group_small(top: Node) -> None:
    """Put siblings that are many and small into groups of neighbours by name, "0..49", which hold what they hold."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        small = {key: child for key, child in node.children.items() if child.nbytes * _MOST_SIDE < node.nbytes}
        if len(small) > _MOST_SIDE:
            each = -(-len(small) // min(_MOST_GROUPS, isqrt(len(small))))
            for members in _neighbours(small, each):
                first, last = (next(iter(part)) for part in (members.values(), reversed(members.values())))
                name = f"{first.name}..{last.name}"
                held = sum(child.nbytes for child in members.values())
                categories = {child.category for child in members.values()}
                category = categories.pop() if len(categories) == 1 else ""
                node.children[f"{name}\0group"] = Node(name, held, category, len(members), members)
            node.children = {key: child for key, child in node.children.items() if key not in small}
        waiting += node.children.values()


def _neighbours(nodes: dict[str, Node], each: int) -> Iterator[dict[str, Node]]:
    def by_name(item: tuple[str, Node]) -> list[tuple[int, str]]:
        # 2 before 10.
        parts = re.split(r"(\d+)", item[1].name, flags=re.ASCII)
        return [(len(part), part) if part.isdecimal() else (0, part) for part in parts]

    ordered = sorted(nodes.items(), key=by_name)
    for begin in range(0, len(ordered), each):
        yield dict(ordered[begin : begin + each])


def _tier(ledger: Ledger, tier: str, moment: Moment, by: By) -> dict[str, Any]:
    levels = ledger.at(moment).tolist()
    held = ((each.key, each.category, level) for each, level in zip(ledger.series, levels, strict=True) if each.tier == tier)
    top = tree(held, tier, by)
    least = 0
    while _count(top, least) > _MOST_NODES:
        least = max(least * 2, top.nbytes >> 20, 1)
    group_small(top)
    columns: dict[str, list[Any]] = {"name": [], "parent": [], "nbytes": [], "category": [], "merged": []}
    for name, parent, nbytes, category, merged in _listed(top, least):
        columns["name"].append(name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…")
        columns["parent"].append(parent)
        columns["nbytes"].append(nbytes)
        columns["category"].append(CATEGORIES.index(category) if category else -1)
        columns["merged"].append(merged)
    return columns | {
        "tier": tier,
        "total": top.nbytes,
        "shown": as_size(top.nbytes),
        "at_ms": (moment.time_ns - ledger.begin_ns) / 1e6,
        "least": least,
        "categories": CATEGORIES,
    }


def _count(top: Node, least: int) -> int:
    count, waiting = 0, [top]
    while waiting:
        node = waiting.pop()
        count += 1
        small = False
        for child in node.children.values():
            if child.nbytes >= least:
                waiting.append(child)
            else:
                small = True
        count += small
    return count


def _listed(top: Node, least: int) -> Iterator[tuple[str, int, int, str, int]]:
    """(name, place of the parent, bytes, category, siblings in one) of each node, parents first, the largest first."""
    waiting = [(top, -1)]
    place = 0
    while waiting:
        node, parent = waiting.pop()
        yield node.name, parent, node.nbytes, node.category, node.group
        here = place
        place += 1
        # The last one waiting comes next; among equals the one that was there first.
        large = [each for each in reversed(node.children.values()) if each.nbytes >= least]
        large.sort(key=lambda each: each.nbytes)
        small = [each for each in node.children.values() if each.nbytes < least]
        if small:
            categories = {each.category for each in small}
            category = categories.pop() if len(categories) == 1 else ""
            count = sum(each.group or 1 for each in small)
            yield f"{count} smaller", here, sum(each.nbytes for each in small), category, count
            place += 1
        waiting.extend((each, here) for each in large)
