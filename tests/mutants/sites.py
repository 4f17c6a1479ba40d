"""The calls of offload and zhooks that order streams, found in their sources, and the packages with one of them taken out.

run.py and accelerated.py take them out one at a time; the tests hold the list to be what it should.  A call is changed where it
stands, by giving its function other code, so that no other call of the same method is touched.

Note: [Two ways to take out a wait]
    Many waits do more than to wait: they copy what has arrived to where it belongs, note from which version on a change counts,
    begin what had no place before.  On the virtual device such a call is not made at all.  On the accelerator, where results
    are compared, it is made, and what it comes to of streams, events and works of a backend is not waited for (`unordered`).
    A wait that comes to none of them in any workload waits for a thread of the host alone: it orders no stream.  One all of
    whose events are waited for again on the same stream, by who uses the values, orders nothing either: it is for errors.
"""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from tests.support.paths import ROOT

#: What orders streams, or the host after them: the method's name, and what it may be called on ("" is anything).
METHODS = {
    "wait_event": "",
    "wait_stream": "",
    "record_stream": "",
    "block_current_stream": "",
    "record": "event",
    "keep": "calls",
    "synchronize": "",
    "wait": "",
    "join": "",
    "append": "self._in_flight[stream]",
    "used": "self._uses",
    "filled": "self._uses",
    "given": "self._uses",
    "adding": "self._context",
    "reducing": "self._context",
    "end": "self._context",
}
#: The same as plain functions.
FUNCTIONS = frozenset({"keep", "_order"})
#: An argument that says what comes first.
MARK = "after"

#: What no device runs, by how its path begins, and why.
NOWHERE = {
    "offload/virtual/": "the virtual device itself",
    "offload/device/virtual.py": "the virtual device itself",
    "zhooks/simulate/": "the virtual device itself, and a search, which runs nothing",
    "offload/device/cpu.py": "threads of the host, on a CPU alone",
    "offload/device/clock.py": "times of streams: nobody uses what comes after its events",
    "offload/threads.py": "threads of the host",
    "offload/disk/": "threads and files of a real disk",
    "offload/shards/": "threads and files of a real disk",
    "zhooks/checkpoint/background.py": "threads of the host",
    "zhooks/checkpoint/saved_ranges.py": "sorts dimensions",
}
#: How the owner of a call begins that only the virtual device has.
VIRTUAL = "running()."
#: Functions that no accelerator comes to: their waits have a time limit, as those for tensors of the host have.
OF_THE_HOST = ("BackendWork._wait_in_slices",)
#: Where a wait comes to a stream, an event or a backend's work; other waits are made of these.
LEAVES = (
    "_Copy.wait: current.wait_event(self.event)",
    "_Copy.synchronize: self.event.synchronize()",
    "BackendWork.wait: work.wait()",
)
#: What the virtual device does not run in addition.
ELSEWHERE = NOWHERE | {
    "zhooks/checkpoint/": "checkpoints, which need values",
    "zhooks/comm/": "the transports of real ranks",
}
#: What the accelerator does not run in addition.
NOT_ON_ACCELERATOR = NOWHERE | {
    "zhooks/cpu_transport/p2p.py": "ranks on the CPU",
    "zhooks/cpu_transport/shared_memory.py": "ranks on the CPU",
    "zhooks/comm/transport.py": "ranks on the CPU: a backend with streams sums in one call",
    "zhooks/integrations/": "other libraries: torchft's transports, files between ranks on the CPU",
}


@dataclass(frozen=True, slots=True)
class Site:
    """One such call: its file below the root, the outermost function it is in, and which of the file's calls it is."""

    path: str
    function: str
    number: int
    line: int
    text: str

    @property
    def key(self) -> str:
        """What stays the same when lines move."""
        return f"{self.function}: {self.text}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.text}"


def orders(call: ast.Call) -> bool:
    """Whether it is one of them."""
    if any(keyword.arg == MARK for keyword in call.keywords):
        return True
    match call.func:
        case ast.Name(id=name):
            return name in FUNCTIONS
        case ast.Attribute(value=owner, attr=name) if name in METHODS:
            return METHODS[name] in ("", ast.unparse(owner)) and not (name in ("wait", "join") and call.args)
    return False


