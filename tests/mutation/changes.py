"""The changes that cosmic-ray makes to a package's sources, without those that change nothing that runs, and samples of them.

``run.py`` tries them, ``__main__.py`` chooses them.  It never writes a file.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.support.paths import ROOT


@dataclass(frozen=True, slots=True)
class Site:
    """Where one of cosmic-ray's operators can change a file: at how many of its places from the top."""

    path: str
    operator: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class Change:
    """One mutant: a source file, what of it is changed, and the file as it is then."""

    path: str
    line: int
    operator: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """What it is known by while lines move: the file, and the changed line before and after."""
        return f"{self.path}: {self.before} -> {self.after}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')}\n    - {self.before}\n    + {self.after}"


class _WhatRuns(ast.NodeTransformer):
    """The source without annotations, which nothing here evaluates, without protocols, and without docstrings."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            return ast.Pass()
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


@cache
def _what_runs(source: str) -> str:
    return ast.dump(_WhatRuns().visit(ast.parse(source)))


def sites(paths: Sequence[str]) -> list[Site]:
    """All places where something can be changed, in the order of the paths."""
    found: list[Site] = []
    for path in paths:
        nodes = list(ast_nodes(get_ast(_read(path))))
        for name in sorted(operator_names()):
            kind = get_operator(name)
            if not kind.arguments():
                number = sum(len(list(kind().mutation_positions(node))) for node in nodes)
                found += [Site(path, name, occurrence) for occurrence in range(number)]
    return found


def sample(places: Sequence[Site], most: int | None, seed: int) -> list[Change]:
    """As many changes by chance, the same ones for the same seed; all where ``most`` is None."""
    shuffled = list(places)
    random.Random(seed).shuffle(shuffled)
    return list(islice(filter(None, map(_change, shuffled)), most))


def _change(site: Site) -> Change | None:
    """None where nothing that runs is changed; a change of several lines is shown by its first."""
    source = _read(site.path)
    changed = mutate_code(source, get_operator(site.operator)(), site.occurrence)
    if changed is None or not _runs_otherwise(changed, _what_runs(source)):
        return None
    old, new = source.splitlines(), changed.splitlines()
    line = next(place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    return Change(site.path, line + 1, site.operator, old[line].strip(), new[line].strip(), changed)


@cache
def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _runs_otherwise(changed: str, unchanged: str) -> bool:
    try:
        return ast.dump(_WhatRuns().visit(ast.parse(changed))) != unchanged
    except SyntaxError:
        return False
