"""A torch that lacks what zprof takes of it, private names above all: the script runs, the rest is recorded, and it is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.modules import module as registry

import zprof
from zprof.show.report.findings import report
from zprof.trace.reader import Trace

#: A package that is called torch, of which nothing is where zprof looks for it.
FAKE = "__version__ = '2.99'\n"
SCRIPT = "import torch\nprint(torch.__version__)\nprint('done')\n"

NAMES = """
import json, sys, warnings
import torch
from torch import nn
from torch.utils.data import dataloader

PARTS = ("mode", "marks", "modules", "tracker", "hooks", "stacks", "allocator_history", "collectives", "optimizer_steps",
         "loaders")
NAMES = {
    "_storage_address": torch._C, "_current_graph_task_id": torch._C, "_current_autograd_node": torch._C,
    "_get_sequence_nr": torch._C._autograd, "_disabled_torch_dispatch_impl": torch._C,
    "_push_on_torch_dispatch_stack": torch._C, "eval_frame": torch._C._dynamo,
    "is_functorch_wrapped_tensor": torch._C._functorch, "_cuda_isHistoryEnabled": torch._C,
    "_BaseDataLoaderIter": dataloader, "_distributed_c10d": torch._C, "_after_ADInplaceOrView_keyset": torch._C,
}
import zprof

said = {}
for name, owner in NAMES.items():
    for part in PARTS:
        sys.modules.pop(f"zprof.recording.{part}", None)
    if not hasattr(owner, name):
        continue
    held = getattr(owner, name)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        delattr(owner, name)
        try:
            recorder = zprof.Recorder(f"{name}.zprof", level="alloc", nvml="off").listen()
        finally:
            setattr(owner, name, held)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        recorder.close()
    said[name] = [str(each.message) for each in heard if "zprof" in str(each.message)]
print(json.dumps(said))
"""


def test_the_import_of_a_torch_that_zprof_does_not_know_succeeds(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKE)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "zprof", "run", "--level", "alloc", "--nvml", "off", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2.99\ndone\n"), done.stderr
    assert "Traceback" not in done.stderr
    trace = Trace.open(tmp_path / "run.0.zprof")
    lacking = [str(note.body["what"]) for note in trace.notes("lacking")]
    parts = ("storages are", "steps of optimizers are", "what steps compute is")
    assert lacking == [f"{what} not recorded" for what in parts]
    [run] = report([str(tmp_path / "run.0.zprof")])["runs"]
    for what in lacking:
        assert any(line.startswith(f"{what}: not with torch 2.99: ") for line in run["not_recorded"]), run["not_recorded"]
    assert run["measures"]["device.peak"] is None and "not followed, not with torch 2.99" in run["unseen"]["device.peak"]


@pytest.mark.slow
def test_a_name_that_torch_lacks_costs_what_needs_it_and_is_said_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    goes_on = {"eval_frame", "is_functorch_wrapped_tensor", "_cuda_isHistoryEnabled"}
    for name, heard in said.items():
        trace = Trace.open(tmp_path / f"{name}.zprof")
        assert sum(len(rows) for rows in trace.chunks()) and "step" in trace.strings, name
        whole = trace.notes("lacking") == trace.notes("storages") == []
        if name in goes_on:
            assert whole and heard == [], (name, heard)
        elif name in ("_distributed_c10d", "_after_ADInplaceOrView_keyset", "_BaseDataLoaderIter"):
            what = "waits for data loaders" if name == "_BaseDataLoaderIter" else "collectives"
            assert whole and len(heard) == 1 and f"{what} are not recorded" in heard[0], (name, heard)
        else:
            # Once each: of storages, and of what is computed.
            lost = {each.partition(" not recorded")[0] for each in heard}
            assert not whole and len(lost) == len(heard) > 0 and all(name in each for each in heard), (name, heard)


def test_hooks_of_modules_that_torch_takes_only_in_part_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lacks(*args: object, **options: object) -> None:
        raise TypeError("no always_call")

    hooks = registry._global_forward_pre_hooks
    before = list(hooks)
    monkeypatch.setattr(registry, "register_module_forward_hook", lacks)
    with pytest.warns(RuntimeWarning, match="storages are not recorded"), zprof.record(tmp_path / "run.zprof", level="alloc"):
        during = list(hooks)
    assert during == before