@cache
def sites(*, on_accelerator: bool = False) -> tuple[Site, ...]:
    """All of them that the virtual device may run, or the accelerator, in the order of files and lines."""
    elsewhere = tuple(NOT_ON_ACCELERATOR if on_accelerator else ELSEWHERE)
    files = sorted((*(ROOT / "offload").rglob("*.py"), *(ROOT / "zhooks").rglob("*.py")))
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    found = (site for path in paths if not path.startswith(elsewhere) for site in _sites_of(path))
    if not on_accelerator:
        return tuple(found)
    return tuple(site for site in found if not site.text.startswith(VIRTUAL) and site.function not in OF_THE_HOST)


def _sites_of(path: str) -> Iterator[Site]:
    walk = _Walk(path, lambda site, call: call)
    walk.visit(_tree(path))
    yield from walk.found


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


class _Walk(ast.NodeTransformer):
    """Meets each site of a file, and puts what ``change`` makes of it in its place."""

    def __init__(self, path: str, change: Callable[[Site, ast.Call], ast.expr]) -> None:
        self.found: list[Site] = []
        self._path, self._change = path, change
        self._classes: list[str] = []
        self._function = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outermost = not self._function
        if outermost:
            self._function = ".".join((*self._classes, node.name))
        self.generic_visit(node)
        if outermost:
            self._function = ""
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (self._function and orders(node)):
            return node
        site = Site(self._path, self._function, len(self.found), node.lineno, ast.unparse(node))
        self.found.append(site)
        return ast.copy_location(self._change(site, node), node)


@contextmanager
def without(site: Site) -> Iterator[None]:
    """Inside, that one call is not made; what it is called on is still asked for, and so are the values it returns."""

    def removed(here: Site, call: ast.Call) -> ast.expr:
        return _nothing(call) if here == site else call

    with _changed(site.path, removed, {site.function}):
        yield


class Skipped:
    """The waits that were not made.

    Attributes:
        left: those that nobody has made since: an event, or a backend's work, and the stream or the host.
    """

    def __init__(self) -> None:
        self.left: dict[tuple[int, int], Any] = {}

    def skip(self, owner: Any, *arguments: Any) -> None:
        # The host is behind what is over, whether it waits or not.
        awaited = arguments[0] if arguments else owner
        # What is over, which under the lazy schedule is what somebody has waited for, needs no second wait.
        if not isinstance(awaited, torch.Event) or not awaited.query():
            self.left[_waited(owner, *arguments)] = owner, arguments

    def make(self, owner: Any, *arguments: Any) -> None:
        self.left.pop(_waited(owner, *arguments), None)


def _waited(owner: Any, *arguments: Any) -> tuple[int, int]:
    return (id(arguments[0]), int(owner.stream_id)) if arguments else (id(owner), -1)


@contextmanager
def unordered(site: Site) -> Iterator[Skipped]:
    """Inside, that one call orders nothing; see Note [Two ways to take out a wait]."""
    skipped = Skipped()
    leaves = [leaf for leaf in sites(on_accelerator=True) if leaf.key in LEAVES]
    here = threading.local()

    def taken_out(owner: Any, method: str, *arguments: Any) -> Any:
        if _of_torch(owner):
            return skipped.skip(owner, *arguments)
        before, here.off = getattr(here, "off", False), True
        try:
            return getattr(owner, method)(*arguments)
        finally:
            here.off = before

    def leaf(owner: Any, method: str, *arguments: Any) -> Any:
        if getattr(here, "off", False):
            return skipped.skip(owner, *arguments)
        skipped.make(owner, *arguments)
        return getattr(owner, method)(*arguments)

    def change(one: Site, call: ast.Call) -> ast.expr:
        if one == site:
            return _handed(call, "__taken_out__") if _waits(call) else _nothing(call)
        return _handed(call, "__leaf__") if one in leaves else call

    names = {"__taken_out__": taken_out, "__leaf__": leaf}
    with ExitStack() as changed:
        for path in {one.path for one in (site, *leaves)}:
            functions = {one.function for one in (site, *leaves) if one.path == path}
            changed.enter_context(_changed(path, change, functions, names))
        yield skipped


