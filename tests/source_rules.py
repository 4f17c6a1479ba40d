"""Owns the rules of the sources that a machine can check: plain functions from sources to findings, each one "file:line: what".

`test_source_rules.py` runs them over the packages, and over small sources that break them. Nothing here imports what it reads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.support.paths import ROOT

#: Installed package -> where it lies in the repository.
PACKAGES = {"zhooks": "zhooks", "offload": "offload", "zprof": "tools/zprof"}


@dataclass(frozen=True)
class Source:
    """One module: its name ("zhooks.comm"), its path below the root, its text and its syntax tree."""

    module: str
    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, breadth first: each rule reads them, and to find them takes longer than to read them."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def finding(self, node: ast.AST | int, what: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {what}"


Rule = Callable[[list[Source]], list[str]]


def source(path: str, text: str) -> Source:
    parts = Path(path.removeprefix("tools/")).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(module, path, text, ast.parse(text, filename=path))


@cache
def suite() -> list[Source]:
    """Everything below tests/."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return [source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


@cache
def all_sources() -> list[Source]:
    found = [
        source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
        for folder in PACKAGES.values()
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert found, f"no sources below {ROOT}"
    return found


# --- what a source names ----------------------------------------------------------------------------------------------


def import_targets(node: ast.AST, here: Source) -> list[str]:
    """Dotted names an import statement reaches for: ``from a import b`` gives "a.b", though b may be no module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        up = here.module.split(".")
        up = up if here.path.endswith("__init__.py") else up[:-1]
        up = up[: len(up) - (node.level - 1)]
        base = ".".join([*up, *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def aliases(here: Source) -> dict[str, str]:
    """Local name -> the dotted name it was imported as, wherever in the file it was imported."""
    known: dict[str, str] = {}
    for node in here.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias, target in zip(node.names, import_targets(node, here), strict=True):
                known[alias.asname or alias.name] = target
    return known


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """The full name of a name or attribute chain that starts at an import, else None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, known)
        return f"{base}.{node.attr}" if base else None
    return None


