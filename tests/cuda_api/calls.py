"""What zhooks and zprof call of CUDA, called: run by ``__main__.py`` in the CUDA build's interpreter, over the stubs.

A line for each check says that it ran, or how it failed. No check may depend on a value that a kernel writes.
"""

from __future__ import annotations

import ast
import faulthandler
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import zhooks
import zprof
from offload.budget import Budget
from offload.device import open_device
from offload.disk import DiskFile
from offload.errors import CapabilityError
from offload.memory import HostPool
from offload.store import Store
from offload.tier import Tier
from zprof.cli import main as zprof_main
from zprof.trace.reader import Trace

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("offload", "zhooks", "tools/zprof")
CUDA = torch.device("cuda")

CHECKS: dict[str, Callable[[Path], None]] = {}
Check = Callable[[Path], None]


def check(name: str) -> Callable[[Check], Check]:
    def known(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return known


# ---- what of torch.cuda the packages name -----------------------------------------------------------------------------------


def named_in(file: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every ``torch.cuda.x.y`` in a file's code; the longest, not those it begins with."""
    tree = ast.parse(file.read_text())
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            below: ast.expr = node
            while isinstance(below, ast.Attribute):
                below = below.value
                inner.add(id(below))
            name = ast.unparse(node)
            if name.startswith("torch.cuda.") and isinstance(below, ast.Name):
                yield node.lineno, name


NAMED = {
    file: dict(found)
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
    if "torch.cuda." in file.read_text() and (found := list(named_in(file)))
}
RAN: set[tuple[str, int]] = set()


def traced(frame: FrameType, event: str, argument: Any) -> Any:
    """Remember the lines that ran, of the files that name torch.cuda alone."""
    if frame.f_code.co_filename not in _TRACED:
        return None
    RAN.add((frame.f_code.co_filename, frame.f_lineno))
    return traced


_TRACED = {str(file) for file in NAMED}


@check("every name of torch.cuda in the packages exists")
def _(folder: Path) -> None:
    missing = []
    for file, lines in NAMED.items():
        for line, name in lines.items():
            found: Any = torch
            for attribute in name.split(".")[1:]:
                found = getattr(found, attribute, None)
            if found is None:
                missing.append(f"{file.relative_to(ROOT)}:{line} {name}")
    assert not missing, missing


# ---- training ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 64)).cuda()


def steps(under: nn.Module, optimizer: torch.optim.Optimizer, number: int = 2, *, clip: bool = True) -> None:
    for _ in range(number):
        x = torch.randint(0, 64, (4, 16)).cuda()
        F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten()).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(under.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def tiers(tier: str, **optimizer: Any) -> dict[str, Any]:
    return {"parameter": {"tier": tier}, "gradient": {"tier": tier}, "optimizer": {"tier": tier, **optimizer}}


POLICIES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "all on host": tiers("host"),
    "all on disk": tiers("disk"),
    "updates on the host": tiers("host", compute="host"),
    "activations on host, recomputed": {"activation": {"tier": "host", "checkpoint": "unit", "min_bytes": 64}},
    "activations on disk": {"activation": {"tier": "disk", "min_bytes": 64}},
    "an arena for states": {"device": {"arena": "states"}},
    "an arena for all": {"device": {"arena": "all"}, "activation": {"checkpoint": "unit"}},
    "updates in backward": {"stage": 3, **tiers("host", overlap=True)},
    "bf16": {"precision": {"param": "bf16", "output": "fp32"}},
    "fp16 on host": {"precision": {"param": "fp16", "output": "fp32"}, **tiers("host")},
}


@contextmanager
def group(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trains(policy: dict[str, Any], folder: Path) -> None:
    """Two steps, another policy, two steps, saved and loaded, detached."""
    policy = {"units": {"min_numel": 0}, "disk": {"path": str(folder / "disk")}, **policy}
    clip = not policy.get("optimizer", {}).get("overlap", False)
    under = model()
    attachment = zhooks.attach(under, policy=policy)
    optimizer = torch.optim.AdamW(under.parameters(), lr=1e-2)
    steps(under, optimizer, clip=clip)
    str(attachment.memory())
    attachment.apply({**policy, "stage": 3, **tiers("host")})
    steps(under, optimizer, clip=clip)
    attachment.apply(policy)
    attachment.save(folder / "saved", optimizer)
    attachment.load(folder / "saved", optimizer)
    steps(under, optimizer, 1, clip=clip)
    attachment.detach()
    torch.cuda.synchronize()
    assert all(type(param) is nn.Parameter and param.is_cuda for param in under.parameters())


def _policies() -> None:
    for name, policy in POLICIES.items():

        def alone(folder: Path, policy: dict[str, Any] = policy) -> None:
            trains(policy, folder)

        def over_nccl(folder: Path, policy: dict[str, Any] = policy) -> None:
            with group("nccl"):
                trains(policy, folder)

        CHECKS[f"policy: {name}"] = alone
        CHECKS[f"policy over NCCL: {name}"] = over_nccl


_policies()


# ---- memory -----------------------------------------------------------------------------------------------------------------


@check("pinned memory: mapped pages are registered once, and a second time is an error in CUDA's words")
def _(folder: Path) -> None:
    seam = open_device(CUDA)
    mapped = seam.map_host(1 << 20)
    memory = mapped.tensor(0, 1 << 20)
    seam.pin(memory)
    assert memory.is_pinned()
    with raises(CapabilityError, "already mapped"):
        seam.pin(memory)
    seam.unpin(memory)
    assert not memory.is_pinned()
    with raises(AssertionError, "not locked"):
        seam.unpin(memory)
    seam.close()


@check("pinned memory: of torch's own allocator, by the store's tiers")
def _(folder: Path) -> None:
    seam = open_device(CUDA)
    host = HostPool(seam)
    store = Store(seam, host, lambda: DiskFile(folder), Budget({}), staging_nbytes=1 << 20)
    for tier in Tier:
        block = store.put(f"a block on {tier}", 1 << 12, torch.float32, tier)
        store.change(block, torch.full((1 << 12,), 3.0).cuda(), add=False)
        store.flush()
        lease = store.fetch(block, Tier.DEVICE)
        assert lease.wait().device.type == "cuda"
        store.close(block)
    store.shut()
    assert torch.empty(1 << 12).pin_memory().is_pinned()


@check("device: memory, address, statistics, generators, streams and events")
def _(folder: Path) -> None:
    seam = open_device(CUDA)
    free, total = seam.memory()
    assert 0 < free <= total and seam.pci_address() == "0000:01:00.0" and seam.used()[0] >= 0
    assert not torch.cuda.is_current_stream_capturing()
    with raises(CapabilityError, "own memory"):
        open_device(CUDA, addresses_host=True)
    side = torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        begin.record()
        torch.empty(4).cuda().record_stream(side)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == 1.0
    seam.close()


@check("fp16: GradScaler over a tier")
def _(folder: Path) -> None:
    under = model()
    attachment = zhooks.attach(under, policy={"precision": {"param": "fp16", "output": "fp32"}, **tiers("host")})
    optimizer, scaler = torch.optim.AdamW(under.parameters(), fused=True), torch.amp.GradScaler("cuda")
    x = torch.randint(0, 64, (4, 16)).cuda()
    scaler.scale(under(x).float().square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(under.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    attachment.detach()


# ---- zprof ------------------------------------------------------------------------------------------------------------------


def said_by(*command: object, code: int = 0) -> str:
    """What a command of zprof prints."""
    done = CliRunner().invoke(zprof_main, [str(word) for word in command])
    assert done.exit_code == code, (command[0], done.exit_code, done.output[-400:], done.exception)
    return done.output


def _recorded(level: str) -> Check:
    def ran(folder: Path) -> None:
        run = folder / "run.zprof"
        under = model()
        with zprof.record(run, level=level, interval_s=0.01, ops_steps="2:3" if level == "ops" else None):  # type: ignore[arg-type]
            attachment = zhooks.attach(under, policy={"units": {"min_numel": 0}, **tiers("host")})
            steps(under, torch.optim.AdamW(under.parameters()), 3)
            time.sleep(0.2)
            attachment.detach()
        trace = Trace.open(run)
        assert sum(len(rows) for rows in trace.chunks()) == trace.count
        assert {"cuda allocated", "cuda reserved"} <= set(trace.strings)
        assert "cuda" in said_by("report", run)
        if level != "events":
            [note] = trace.notes("snapshot")
            assert note.body["segments"]
            assert not torch._C._cuda_isHistoryEnabled()
            assert said_by("frag", run)

    return ran


CHECKS["zprof records events, and samples the allocator"] = _recorded("events")
CHECKS["zprof records allocations, and the allocator's history"] = _recorded("alloc")
CHECKS["zprof records operators"] = _recorded("ops")


@check("zprof frag reads the snapshot that torch writes")
def _(folder: Path) -> None:
    torch.cuda.memory._record_memory_history("all", max_entries=1000)
    kept = [torch.empty(3 << 20, dtype=torch.uint8, device=CUDA) for _ in range(8)]
    del kept[::2]
    torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(None)
    said_by("frag", folder / "snapshot.pickle")
    said_by("frag", folder / "snapshot.pickle", "--need", "64MiB", "--limit", "1GiB")
    said_by("frag", folder / "snapshot.pickle", "--need", "2GiB", "--limit", "1GiB", code=3)


FAILS = """
import torch, zhooks
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
zhooks.attach(model, policy={"units": {"min_numel": 0}})
optimizer = torch.optim.AdamW(model.parameters())
for batch in (64, 1 << 16):
    model(torch.empty(batch, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@check("zprof oom explains an out of memory of the caching allocator")
def _(folder: Path) -> None:
    (folder / "train.py").write_text(FAILS)
    command = [sys.executable, "-m", "zprof", "run", "--level", "alloc", "train.py"]
    failed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert failed.returncode == 1, failed.stderr
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB" in failed.stderr, failed.stderr
    [note] = Trace.open(folder / "run.0.zprof").notes("oom")
    assert (note.body["kind"], note.body["nbytes"]) == ("cuda", 256 << 20), note.body
    assert "activation" in said_by("oom", folder / "run.0.zprof")
    said_by("frag", folder / "run.0.zprof")


@contextmanager
def raises(kind: type[BaseException], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def main() -> None:
    faulthandler.enable()
    wanted = sys.argv[1:]
    if not torch.version.cuda or torch.cuda.get_device_name() != "Stub of a CUDA device":
        sys.exit(f"torch {torch.__version__} does not compute over the stubs")
    failed = 0
    threading.settrace(traced)
    sys.settrace(traced)
    for name, function in CHECKS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        print(f"{name}: ", end="", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                function(Path(folder))
        except Exception as error:
            failed += 1
            print(f"failed: {type(error).__name__}: {error}", flush=True)
            if wanted:
                traceback.print_exc()
        else:
            print("ran", flush=True)
    sys.settrace(None)
    threading.settrace(None)
    lines = [(file, line, name) for file, found in NAMED.items() for line, name in found.items()]
    not_run = [(file, line, name) for file, line, name in lines if (str(file), line) not in RAN]
    print(f"of the {len(lines)} lines that name torch.cuda {len(lines) - len(not_run)} ran" + (", all but" if not_run else ""))
    for file, line, name in not_run:
        print(f"  {file.relative_to(ROOT)}:{line} {name}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
