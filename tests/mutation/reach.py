"""Which tests run which lines of some sources, and for how long: a change is tried on those that run it, quick ones first.

``run.py`` measures it on a copy and asks it for every change.  It never changes a file of a checkout and starts no process.

Note: [Marks]
    While tests are measured, every function of the sources sets a byte of one shared mapping before each of its statements.  So
    all processes that a test starts are seen, those included that are killed: each would have to start a tracer otherwise, and
    end in a way that lets it write.  What runs at import is run for every test.
"""

from __future__ import annotations

import ast
import json
import math
import mmap
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_NAME = "_marks_of_mutation"
#: Tests are of one length where none takes this many times as long as another; the first length is up to so many seconds.
_ALIKE, _SHORT_S = 4.0, 0.05


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines of a source, both ends included, and the marks that are set where they are run: a function's are all of its own."""

    first: int
    last: int
    marks: range


@dataclass(frozen=True, slots=True)
class Marked:
    """A source that sets marks, and the statements of its functions, outer ones first."""

    source: str
    statements: tuple[Statement, ...]
    count: int

    def marks(self, line: int) -> range | None:
        """Those of the innermost statement with this line; None where it is run at import."""
        return next((one.marks for one in reversed(self.statements) if one.first <= line <= one.last), None)


class _Marking(ast.NodeTransformer):
    def __init__(self, first: int) -> None:
        self.next, self.statements, self._functions = first, list[Statement](), 0

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return self.generic_visit(node)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        begin, own, place = self.next, self._functions > 0, len(self.statements)
        mark = ast.parse(f"{_NAME}[{begin}] = 1").body
        self.next += own
        self._functions += is_function
        self.generic_visit(node)
        self._functions -= is_function
        if own or is_function:
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(one.lineno for one in decorators)])
            marks = range(begin, self.next if is_function else begin + 1)
            self.statements.insert(place, Statement(first, node.end_lineno or node.lineno, marks))
        return [*mark, node] if own else node


def marked(source: str, first: int, mapping: Path) -> Marked:
    """The source, which sets marks from the number ``first`` on in the file ``mapping``."""
    tree, marking = ast.parse(source), _Marking(first)
    marking.visit(tree)
    begin = f"import mmap as {_NAME}\nwith open({str(mapping)!r}, 'r+b') as {_NAME}_of:\n"
    opened = ast.parse(f"{begin}    {_NAME} = {_NAME}.mmap({_NAME}_of.fileno(), 0)")
    after = [place for place, node in enumerate(tree.body) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    place = after[-1] + 1 if after else int(ast.get_docstring(tree) is not None)
    tree.body[place:place] = opened.body
    return Marked(ast.unparse(ast.fix_missing_locations(tree)), tuple(marking.statements), marking.next - first)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one test took, and the marks it set."""

    name: str
    seconds: float
    marks: frozenset[int]


class Watch:
    """A plugin of pytest's that measures each test by the file of marks."""

    def __init__(self, mapping: Path) -> None:
        with mapping.open("r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)
        self._ran: list[Ran] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Around set-up, call and tear-down."""
        self._marks[:] = bytes(len(self._marks))
        began = time.monotonic()
        try:
            return (yield)
        finally:
            marks = frozenset(number for number, mark in enumerate(self._marks[:]) if mark)
            self._ran.append(Ran(item.nodeid, time.monotonic() - began, marks))

    def write(self, path: Path) -> None:
        """For ``read``, in another process."""
        path.write_text(json.dumps([(ran.name, ran.seconds, sorted(ran.marks)) for ran in self._ran]), encoding="utf-8")


def read(path: Path) -> list[Ran]:
    """What ``Watch`` has written."""
    return [Ran(name, seconds, frozenset(marks)) for name, seconds, marks in json.loads(path.read_text(encoding="utf-8"))]


@dataclass(frozen=True, slots=True)
class Reach:
    """What was measured of tests over sources, these by their paths."""

    sources: Mapping[str, Marked]
    ran: Sequence[Ran]

    def of(self, path: str, line: int) -> list[Ran]:
        """The tests that run a line, the quickest first; those of about one length file by file, as a change of files costs."""
        marks = self.sources[path].marks(line)
        found = [ran for ran in self.ran if marks is None or not ran.marks.isdisjoint(marks)]
        return sorted(found, key=lambda ran: (_length(ran.seconds), ran.name.partition("::")[0]))


def _length(seconds: float) -> int:
    return max(0, math.ceil(math.log(seconds / _SHORT_S, _ALIKE))) if seconds > 0 else 0
