"""The sources keep their rules, and each rule would notice if they did not."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.source_rules import (
    INSIDE,
    ONE_IMPLEMENTER,
    PRIVATE_USES,
    Rule,
    all_sources,
    clocks_only_in_events_and_comm,
    collectives_only_in_comm,
    devices_are_named_at_the_seam,
    errors_begin_with_a_sentence,
    factories_name_device_and_dtype,
    hooks_only_in_their_files,
    import_targets,
    imports_point_down,
    models_are_walked_by_tree,
    named_by_what_they_hold,
    names_mean_something,
    no_environment_is_read,
    no_import_cycles,
    nothing_prints,
    packages_have_one_entry,
    packages_point_down,
    private_attributes_are_for_their_module,
    private_names_are_for_own_tests,
    protocols_have_several_implementers,
    shared_things_are_no_tests,
    source,
    stores_only_in_their_file,
    streams_only_in_device,
    suite,
)
from tests.support.paths import ROOT


def keeps(rule: Rule) -> None:
    findings = rule(all_sources())
    assert not findings, "\n" + "\n".join(findings)


def test_imports_point_down() -> None:
    keeps(imports_point_down)


def test_packages_import_from_below_alone() -> None:
    keeps(packages_point_down)


def test_packages_are_entered_by_what_they_export() -> None:
    keeps(packages_have_one_entry)


def test_no_module_imports_itself_round_a_corner() -> None:
    keeps(no_import_cycles)


def test_collectives_are_called_only_in_comm() -> None:
    keeps(collectives_only_in_comm)


def test_errors_begin_with_a_sentence() -> None:
    keeps(errors_begin_with_a_sentence)


def test_factories_name_device_and_dtype() -> None:
    keeps(factories_name_device_and_dtype)


def test_models_are_walked_by_tree() -> None:
    keeps(models_are_walked_by_tree)


def test_the_store_of_a_process_group_is_asked_only_in_its_file() -> None:
    keeps(stores_only_in_their_file)


def test_hooks_are_installed_only_in_their_files() -> None:
    keeps(hooks_only_in_their_files)


def test_streams_are_touched_only_in_device() -> None:
    keeps(streams_only_in_device)


def test_types_of_device_are_named_only_at_the_seam() -> None:
    keeps(devices_are_named_at_the_seam)


def test_no_package_reads_an_environment_variable() -> None:
    keeps(no_environment_is_read)


def test_no_package_prints() -> None:
    keeps(nothing_prints)


def test_clocks_are_read_only_in_events_and_comm() -> None:
    keeps(clocks_only_in_events_and_comm)


def test_no_name_could_mean_anything() -> None:
    keeps(names_mean_something)


def test_a_protocol_has_several_implementers() -> None:
    keeps(protocols_have_several_implementers)


def test_private_attributes_of_others_are_used_no_more_often_than_before() -> None:
    keeps(private_attributes_are_for_their_module)


def test_a_test_reaches_into_what_it_tests_alone() -> None:
    findings = private_names_are_for_own_tests([*all_sources(), *suite()])
    assert not findings, "\n" + "\n".join(findings)


def test_no_test_imports_from_another() -> None:
    findings = shared_things_are_no_tests([here for here in suite() if here.path != "tests/test_source_rules.py"])
    assert not findings, "\n" + "\n".join(findings)


def test_tests_are_named_by_what_they_hold() -> None:
    findings = named_by_what_they_hold(suite())
    assert not findings, "\n" + "\n".join(findings)


def test_offload_init_is_empty() -> None:
    assert (ROOT / "offload" / "__init__.py").read_text(encoding="utf-8") == ""


def test_events_and_errors_use_the_standard_library_only() -> None:
    for here in all_sources():
        if here.path in {f"offload/{name}.py" for name in ("events", "errors", "user_warnings", "job_rank")}:
            targets = {target for node in ast.walk(here.tree) for target in import_targets(node, here)}
            ours = {"offload.user_warnings.warn_user", "offload.job_rank.job_rank"}
            tops = {target.partition(".")[0] for target in targets - ours}
            assert tops <= set(sys.stdlib_module_names) | {"__future__"}, f"{here.path} imports {sorted(tops)}"


@pytest.mark.parametrize("module", ["zprof.cli", "offload.policy", "offload.events", "offload.errors"])
def test_zprof_and_what_it_needs_start_without_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit(', '.join(sorted({{'torch', 'zhooks', 'numba'}} & set(sys.modules))) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"import {module} brought in {done.stderr}"


def test_zprof_help_imports_no_torch() -> None:
    check = (
        "import sys; from zprof.cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules and 'torch was imported' or 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


# --- and would notice if it did not -----------------------------------------------------------------------------------

BROKEN: list[tuple[Rule, str, str, str]] = [
    (imports_point_down, "offload/store/store.py", "from zhooks import attach", ":1: offload imports zhooks.attach"),
    (imports_point_down, "offload/store/store.py", "def f():\n    import zprof.cli", ":2: offload imports zprof.cli"),
    (imports_point_down, "tools/zprof/top.py", "import zhooks.comm", ":1: zprof imports zhooks.comm"),
    (imports_point_down, "zhooks/unit/unit.py", "from zprof import cli", ":1: zhooks imports zprof.cli"),
    (packages_point_down, "zhooks/comm/p2p.py", "from zhooks.unit import Flat", ":1: zhooks.comm imports zhooks.unit.Flat"),
    (packages_point_down, "offload/device/cpu.py", "def f():\n    import offload.store", ":2: offload.device imports"),
    (packages_point_down, "zhooks/new/file.py", "", ":1: zhooks.new has no place"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "import torch.distributed as d\nd.all_reduce(t)", ":2: torch.dist"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "import torch\ntorch.distributed.barrier()", ":2: torch.dist"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "from torch import distributed as d\ny = d.isend", ":2: torch.dist"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "from torch.distributed import broadcast_object_list", ":1: torch"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "group._allgather_base(a, b)", ":1: ._allgather_base"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "import torch\ntorch.ops.c10d.allreduce_(t)", ":2: torch.ops.c10d"),
    (factories_name_device_and_dtype, "zhooks/unit/unit.py", "import torch\ntorch.tensor([1])", ":2: torch.tensor without dev"),
    (factories_name_device_and_dtype, "offload/pages.py", "from torch import zeros\nzeros(1, device='cpu')", ":2: torch.zeros"),
    (models_are_walked_by_tree, "zhooks/unit/unit.py", "list(model.parameters())", ":1: .parameters() past"),
    (models_are_walked_by_tree, "zhooks/unit/unit.py", "for m in self.model.modules(): ...", ":1: .modules() past"),
    (
        stores_only_in_their_file,
        "zhooks/comm/rendezvous.py",
        "from torch.distributed import distributed_c10d as c\nc._get_default_store().check(['key'])",
        ":2: torch.distributed.distributed_c10d._get_default_store",
    ),
    (errors_begin_with_a_sentence, "zhooks/attach.py", "f'{verb}: expected a model, found {kind}.'", ":1: ': expected'"),
    (stores_only_in_their_file, "zhooks/attach.py", "import torch.distributed as d\nd.TCPStore('h', 1)", ":2: torch.dist"),
    (hooks_only_in_their_files, "zhooks/unit/unit.py", "m.register_forward_pre_hook(f)", ":1: .register_forward_pre_hook"),
    (hooks_only_in_their_files, "zhooks/unit/unit.py", "m.register_full_backward_hook(f)", ":1: .register_full_backward"),
    (hooks_only_in_their_files, "zhooks/unit/unit.py", "p.register_post_accumulate_grad_hook(f)", ":1: .register_post_ac"),
    (hooks_only_in_their_files, "zhooks/unit/unit.py", "o.register_optimizer_step_pre_hook(f)", ":1: .register_optim"),
    (hooks_only_in_their_files, "zhooks/unit/unit.py", "t.register_hook(f)", ":1: .register_hook"),
    (
        hooks_only_in_their_files,
        "zhooks/unit/unit.py",
        "from torch.autograd.graph import saved_tensors_hooks as s",
        ":1: saved_tensors_hooks",
    ),
    (streams_only_in_device, "zhooks/run/runtime.py", "import torch\ns = torch.cuda.Stream()", ":2: torch.cuda.Stream"),
    (streams_only_in_device, "offload/memory/host_tier.py", "from torch.cuda import current_stream", ":1: torch.cuda"),
    (streams_only_in_device, "offload/memory/host_tier.py", "import torch\nwith torch.cuda.stream(s): pass", ":2: torch.cuda"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "import torch\ntorch.cuda.Event()", ":2: torch.cuda.Event"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "import torch\ntorch.cuda.streams.Stream()", ":2: torch.cuda.streams"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "import torch\ntorch.cuda.synchronize()", ":2: torch.cuda.synchronize"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "import torch\ntorch.accelerator.current_stream()", ":2: torch.acc"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "import torch.accelerator as a\na.synchronize()", ":2: torch.acc"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "grad.record_stream(stream)", ":1: .record_stream"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "stream.wait_event(event)", ":1: .wait_event"),
    (streams_only_in_device, "zhooks/grad/replicas.py", "host.copy_(grad, non_blocking=True)", ":1: non_blocking"),
    (devices_are_named_at_the_seam, "zhooks/plan/checks.py", "import torch\ntorch.cuda.is_available()", ":2: torch.cuda"),
    (devices_are_named_at_the_seam, "zhooks/plan/checks.py", "from torch import cuda", ":1: torch.cuda"),
    (devices_are_named_at_the_seam, "tools/zprof/analysis/run.py", "x = tensor.is_cuda", ":1: .is_cuda"),
    (devices_are_named_at_the_seam, "offload/disk/disk_tier.py", "here = device.type == 'cuda'", ':1: "cuda"'),
    (devices_are_named_at_the_seam, "offload/disk/disk_tier.py", "torch.device('cuda:0')", ':1: "cuda:0"'),
    (no_environment_is_read, "zhooks/layout/mesh.py", "import os\nos.environ['RANK']", ":2: os.environ"),
    (no_environment_is_read, "zhooks/layout/mesh.py", "from os import getenv as g\ng('RANK')", ":2: os.getenv"),
    (nothing_prints, "offload/disk/disk_tier.py", "def f():\n    print(1)", ":2: print"),
    (clocks_only_in_events_and_comm, "zhooks/unit/unit.py", "import time\nt = time.perf_counter()", ":2: time.perf"),
    (clocks_only_in_events_and_comm, "zhooks/unit/unit.py", "from time import monotonic", ":1: time.monotonic"),
    (clocks_only_in_events_and_comm, "zhooks/unit/unit.py", "import torch\ntorch.cuda.nvtx.mark('')", ":2: torch.cuda"),
    (names_mean_something, "zhooks/unit/unit.py", "class UnitManager: ...", ":1: UnitManager"),
    (names_mean_something, "zhooks/unit/unit.py", "def gather_helper(): ...", ":1: gather_helper"),
    (names_mean_something, "zhooks/unit/unit.py", "def f(io_utils): ...", ":1: io_utils"),
    (names_mean_something, "zhooks/utils.py", "", ":1: module zhooks.utils"),
]

SPACE = "class Space(Protocol):\n    size: int\n    def free(self, key: str) -> int: ...\n"
FIRST = "class First:\n    size = 1\n    def free(self, key: str) -> int: ...\n"


@pytest.mark.parametrize(
    "other",
    [
        "",
        "class Second(Space, Protocol): ...\n",
        "class Second:\n    def free(self, key): ...\n",
        "class Second:\n    size = free = 2\n",
        "class Second:\n    size = 2\n    def free(self): ...\n",
        "class Second:\n    size = 2\n    def free(self, key, at): ...\n",
        "class Second:\n    size = 2\n    @property\n    def free(self): ...\n",
    ],
)
def test_the_rule_of_protocols_notices_one_that_a_single_class_implements(other: str) -> None:
    findings = protocols_have_several_implementers([source("zhooks/unit/unit.py", SPACE + FIRST + other)])
    assert findings[0] == "zhooks/unit/unit.py:1: Space is a Protocol: expected two classes, found First"
    below = [source("offload/disk/scratch.py", SPACE + other), source("zhooks/unit/unit.py", FIRST)]
    assert protocols_have_several_implementers(below)[0].startswith("offload/disk/scratch.py:1: Space is a Protocol")
    above = [source("zhooks/unit/unit.py", SPACE), source("offload/disk/scratch.py", FIRST + FIRST.replace("First", "Second"))]
    assert protocols_have_several_implementers(above)[0].endswith("found none"), "offload cannot be given to zhooks' own"


@pytest.mark.parametrize(
    "other",
    [
        "class Second(First): ...\n",
        "class Second:\n    size: int = 2\n    def free(self, key, at=0): ...\n",
        "class Second:\n    def __init__(self):\n        self.size = 2\n    def free(self, *keys): ...\n",
        "class Second:\n    @property\n    def size(self): ...\n    def free(self, key): ...\n",
    ],
)
def test_the_rule_of_protocols_allows_what_several_implement_and_what_is_a_function(other: str) -> None:
    take = "class Take(Protocol):\n    def __call__(self, key: str) -> int: ...\n"
    assert protocols_have_several_implementers([source("zhooks/unit/unit.py", SPACE + FIRST + other + take)]) == []
    at, _, name = next(iter(ONE_IMPLEMENTER)).partition(" ")
    assert protocols_have_several_implementers([source(at, SPACE.replace("Space", name))]) == []


OWNER = source("zhooks/unit/flat.py", "class Flat:\n    _key: str\n    def __init__(self):\n        self._at = 0\n")


@pytest.mark.parametrize("text", ["flat._at", "self.flat._at", "flats[0]._key", "flat()._at", "flat._at = 0", "a.b._at.c"])
def test_the_rule_of_private_attributes_counts_each_use_of_what_is_another_modules(text: str) -> None:
    (finding,) = private_attributes_are_for_their_module([OWNER, source("zhooks/run/new.py", f"x = 1\n{text}")])
    assert finding.startswith("zhooks.run uses 1 private attributes of others, at most 0 are allowed: zhooks/run/new.py:2: ")
    place, most = "zprof", PRIVATE_USES["zprof"]
    for count in (most, most + 1):
        uses = source(f"{place.replace('.', '/')}/new.py", f"{text}\n" * count)
        assert len(private_attributes_are_for_their_module([OWNER, uses])) == (count if count > most else 0)


@pytest.mark.parametrize(
    "text",
    [
        "self._at", "cls._at", "super()._at", "import torch\ntorch._at", "parameter._version", "row._replace(key=1)",
        "class Other:\n    _at = 0\ndef f(other):\n    return other._at", "def f(self, other):\n    self._at = other._at",
    ],
)  # fmt: skip
def test_the_rule_of_private_attributes_counts_nothing_of_a_modules_own_or_of_a_library(text: str) -> None:
    assert private_attributes_are_for_their_module([OWNER, source("zhooks/run/new.py", text)]) == []


@pytest.mark.parametrize(("rule", "path", "text", "expected"), BROKEN)
def test_each_rule_names_file_and_line_of_a_source_that_breaks_it(
    rule: Rule, path: str, text: str, expected: str
) -> None:
    findings = rule([source(path, text)])
    assert any(finding.startswith(f"{path}{expected}") for finding in findings), findings


@pytest.mark.parametrize("text", ["from zhooks import b", "import zhooks.b", "from . import b", "from .b import x"])
def test_the_cycle_rule_notices_each_way_of_writing_an_import(text: str) -> None:
    package = source("zhooks/__init__.py", "")
    back = source("zhooks/b.py", "try:\n    from zhooks.a import y\nexcept ImportError:\n    pass")
    findings = no_import_cycles([package, source("zhooks/a.py", text), back])
    assert findings == ["zhooks/b.py:2: import cycle zhooks.a -> zhooks.b -> zhooks.a"]


def test_the_entry_rule_notices_who_goes_past_it() -> None:
    package = [source("zhooks/comm/__init__.py", "from zhooks.comm.p2p import Ring"), source("zhooks/comm/p2p.py", "")]
    assert packages_have_one_entry([*package, source("zhooks/unit.py", "from zhooks.comm import Ring")]) == []
    for text in ("from zhooks.comm.p2p import Ring", "import zhooks.comm.p2p", "from zhooks.comm import p2p"):
        findings = packages_have_one_entry([*package, source("zhooks/unit.py", text)])
        assert len(findings) == 1 and "past what is exported by zhooks.comm" in findings[0]


OURS = [
    source("zhooks/attach.py", "class Attachment:\n    def __init__(self):\n        self._units = self._store = 1"),
    source("zhooks/unit/flat.py", "def _laid_out(): ...\nclass Flat:\n    def f(self, tensor):\n        tensor._at = 0"),
    source("offload/store/store.py", "class Store:\n    def f(self):\n        self._store = self._version = 1"),
]


@pytest.mark.parametrize(
    ("path", "text", "whose"),
    [
        ("tests/zhooks/grad/test_a.py", "tensor._at", ":1: _at is private to zhooks.unit"),
        ("tests/zhooks/grad/test_a.py", "found.tensors[0]._at", ":1: _at is private to zhooks.unit"),
        ("tests/zhooks/grad/test_a.py", "from zhooks.unit.flat import _laid_out", ":1: _laid_out is private to"),
        ("tests/zhooks/grad/test_a.py", "import zhooks.unit.flat as f\nf._laid_out()", ":2: _laid_out is private to"),
        ("tests/zhooks/grad/test_a.py", "patched.setattr('zhooks.unit.flat._laid_out', 1)", ":1: _laid_out is"),
        ("tests/zhooks/grad/test_a.py", "patched.setattr(flat, '_at', 1)", ":1: _at is private to zhooks.unit"),
        ("tests/zhooks/grad/test_a.py", "RUN = \"\"\"\nattachment._units\n\"\"\"", ":1: _units is private to zhooks.attach"),
        ("tests/offload/store/test_a.py", "run.attachment._store", ":1: _store is private to zhooks.attach"),
        ("tests/test_gpu.py", "store._store", ":1: _store is private to offload.store, zhooks.attach"),
    ],
)
def test_the_rule_of_private_names_notices_who_reaches_past_an_api(path: str, text: str, whose: str) -> None:
    (finding,) = private_names_are_for_own_tests([*OURS, source(path, text)])
    assert finding.startswith(f"{path}{whose}")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (INSIDE, "attachment._units"),
        ("tests/zhooks/attach/test_a.py", "attachment._units"),
        ("tests/offload/store/test_a.py", "store._store"),
        ("tests/zhooks/unit/test_a.py", "patched.setattr('zhooks.unit.flat._laid_out', tensor._at)"),
        ("tests/zhooks/grad/test_a.py", "import torch\ntorch._at(parameter._version, row._replace(key=1))"),
        ("tests/zhooks/grad/test_a.py", "class Fake:\n    def __init__(self):\n        self._at = 0\nFake()._at"),
    ],
)
def test_a_test_may_use_what_is_private_to_what_it_tests_and_to_others_than_us(path: str, text: str) -> None:
    assert private_names_are_for_own_tests([*OURS, source(path, text)]) == []


@pytest.mark.parametrize(
    "text",
    [
        "from tests.zhooks.unit.test_tiers import run", "from tests.zhooks.unit import test_tiers",
        "def f():\n    import tests.zhooks.unit.test_tiers", "from .test_tiers import run", "from tests.conftest import ranks",
        "pool.run('tests.zhooks.unit.test_tiers:run')", "import_module('tests.zhooks.unit.test_tiers')",
        "PROGRAM = 'import torch; from tests.conftest import ranks'",
    ],
)  # fmt: skip
def test_the_rule_of_shared_things_notices_each_way_of_importing_a_test(text: str) -> None:
    (finding,) = shared_things_are_no_tests([source("tests/zhooks/unit/test_faults.py", text)])
    assert "is a test's file" in finding
    sound = "from tests.support.ranks import Pool\nimport torch.testing\npool.run('tests.zprof.test_a:job')"
    assert not shared_things_are_no_tests([source("tests/zprof/test_a.py", sound)])


def test_the_rule_of_names_notices_an_episode() -> None:
    (finding,) = named_by_what_they_hold([source("tests/zhooks/unit/test_tiers_review.py", "")])
    assert finding.startswith("tests/zhooks/unit/test_tiers_review.py:1: ") and finding.endswith("found review")
    assert not named_by_what_they_hold([source("tests/zhooks/unit/test_newest.py", ""), source("tests/support/user.py", "")])


SOUND: list[tuple[Rule, str, str]] = [
    (imports_point_down, "tools/zprof/top.py", "from offload.events import Event"),
    (imports_point_down, "tools/zprof/commands/simulate.py", "import zhooks"),
    (imports_point_down, "zhooks/unit/unit.py", "from offload import policy"),
    (packages_point_down, "zhooks/unit/unit.py", "from zhooks.comm import Call\nfrom zhooks.unit.flat import Flat"),
    (collectives_only_in_comm, "zhooks/comm/p2p.py", "import torch.distributed as d\nd.all_reduce(t)"),
    (collectives_only_in_comm, "zhooks/grad/replicas.py", "comm.all_reduce(t)\nimport torch.distributed as d\nd.get_rank()"),
    (stores_only_in_their_file, "zhooks/comm/group_store.py", "from torch.distributed import TCPStore"),
    (stores_only_in_their_file, "zhooks/unit/unit.py", "from offload.store import Store\nstore.check()"),
    (hooks_only_in_their_files, "zhooks/run/hooks.py", "m.register_forward_hook(f)"),
    (hooks_only_in_their_files, "zhooks/tensor/functions.py", "overridden = {Tensor.register_hook: f}"),
    (streams_only_in_device, "offload/device/cuda.py", "import torch\ntorch.cuda.Stream()"),
    (streams_only_in_device, "offload/disk/disk_tier.py", "import threading\nthreading.Event().wait()\nticket.synchronize()"),
    (streams_only_in_device, "zhooks/report/memory.py", "import torch\ntorch.cuda.memory_stats(device)"),
    (devices_are_named_at_the_seam, "offload/device/cuda.py", "import torch\ntorch.cuda.memory_stats(device)"),
    (devices_are_named_at_the_seam, "zhooks/plan/checks.py", 'raise Error("expected parameters on cuda")'),
    (no_environment_is_read, "zhooks/layout/mesh.py", "import os\nos.path.join('a', os.sep)"),
    (clocks_only_in_events_and_comm, "offload/events.py", "import time\ntime.perf_counter_ns()"),
    (no_import_cycles, "zhooks/a.py", "def f():\n    import zhooks.a\nif TYPE_CHECKING:\n    import zhooks.a"),
    (names_mean_something, "zhooks/unit/unit.py", "import torch.utils\nutilisation = torch.utils.swap_tensors"),
]


@pytest.mark.parametrize(("rule", "path", "text"), SOUND)
def test_no_rule_complains_of_a_sound_source(rule: Rule, path: str, text: str) -> None:
    assert rule([source(path, text)]) == []