def _waits(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("wait", "synchronize", "join", "wait_event")


def _handed(call: ast.Call, name: str) -> ast.expr:
    """``owner.method(...)`` as ``name(owner, "method", ...)``."""
    assert isinstance(call.func, ast.Attribute) and not call.keywords
    return ast.Call(ast.Name(name, ast.Load()), [call.func.value, ast.Constant(call.func.attr), *call.args], [])


def _of_torch(owner: Any) -> bool:
    return type(owner).__module__.partition(".")[0] == "torch"


#: Methods that return nothing.
_STATEMENTS = frozenset({"keep", "append", "record_stream", "used", "filled", "given"})


def _nothing(call: ast.Call) -> ast.expr:
    if any(keyword.arg == MARK for keyword in call.keywords):
        return ast.Call(call.func, call.args, [keyword for keyword in call.keywords if keyword.arg != MARK])
    if not isinstance(call.func, ast.Attribute) or call.func.attr in _STATEMENTS:
        return ast.Constant(None)
    if ast.unparse(call.func.value) == "self._context":
        return ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
    owner = call.func.value
    # A lease's ``wait`` returns what it has waited for.
    text = "(lambda work: getattr(work, 'values', None))()"
    made = ast.parse(text, mode="eval").body
    assert isinstance(made, ast.Call)
    made.args = [owner]
    return made


@contextmanager
def counted(reached: set[Site], among: Iterable[Site], ordering: set[Site] | None = None) -> Iterator[None]:
    """Inside, each call of these that is made is added; to ``ordering`` those that order streams, or the host after one."""
    by_path: dict[str, dict[int, Site]] = {}
    for site in among:
        by_path.setdefault(site.path, {})[site.number] = site
    here, found = threading.local(), set[Site]() if ordering is None else ordering

    def noting(site: Site, call: ast.Call) -> ast.expr:
        made = _handed(call, "__waiting__") if _waits(call) else ast.parse("(__reached__(), 0)[1]", mode="eval").body
        number = ast.Constant(site.number)
        if isinstance(made, ast.Call):
            made.args.insert(0, number)
        else:
            assert isinstance(made, ast.Subscript) and isinstance(made.value, ast.Tuple)
            (noted, _) = made.value.elts
            assert isinstance(noted, ast.Call)
            noted.args, made.value.elts[1] = [number], call
        return made

    def names(sites_here: dict[int, Site]) -> dict[str, Any]:
        def reach(number: int) -> None:
            reached.add(sites_here[number])
            found.add(sites_here[number])

        def waiting(number: int, owner: Any, method: str, *arguments: Any) -> Any:
            site, before = sites_here[number], getattr(here, "within", ())
            reached.add(site)
            here.within = (*before, site)
            if _of_torch(owner):
                found.update(here.within)
            try:
                return getattr(owner, method)(*arguments)
            finally:
                here.within = before

        return {"__reached__": reach, "__waiting__": waiting}

    with ExitStack() as changed:
        for path, here_in in by_path.items():
            changed.enter_context(_changed(path, noting, {site.function for site in here_in.values()}, names(here_in)))
        yield


@contextmanager
def _changed(
    path: str,
    change: Callable[[Site, ast.Call], ast.expr],
    functions: set[str],
    names: dict[str, Any] | None = None,
) -> Iterator[None]:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    tree = ast.fix_missing_locations(_Walk(path, change).visit(_tree(path)))
    compiled = _codes(compile(tree, str(Path(ROOT / path)), "exec", dont_inherit=True))
    live = {name: _function(module, name) for name in functions}
    before = {name: function.__code__ for name, function in live.items()}
    vars(module).update(names or {})
    try:
        for name, function in live.items():
            function.__code__ = compiled[name]
        yield
    finally:
        for name, function in live.items():
            function.__code__ = before[name]
        for name in names or {}:
            del vars(module)[name]


def _codes(code: CodeType) -> dict[str, CodeType]:
    """The code of each function and method, by qualified name."""
    found: dict[str, CodeType] = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found[each.co_qualname] = each
            found |= {name: inner for name, inner in _codes(each).items() if "<locals>" not in name}
    return found


def _function(module: Any, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)
    found = getattr(found, "__wrapped__", found)
    assert isinstance(found, FunctionType), f"{name}: expected a function, found {found!r}"
    return found
