"""The house keeps its rules, and each rule would notice if it did not."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.house import (
    ROOT,
    Rule,
    clocks_only_in_events_and_comm,
    collectives_only_in_comm,
    hooks_only_in_their_rooms,
    house,
    import_targets,
    imports_point_down,
    names_mean_something,
    no_environment_is_read,
    no_import_cycles,
    nothing_prints,
    source,
    streams_only_in_device,
)


def keeps(rule: Rule) -> None:
    findings = rule(house())
    assert not findings, "\n" + "\n".join(findings)


def test_imports_point_down() -> None:
    keeps(imports_point_down)


def test_no_module_imports_itself_round_a_corner() -> None:
    keeps(no_import_cycles)


def test_collectives_are_called_only_in_comm() -> None:
    keeps(collectives_only_in_comm)


def test_hooks_are_installed_only_in_their_rooms() -> None:
    keeps(hooks_only_in_their_rooms)


def test_streams_are_touched_only_in_device() -> None:
    keeps(streams_only_in_device)


def test_no_room_reads_an_environment_variable() -> None:
    keeps(no_environment_is_read)


def test_no_room_prints() -> None:
    keeps(nothing_prints)


def test_clocks_are_read_only_in_events_and_comm() -> None:
    keeps(clocks_only_in_events_and_comm)


def test_no_name_could_mean_anything() -> None:
    keeps(names_mean_something)


def test_offload_init_is_empty() -> None:
    assert (ROOT / "offload" / "__init__.py").read_text(encoding="utf-8") == ""


def test_events_and_errors_use_the_standard_library_only() -> None:
    for here in house():
        if here.path in ("offload/events.py", "offload/errors.py"):
            tops = {target.partition(".")[0] for node in ast.walk(here.tree) for target in import_targets(node, here)}
            assert tops <= set(sys.stdlib_module_names) | {"__future__"}, f"{here.path} imports {sorted(tops)}"


@pytest.mark.parametrize("module", ["zprof.cli", "offload.policy", "offload.events", "offload.errors"])
def test_zprof_and_what_it_needs_start_without_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit(', '.join(sorted({{'torch', 'zhooks', 'numba'}} & set(sys.modules))) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"import {module} brought in {done.stderr}"


def test_zprof_help_imports_no_torch() -> None:
    check = (
        "import sys; from zprof.cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules and 'torch was imported' or 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


# --- and would notice if it did not -----------------------------------------------------------------------------------

BROKEN: list[tuple[Rule, str, str, str]] = [
    (imports_point_down, "offload/store.py", "from zhooks import attach", ":1: offload imports zhooks.attach"),
    (imports_point_down, "offload/store.py", "def f():\n    import zprof.cli", ":2: offload imports zprof.cli"),
    (imports_point_down, "tools/zprof/top.py", "import zhooks.comm", ":1: zprof imports zhooks.comm"),
    (imports_point_down, "zhooks/unit.py", "from zprof import cli", ":1: zhooks imports zprof.cli"),
    (collectives_only_in_comm, "zhooks/grad.py", "import torch.distributed as d\nd.all_reduce(t)", ":2: torch.dist"),
    (collectives_only_in_comm, "zhooks/grad.py", "import torch\ntorch.distributed.barrier()", ":2: torch.dist"),
    (collectives_only_in_comm, "zhooks/grad.py", "from torch import distributed as d\ny = d.isend", ":2: torch.dist"),
    (collectives_only_in_comm, "zhooks/grad.py", "from torch.distributed import broadcast_object_list", ":1: torch"),
    (collectives_only_in_comm, "zhooks/grad.py", "group._allgather_base(a, b)", ":1: ._allgather_base"),
    (collectives_only_in_comm, "zhooks/grad.py", "import torch\ntorch.ops.c10d.allreduce_(t)", ":2: torch.ops.c10d"),
    (hooks_only_in_their_rooms, "zhooks/unit.py", "m.register_forward_pre_hook(f)", ":1: .register_forward_pre_hook"),
    (hooks_only_in_their_rooms, "zhooks/unit.py", "m.register_full_backward_hook(f)", ":1: .register_full_backward"),
    (hooks_only_in_their_rooms, "zhooks/unit.py", "p.register_post_accumulate_grad_hook(f)", ":1: .register_post_ac"),
    (hooks_only_in_their_rooms, "zhooks/unit.py", "o.register_optimizer_step_pre_hook(f)", ":1: .register_optim"),
    (hooks_only_in_their_rooms, "zhooks/unit.py", "t.register_hook(f)", ":1: .register_hook"),
    (
        hooks_only_in_their_rooms,
        "zhooks/unit.py",
        "from torch.autograd.graph import saved_tensors_hooks as s",
        ":1: saved_tensors_hooks",
    ),
    (streams_only_in_device, "zhooks/runtime.py", "import torch\ns = torch.cuda.Stream()", ":2: torch.cuda.Stream"),
    (streams_only_in_device, "offload/host.py", "from torch.cuda import current_stream", ":1: torch.cuda"),
    (streams_only_in_device, "offload/host.py", "import torch\nwith torch.cuda.stream(s): pass", ":2: torch.cuda"),
    (streams_only_in_device, "zhooks/grad.py", "import torch\ntorch.cuda.Event()", ":2: torch.cuda.Event"),
    (streams_only_in_device, "zhooks/grad.py", "import torch\ntorch.cuda.streams.Stream()", ":2: torch.cuda.streams"),
    (streams_only_in_device, "zhooks/grad.py", "import torch\ntorch.cuda.synchronize()", ":2: torch.cuda.synchronize"),
    (streams_only_in_device, "zhooks/grad.py", "import torch\ntorch.accelerator.current_stream()", ":2: torch.acc"),
    (streams_only_in_device, "zhooks/grad.py", "import torch.accelerator as a\na.synchronize()", ":2: torch.acc"),
    (streams_only_in_device, "zhooks/grad.py", "grad.record_stream(stream)", ":1: .record_stream"),
    (streams_only_in_device, "zhooks/grad.py", "stream.wait_event(event)", ":1: .wait_event"),
    (streams_only_in_device, "zhooks/grad.py", "host.copy_(grad, non_blocking=True)", ":1: non_blocking"),
    (no_environment_is_read, "zhooks/mesh.py", "import os\nos.environ['RANK']", ":2: os.environ"),
    (no_environment_is_read, "zhooks/mesh.py", "from os import getenv as g\ng('RANK')", ":2: os.getenv"),
    (nothing_prints, "offload/disk.py", "def f():\n    print(1)", ":2: print"),
    (clocks_only_in_events_and_comm, "zhooks/unit.py", "import time\nt = time.perf_counter()", ":2: time.perf"),
    (clocks_only_in_events_and_comm, "zhooks/unit.py", "from time import monotonic", ":1: time.monotonic"),
    (clocks_only_in_events_and_comm, "zhooks/unit.py", "import torch\ntorch.cuda.nvtx.mark('')", ":2: torch.cuda"),
    (names_mean_something, "zhooks/unit.py", "class UnitManager: ...", ":1: UnitManager"),
    (names_mean_something, "zhooks/unit.py", "def gather_helper(): ...", ":1: gather_helper"),
    (names_mean_something, "zhooks/unit.py", "def f(io_utils): ...", ":1: io_utils"),
    (names_mean_something, "zhooks/utils.py", "", ":1: module zhooks.utils"),
]


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


SOUND: list[tuple[Rule, str, str]] = [
    (imports_point_down, "tools/zprof/top.py", "from offload.events import Event"),
    (imports_point_down, "zhooks/unit.py", "from offload import policy"),
    (collectives_only_in_comm, "zhooks/comm_shm.py", "import torch.distributed as d\nd.all_reduce(t)"),
    (collectives_only_in_comm, "zhooks/grad.py", "comm.all_reduce(t)\nimport torch.distributed as d\nd.get_rank()"),
    (hooks_only_in_their_rooms, "zhooks/hooks.py", "m.register_forward_hook(f)"),
    (hooks_only_in_their_rooms, "zhooks/sharded.py", "overridden = {Tensor.register_hook: f}"),
    (streams_only_in_device, "offload/device.py", "import torch\ntorch.cuda.Stream()"),
    (streams_only_in_device, "offload/disk.py", "import threading\nthreading.Event().wait()\nticket.synchronize()"),
    (streams_only_in_device, "zhooks/memory.py", "import torch\ntorch.cuda.memory_stats(device)"),
    (no_environment_is_read, "zhooks/mesh.py", "import os\nos.path.join('a', os.sep)"),
    (clocks_only_in_events_and_comm, "offload/events.py", "import time\ntime.perf_counter_ns()"),
    (no_import_cycles, "zhooks/a.py", "def f():\n    import zhooks.a\nif TYPE_CHECKING:\n    import zhooks.a"),
    (names_mean_something, "zhooks/unit.py", "import torch.utils\nutilisation = torch.utils.swap_tensors"),
]


@pytest.mark.parametrize(("rule", "path", "text"), SOUND)
def test_no_rule_complains_of_a_sound_source(rule: Rule, path: str, text: str) -> None:
    assert rule([source(path, text)]) == []