def uses(here: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every reference to something imported, by its full name; imports of it count."""
    known = aliases(here)
    for node in here.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((node, target) for target in import_targets(node, here))
        elif name := dotted(node, known):
            yield node, name


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Statements run when the module is imported: not those in functions, nor those only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from at_import_time(other)
            continue
        yield child
        yield from at_import_time(child)


def within(here: Source, *places: str) -> bool:
    """Whether the source is one of ``places``, given as patterns of paths such as "zhooks/comm/*.py"."""
    return any(Path(here.path).match(place) for place in places)


def of_packages(sources: list[Source], *packages: str) -> list[Source]:
    return [here for here in sources if here.package in packages]


# --- the rules --------------------------------------------------------------------------------------------------------

MAY_IMPORT = {"offload": {"offload"}, "zprof": {"offload", "zprof"}, "zhooks": {"offload", "zhooks"}}
#: Commands that simulate need what they simulate; nothing else of zprof knows the runtime.
SIMULATE = ("tools/zprof/commands/simulate.py", "tools/zprof/commands/plan.py", "tools/zprof/commands/oom.py")

#: From the top down: what is in a package imports from its own line and from lines below.
ORDER = {
    "zhooks": (
        "__init__", "integrations", "simulate cpu_transport parallel resilience live report whole",
        "attach", "session", "build", "plan", "checkpoint", "run", "optim", "activation", "grad",
        "unit", "tensor", "comm", "layout",
        "refusals tree", "compiled keywords rng", "shadowed",
    ),
    "offload": (
        "__init__", "deepspeed dcp", "shards torchfiles", "stash", "store", "kernels", "disk",
        "memory", "device", "virtual", "budget", "policy",
        "hardware allocator", "documents",
        "bounded_calls counting formulas free_ranges pages private_files references regular_files text threads",
        "work", "tier",
        "events errors user_warnings", "job_rank",
    ),
    "zprof": (
        "__main__", "cli", "__init__ commands", "doctor show", "running oom", "living", "analysis", "bench gpu recording",
        "allocator", "trace", "problem rows clock writing replacing",
    ),
}  # fmt: skip


#: Packages entered through their ``__init__`` alone; a command of zprof imports modules, to load no more than it needs.
ENTERED = ("zhooks", "offload")


def imports_point_down(sources: list[Source]) -> list[str]:
    return [
        here.finding(node, f"{here.package} imports {target}")
        for here in sources
        for node in here.nodes
        for target in import_targets(node, here)
        if (top := target.partition(".")[0]) in PACKAGES and top not in MAY_IMPORT[here.package]
        if not (top == "zhooks" and within(here, *SIMULATE))
    ]


def packages_point_down(sources: list[Source]) -> list[str]:
    """No package imports from one above it in ``ORDER``, but for what a function of the core imports inside ``needed``."""
    findings: list[str] = []
    for here in of_packages(sources, *ORDER):
        line = {name: number for number, names in enumerate(ORDER[here.package]) for name in names.split()}
        own = (here.module.split(".")[1:] or ["__init__"])[0]
        if own not in line:
            findings.append(here.finding(1, f"{here.package}.{own} has no place in the order of packages"))
            continue
        core = own in ("attach", "session")
        inside_needed = [each for node in here.nodes if core and of_needed(node) for each in ast.walk(node)]
        for node in here.nodes:
            for target in import_targets(node, here):
                top, _, inner = target.partition(".")
                reached = inner.partition(".")[0]
                if top == here.package and reached in line and line[reached] < line[own] and node not in inside_needed:
                    findings.append(here.finding(node, f"{here.package}.{own} imports {target}, which is above it"))
    return findings


def of_needed(node: ast.AST) -> bool:
    """A ``with needed(...)`` of ``zhooks.session``: a package that is missing is a CapabilityError; or what only mypy reads."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).startswith("needed(")


def packages_have_one_entry(sources: list[Source]) -> list[str]:
    """What a package's ``__init__`` names is what others may use of it."""
    packages = {here.module for here in sources if here.path.endswith("__init__.py") and "." in here.module}
    packages = {name for name in packages if name.partition(".")[0] in ENTERED}
    modules = {here.module for here in sources}
    findings: list[str] = []
    for here in sources:
        own = here.module if here.module in packages else here.module.rpartition(".")[0]
        for node in here.nodes:
            for target in import_targets(node, here):
                module = target if target in modules else target.rpartition(".")[0]
                package = module.rpartition(".")[0]
                if package in packages and package != own:
                    findings.append(here.finding(node, f"{here.module} imports {target} past what is exported by {package}"))
    return findings


def no_import_cycles(sources: list[Source]) -> list[str]:
    modules = {here.module: here for here in sources}
    edges: dict[str, dict[str, int]] = {module: {} for module in modules}
    for here in sources:
        for node in at_import_time(here.tree):
            for target in import_targets(node, here):
                reached = target if target in modules else target.rpartition(".")[0]
                if reached in modules and reached != here.module:
                    edges[here.module].setdefault(reached, getattr(node, "lineno", 1))
    findings: list[str] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycle = [*trail[trail.index(module) :], module]
            line = edges[cycle[-2]][module]
            findings.append(modules[cycle[-2]].finding(line, f"import cycle {' -> '.join(cycle)}"))
        elif module not in done:
            for reached in edges[module]:
                visit(reached, [*trail, module])
            done.add(module)

    for module in sorted(modules):
        visit(module, [])
    return findings


COLLECTIVE = re.compile(
    r"all_gather\w*|_all_gather\w*|reduce_scatter\w*|_reduce_scatter\w*|all_reduce\w*|broadcast\w*|i?send\w*|i?recv\w*"
    r"|batch_isend_irecv|all_to_all\w*|\w*barrier|\w+_object(_list)?|gather|scatter|reduce|P2POp|split_group"
)
#: Methods of a process group, which reach the same wires past torch.distributed's functions.
GROUP_METHODS = {"allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "alltoall", "alltoall_base"}
FUNCTIONAL = ("torch.distributed._functional_collectives", "torch.ops.c10d", "torch.ops._c10d_functional")


def collectives_only_in_comm(sources: list[Source]) -> list[str]:
    findings: list[str] = []
    for here in of_packages(sources, "zhooks", "offload"):
        if within(here, "zhooks/comm/*.py", "zhooks/cpu_transport/*.py", "zhooks/simulate/virtual*.py"):
            continue
        for node, name in uses(here):
            called = name.startswith("torch.distributed.") and COLLECTIVE.fullmatch(name.rpartition(".")[2])
            if called or name.startswith(FUNCTIONAL):
                findings.append(here.finding(node, f"{name} outside zhooks/comm/"))
        # torchft's Manager has a method of that name, which stands in for the collective.
        theirs = within(here, "zhooks/integrations/torchft.py")
        for node in here.nodes:
            if isinstance(node, ast.Attribute) and node.attr in GROUP_METHODS and not theirs:
                findings.append(here.finding(node, f".{node.attr} outside zhooks/comm/"))
    return findings


#: Functions of torch that make a tensor on the default device, which a user may set to any; and those of the default dtype.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
OF_DTYPE = {"empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}


def factories_name_device_and_dtype(sources: list[Source]) -> list[str]:
    findings: list[str] = []
    for here in of_packages(sources, "zhooks", "offload"):
        known = aliases(here)
        for node in here.nodes:
            name = dotted(node.func, known) if isinstance(node, ast.Call) else None
            top, _, function = (name or "").partition(".")
            if not isinstance(node, ast.Call) or top != "torch" or function not in FACTORIES:
                continue
            named = {keyword.arg for keyword in node.keywords}
            wanted = ["device", "dtype"] if function in OF_DTYPE else ["device"]
            findings += [here.finding(node, f"torch.{function} without {word}") for word in wanted if word not in named]
    return findings


#: What a model may override to show less than it has.
WALKS = {
    "parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "buffers", "named_buffers",
}  # fmt: skip


def models_are_walked_by_tree(sources: list[Source]) -> list[str]:
    """Which modules, parameters and buffers a model has is asked of `zhooks/tree.py`, or of the `Ignored` that asks it."""
    findings: list[str] = []
    for here in of_packages(sources, "zhooks"):
        # What a model shows is compared with what it has.
        for node in () if within(here, "zhooks/tree.py", "zhooks/plan/checks.py") else here.nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WALKS):
                continue
            # Each of these is no module, or one of zhooks.
            whose = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            if whose not in ("tree", "ignored", "owners", "materializer", "self"):
                findings.append(here.finding(node, f".{node.func.attr}() past zhooks/tree.py"))
    return findings


#: A store of torch's; what asks one waits without a bound where the network is down.
STORE = re.compile(r"torch\.distributed\.(\w+\.)*(_get_default_store|(TCP|File|Hash|Prefix)?Store)")


def stores_only_in_their_file(sources: list[Source]) -> list[str]:
    return [
        here.finding(node, f"{name} outside zhooks/comm/group_store.py")
        for here in of_packages(sources, "zhooks", "offload")
        if not within(here, "zhooks/comm/group_store.py")
        for node, name in uses(here)
        if STORE.fullmatch(name)
    ]


HOOK = re.compile(
    r"register_(module_)?(forward|full_backward|backward)\w*hook\w*|saved_tensors_hooks"
    r"|register_post_accumulate_grad_hook|register_(optimizer_)?step_(pre|post)_hook|register_(pre|multi_grad_)?hook"
)
HOOK_FILES = (
    "zhooks/run/hooks.py", "zhooks/activation/saved.py", "zhooks/optim/step_pipeline.py", "zhooks/grad/user_hooks.py",
    "zhooks/grad/direct.py", "zhooks/tensor/sharded.py",
)  # fmt: skip


def hooks_only_in_their_files(sources: list[Source]) -> list[str]:
    findings: list[str] = []
    for here in of_packages(sources, "zhooks", "offload"):
        if within(here, *HOOK_FILES):
            continue
        for node in here.nodes:
            # Calls only: naming Tensor.register_hook in a table of overridden functions installs nothing.
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and HOOK.fullmatch(called.attr):
                findings.append(here.finding(node, f".{called.attr} outside {', '.join(HOOK_FILES)}"))
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if HOOK.fullmatch(alias.name)]
                findings.extend(here.finding(node, f"{name} outside {', '.join(HOOK_FILES)}") for name in names)
    return findings


#: What orders work on a device, under torch, torch.cuda, its modules and torch.accelerator.
STREAM = re.compile(
    r"torch\.(Stream|Event)"
    r"|torch\.(cuda|accelerator)\.(\w+\.)*(Stream|ExternalStream|Event|StreamContext|stream|current_stream|default_stream|set_stream"
    r"|synchronize|ipc_collect|cudart|_sleep|CUDAGraph|graph)"
)
#: Methods of tensors, storages, streams and events that do; an event of threading has none of them.
STREAM_METHODS = {"record_stream", "wait_stream", "wait_event", "record_event", "cuda_stream", "pin_memory"}


def streams_only_in_device(sources: list[Source]) -> list[str]:
    findings: list[str] = []
    for here in of_packages(sources, "zhooks", "offload"):
        # The virtual machine has streams of its own, which are clocks.
        if within(here, "offload/device/*.py", "offload/virtual/*.py"):
            continue
        findings += [
            here.finding(node, f"{name} outside offload/device/") for node, name in uses(here) if STREAM.fullmatch(name)
        ]
        for node in here.nodes:
            if isinstance(node, ast.Attribute) and node.attr in STREAM_METHODS:
                findings.append(here.finding(node, f".{node.attr} outside offload/device/"))
            if not isinstance(node, ast.keyword) or node.arg != "non_blocking":
                continue
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                findings.append(here.finding(node.value, "non_blocking outside offload/device/"))
    return findings


#: Where a type of device may be named: the seam, the models of CUDA's allocator, and zprof's files about CUDA or the vendors'
#: own interfaces; in tables and messages of the others the word is data.
NAMES_DEVICES = (
    "offload/device/*.py", "offload/virtual/*.py", "offload/allocator/*.py", "offload/policy/tables.py",
    "zhooks/rng.py",
    "tools/zprof/gpu/*.py", "tools/zprof/doctor/gpu.py", "tools/zprof/oom/*.py", "tools/zprof/commands/oom.py",
    "tools/zprof/recording/allocator_history.py", "tools/zprof/recording/kineto.py", "tools/zprof/recording/operators.py",
    "tools/zprof/recording/computing.py", "tools/zprof/recording/sampler.py",
)  # fmt: skip


def devices_are_named_at_the_seam(sources: list[Source]) -> list[str]:
    """What is asked of ``offload.device`` works on any type of device; what is asked of torch.cuda does on one."""
    findings: list[str] = []
    for here in sources:
        if within(here, *NAMES_DEVICES):
            continue
        findings += [
            here.finding(node, f"{name} outside offload/device/")
            for node, name in uses(here)
            if name == "torch.cuda" or name.startswith("torch.cuda.")
        ]
        for node in here.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
                findings.append(here.finding(node, ".is_cuda outside offload/device/"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda(:\d*)?", node.value):
                findings.append(here.finding(node, f'"{node.value}" outside offload/device/'))
    return findings


ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}


#: Ask where this user's caches are, which job the launcher started, and what torchft goes by, which are no settings of ours.
_NO_SETTINGS = (
    "offload/job_rank.py", "offload/shards/host_memory.py", "zhooks/integrations/torchft.py",
)  # fmt: skip


def no_environment_is_read(sources: list[Source]) -> list[str]:
    return [
        here.finding(node, f"{name}: settings come from the policy")
        for here in of_packages(sources, "zhooks", "offload")
        if here.path not in _NO_SETTINGS
        for node, name in uses(here)
        if name in ENVIRONMENT
    ]


def nothing_prints(sources: list[Source]) -> list[str]:
    return [
        here.finding(node, "print: say it with an event, a warning or a returned text")
        for here in sources
        for node in here.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def errors_begin_with_a_sentence(sources: list[Source]) -> list[str]:
    return [
        here.finding(node, "': expected': begin with a sentence, such as Cannot load run-3.")
        for here in of_packages(sources, "zhooks", "offload")
        # A file's problems are listed one a line, each after its place.
        if not here.path.startswith("offload/documents/")
        for node in here.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ": expected " in node.value
    ]


def clocks_only_in_events_and_comm(sources: list[Source]) -> list[str]:
    return [
        here.finding(node, f"{name} outside offload/events.py and zhooks/comm*.py: emit an event")
        for here in of_packages(sources, "zhooks", "offload")
        if not within(here, "offload/events.py", "zhooks/comm/*.py", "zhooks/cpu_transport/*.py")
        for node, name in uses(here)
        if name.startswith(("time.", "timeit", "torch.cuda.nvtx")) or name == "time"
    ]


def says_nothing(name: str) -> bool:
    """Whether a word of the name is one of those that could name anything; "utilisation" is a word of its own."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return any(re.fullmatch(r"\w*(manager|helper)s?|utils?|utilit(y|ies)", word.lower()) for word in words)


def names_mean_something(sources: list[Source]) -> list[str]:
    findings: list[str] = []
    for here in sources:
        if says_nothing(here.module):
            findings.append(here.finding(1, f"module {here.module}"))
        for node in here.nodes:
            name: str | None = None
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            if name and says_nothing(name):
                findings.append(here.finding(node, f"{name}: say what it does"))
    return findings


#: Protocols that one class implements, each for its reason: "offload/virtual/machine.py Costs".
ONE_IMPLEMENTER = {
    "offload/virtual/machine.py Costs": "zhooks knows what work costs, and offload runs without zhooks",
    "zhooks/grad/reduce.py Backward": "the runtime is above the reductions, which say what has arrived",
    "zhooks/grad/reduce.py Updates": "optim is above grad, which starts updates in backward",
    "zhooks/simulate/best_first.py Space": "tests search small spaces, and compare with all that is in them",
    "zhooks/tensor/group.py HeldSums": "grad is above tensor, whose gradients read what is held back",
    "zhooks/tensor/group.py Owner": "unit is above tensor, whose parameters use the flat buffer they lie in",
    "zhooks/tensor/group.py Watch": "grad is above tensor, whose unscaling asks what watches the gradients",
}


@dataclass(frozen=True)
class Member:
    """What a class has under a name: a method that takes from ``least`` to ``most`` arguments, or a value, where both are 0."""

    least: int = 0
    most: float = 0

    @classmethod
    def of(cls, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Member:
        if any("property" in ast.unparse(each) for each in function.decorator_list):
            return cls()
        arguments = function.args
        positional = len(arguments.posonlyargs) + len(arguments.args)
        return cls(positional - len(arguments.defaults), float("inf") if arguments.vararg else positional)

    def does_for(self, asked: Member) -> bool:
        return bool(self.most) == bool(asked.most) and self.least <= asked.most <= self.most


class Classes:
    """All classes of some sources, and what each has, by itself or from a base."""

    def __init__(self, sources: list[Source]) -> None:
        self.all = [(here, node) for here in sources for node in here.nodes if isinstance(node, ast.ClassDef)]
        self._named: dict[str, list[tuple[Source, ast.ClassDef]]] = {}
        for each in self.all:
            self._named.setdefault(each[1].name, []).append(each)
        self._known: dict[ast.ClassDef, dict[str, Member]] = {}

    def members(self, here: Source, node: ast.ClassDef) -> dict[str, Member]:
        if node in self._known:
            return self._known[node]
        found = self._known[node] = {}
        for base in bases(node):
            same = self._named.get(base, [])
            # A name of several classes is the one of this module, else those of this package.
            own = [each for each in same if each[0] is here]
            for each in own or [each for each in same if each[0].package == here.package] or same:
                found.update(self.members(*each))
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.update({name: Member() for name in stored_on_self(child) if name not in found})
                found[child.name] = Member.of(child)
            else:
                found.update({name.id: Member() for name in stored(child) if isinstance(name, ast.Name)})
        return found


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def stored(node: ast.AST) -> list[ast.Name | ast.Attribute]:
    """What is assigned to, or declared, in a statement."""
    return [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Store)]


def stored_on_self(node: ast.AST) -> list[str]:
    kept = [each for each in stored(node) if isinstance(each, ast.Attribute)]
    return [each.attr for each in kept if isinstance(each.value, ast.Name) and each.value.id in ("self", "cls")]


def protocols_of_one(sources: list[Source]) -> dict[str, str]:
    """Protocols that at most one class of the packages has all methods of: "file Name" -> the finding.

    One that is but ``__call__`` is the signature of a function.
    """
    classes, found = Classes(sources), dict[str, str]()
    for here, node in classes.all:
        asked = classes.members(here, node)
        if "Protocol" not in bases(node) or asked.keys() <= {"__call__"}:
            continue
        having = [
            other.name
            for where, other in classes.all
            if "Protocol" not in bases(other) and here.package in MAY_IMPORT[where.package]
            if all((own := classes.members(where, other).get(name)) and own.does_for(each) for name, each in asked.items())
        ]
        if len(having) < 2:
            whom = having[0] if having else "none"
            what = f"{node.name} is a Protocol: expected two classes, found {whom}"
            found[f"{here.path} {node.name}"] = here.finding(node, what)
    return found


def protocols_have_several_implementers(sources: list[Source]) -> list[str]:
    return [finding for name, finding in protocols_of_one(sources).items() if name not in ONE_IMPLEMENTER]


# --- what tests reach for ---------------------------------------------------------------------------------------------

PRIVATE = re.compile(r"_[a-z]\w*")
#: Calls that are given a private name as text, and private names in the text of programs that tests run.
BY_NAME = {"setattr", "getattr", "delattr", "hasattr"}
IN_TEXT = re.compile(r"\b(\w+)\.(_[a-z]\w*)")
#: Private names of torch and of the standard library that ours have too.
THEIRS = {"_apply", "_exit", "_modules", "_parameters", "_post_accumulate_grad_hooks", "_stage", "_version"}
#: Where tests see what is private to others.
INSIDE = "tests/support/inside.py"


def place(module: str) -> str:
    """What is private in a module is so of this: "zhooks.unit", "offload.events", all of "zprof"."""
    top, _, rest = module.partition(".")
    return f"{top}.{rest.partition('.')[0]}" if rest and top in ENTERED else top


def owners(sources: list[Source]) -> dict[str, set[str]]:
    """Private name -> the places that define it: functions, classes, attributes, variables."""
    found: dict[str, set[str]] = {}
    for here in sources:
        for node in here.nodes:
            name = None
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name and PRIVATE.fullmatch(name) and name not in THEIRS:
                found.setdefault(name, set()).add(place(here.module))
    return found


def tested(here: Source) -> set[str]:
    """The places that a test file tests, by its own; tests of ``attach`` and of what it is made of test all of it."""
    parts = Path(here.path).with_suffix("").parts[1:]
    if parts[0] not in PACKAGES or len(parts) == 1:
        return set()
    own = place(".".join([parts[0], parts[1].removeprefix("test_")]))
    attaching = {"zhooks.attach", "zhooks.session", "zhooks.live", "zhooks.plan", "zhooks.build"}
    return attaching if own in attaching else {own}


def reached(here: Source) -> Iterator[tuple[ast.AST, str, str | None]]:
    """Where a source uses a private name of something else: the node, the name, and whose it is where that is certain."""
    known = aliases(here)
    for node in here.nodes:
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            of = ast.unparse(node.value)
            if of not in ("self", "cls"):
                attachment = re.search(r"(^|\W)attach(ed|ments?)(\[\w+\])?$", of)
                yield node, node.attr, "zhooks.attach" if attachment else dotted(node.value, known)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, each.name, node.module) for each in node.names if PRIVATE.fullmatch(each.name))
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for given in node.args[:2] if called in BY_NAME else ():
                module, _, name = str(given.value if isinstance(given, ast.Constant) else "").rpartition(".")
                if PRIVATE.fullmatch(name):
                    yield node, name, module or dotted(node.args[0], known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            for of, name in IN_TEXT.findall(node.value):
                if of not in ("self", "cls"):
                    yield node, name, "zhooks.attach" if re.fullmatch(r"attach(ed|ments?)", of) else None


def private_names_are_for_own_tests(sources: list[Source]) -> list[str]:
    """What is private to a package is used by its own tests and in tests/support; others use its API, or ``INSIDE``."""
    owned = owners([here for here in sources if here.package in PACKAGES])
    findings: list[str] = []
    for here in of_packages(sources, "tests"):
        apart = within(here, "tests/support/*.py", "tests/source_rules.py", "tests/test_source_rules.py")
        if apart or owned.keys().isdisjoint(re.findall(r"\b_[a-z]\w*", here.text)):
            continue
        own = owners([here])
        for node, name, of in reached(here):
            whose = owned.get(name, set()) if of is None else {place(of)} if of.partition(".")[0] in PACKAGES else set()
            if whose and name not in own and not whose & tested(here):
                whom = ", ".join(sorted(whose))
                findings.append(here.finding(node, f"{name} is private to {whom}: use its API, or {INSIDE}"))
    return findings


#: What is private to objects of torch, of the standard library and of transformers, by names that ours have too.
OF_LIBRARIES = {"_buffers", "_config", "_grouped_mm", "_indices", "_save", "_snapshot", "_use_count", "_values", "_world"}
#: How often the modules of a package use what is private to an object of another module. These numbers only fall.
PRIVATE_USES = {"zprof": 1}


def defined(here: Source) -> set[str]:
    """The names that a module gives to what is its own: functions, classes, variables, and attributes of ``self``."""
    found = {node.name for node in here.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    found |= {node.id for node in here.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | set(stored_on_self(here.tree))


def private_uses(sources: list[Source]) -> dict[str, list[str]]:
    """Place -> where its modules use a private attribute, defined in the packages, of something else than themselves."""
    own_of = {here: defined(here) for here in sources}
    owned = {name for names in own_of.values() for name in names if PRIVATE.fullmatch(name)} - THEIRS - OF_LIBRARIES
    found: dict[str, list[str]] = {}
    for here, own in own_of.items():
        known = aliases(here)
        for node in here.nodes:
            if not isinstance(node, ast.Attribute) or node.attr not in owned or node.attr in own:
                continue
            of = ast.unparse(node.value)
            theirs = dotted(node.value, known)
            if of not in ("self", "cls", "super()") and (theirs is None or theirs.partition(".")[0] in PACKAGES):
                found.setdefault(place(here.module), []).append(here.finding(node, f"{of}.{node.attr} is private"))
    return found


def private_attributes_are_for_their_module(sources: list[Source]) -> list[str]:
    return [
        f"{whose} uses {len(found)} private attributes of others, at most {PRIVATE_USES.get(whose, 0)} are allowed: " + each
        for whose, found in private_uses(sources).items()
        if len(found) > PRIVATE_USES.get(whose, 0)
        for each in found
    ]


#: A module that holds tests or fixtures, also where a string names it: as the job of a rank, or in a program of its own.
TEST_MODULE = re.compile(r"\btests(\.\w+)*\.(test_\w+|conftest)\b")


def shared_things_are_no_tests(sources: list[Source]) -> list[str]:
    """What several tests use lies in tests/support, or beside them in a module that is no test."""
    findings: list[str] = []
    for here in of_packages(sources, "tests"):
        own = here.path.removesuffix(".py").replace("/", ".")
        for node in here.nodes:
            named = import_targets(node, here)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = [node.value]
            for module in {match[0] for name in named for match in TEST_MODULE.finditer(name)} - {own}:
                findings.append(here.finding(node, f"{module} is a test's file: move what is shared to tests/support"))
    return findings


#: What a file's name says of who wrote it or how, and not of what the tests in it hold.
EPISODES = {"review", "user", "users", "adversity", "adversities", "misc", "more", "regression", "regressions", "bug", "bugs"}


def named_by_what_they_hold(sources: list[Source]) -> list[str]:
    return [
        f"{here.path}:1: a file of tests is named by what it holds, found {', '.join(sorted(words & EPISODES))}"
        for here in of_packages(sources, "tests")
        if here.path.rpartition("/")[2].startswith("test_")
        and (words := set(here.path.rpartition("/")[2].removesuffix(".py").split("_"))) & EPISODES
    ]
