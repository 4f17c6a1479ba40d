"""Recordings on an accelerator: its streams, copies, waits and memory are those that the device itself states.

On the asynchronous accelerator of the tests, whose events' times follow from the cost of what it does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from torch import nn

import zhooks
import zprof
from tests.support import forked
from tests.support.on_ranks import folder, on_accelerators, place
from tests.support.schedules import native
from zprof.analysis.analysis import Analysis
from zprof.cli import main
from zprof.trace.reader import Trace

MIB = 1 << 20
#: Bytes that a copy moves in a microsecond, and what it takes in addition.
RATE, COPY_US = 100.0, 5.0


def layers(width: int, number: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number))).to(f"accel:{native().current_device()}")


def train(model: nn.Module, width: int, steps: int, **policy: Any) -> None:
    attachment = zhooks.attach(model, policy={"units": {"classes": ["Linear"], "min_numel": 0}, **policy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.ones(8, width, device=next(model.parameters()).device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    attachment.detach()


@contextmanager
def slow_copies() -> Iterator[None]:
    native().set_copy_nbytes_per_us(RATE, RATE)
    try:
        yield
    finally:
        native().set_copy_nbytes_per_us(25000.0, 25000.0)


@on_accelerators(2)
def test_a_recording_has_the_streams_copies_and_waits_of_training() -> None:
    rank, _ = place()
    with folder() as at, slow_copies():
        path = at / f"{rank}.zprof"
        with zprof.record(path, nvml="off"):
            train(layers(64, 4), 64, 3, stage=3, parameter={"tier": "host"}, optimizer={"tier": "host"})
        trace = Trace.open(path)
        assert trace.device == f"accel:{rank}"
        found = Analysis.of(trace)
        assert set(found.lanes.values()) == {"compute", "gather", "reduce", "copy h2d", "copy d2h"}
        of = found.table.of
        for what in ("copy h2d", "copy d2h"):
            copies = of(what)
            assert {found.lanes[lane] for lane in copies.thread.tolist()} == {what}
            # Each is as long as the device took for its bytes, to the microsecond in which the host queues it.
            took_us = copies.duration_ns / 1e3 - copies.nbytes / RATE - COPY_US
            assert len(took_us) > 0 and ((took_us >= -0.01) & (took_us <= 1.01)).all()
        for what, number in (("gather", 3 * 6), ("reduce", 3 * 4), ("forward", 3), ("backward", 3), ("wait gather", 3)):
            spans = of(what)
            assert len(spans.duration_ns) >= number and (spans.duration_ns > 0).all(), what
        assert {found.lanes[lane] for lane in of("wait gather").thread.tolist()} == {"compute"}
        assert found.covered.waits() is None and found.covered.queued("gather") is None
        trace.close()


@on_accelerators(2)
def test_the_memory_of_a_recording_is_to_the_byte_what_the_allocator_was_asked_for() -> None:
    rank, _ = place()
    with folder() as at:
        path = at / f"{rank}.zprof"
        torch.accelerator.reset_peak_memory_stats()
        with zprof.record(path, level="alloc", nvml="off"):
            train(layers(64, 4), 64, 3, stage=3, optimizer={"tier": "host"})
            stats = torch.accelerator.memory_stats()
        trace = Trace.open(path)
        ledger = Analysis.of(trace).ledger
        assert ledger.total(ledger.peak("device"), "device") == stats["requested_bytes.all.peak"]
        # Tensors of the CPU are the host's, where there is such a device.
        assert ledger.total(ledger.peak("host"), "host") >= 4 * (64 * 64 + 64) * 4
        (_, allocated) = ledger.samples("cuda allocated")[f"accel:{rank}"]
        assert int(allocated.max()) <= stats["allocated_bytes.all.peak"]
        trace.close()


@on_accelerators(1)
def test_a_recording_has_the_history_and_the_fragmentation_of_the_devices_allocator() -> None:
    with folder() as at:
        path = at / "run.zprof"
        torch.accelerator.empty_cache()
        with zprof.record(path, level="alloc", nvml="off"):
            held = [torch.empty(3 * MIB, dtype=torch.uint8, device="accel") for _ in range(12)]
            # Every other block is free.
            del held[::2]
            segments = native().segments()
        said = json.loads(CliRunner().invoke(main, ["frag", str(path), "--json"]).stdout)
    assert not said["what_if"]
    assert said["total"]["reserved"] == sum(one["total_size"] for one in segments)
    assert said["total"]["allocated"] == sum(one["allocated_size"] for one in segments)
    assert said["total"]["stuck"] >= 5 * 3 * MIB and said["total"]["largest"] < said["total"]["stuck"]
    # What was recorded, replayed by the model of torch's allocator, reserves as much.
    assert said["score"]["peak_error"] == 0


#: Stage 3 on a device of 64 MiB: 16 MiB of parameters, as many of gradients, and twice as many of states.
TIGHT = """
import torch
from torch import nn

from tests.accelerator.accel import load

load().native.set_memory_limit(0, 64 << 20)

import zhooks

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to("accel")
zhooks.attach(model, policy={"units": {"classes": ["Linear"], "min_numel": 0}})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.ones(8, 1024, device="accel")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_device_out_of_memory_is_torchs_error_and_explained_by_what_held_it(accelerators: object, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TIGHT)
    failed = forked.python("-m", "zprof", "run", "--level", "alloc", "train.py", at=tmp_path)
    assert failed.returncode == 1
    assert "torch.OutOfMemoryError: accel out of memory. Tried to allocate 4.00 MiB." in failed.stderr
    said = forked.python("-m", "zprof", "oom", "run.0.zprof", at=tmp_path).stdout.splitlines()
    assert said[0].startswith("out of memory: device memory refused about 4 MiB, in step: limit 64 MiB, 4 MiB free, ")
    held = {line.split()[0]: line.split()[1] for line in said[2:5]}
    # Of the states those of a layer and a half.
    assert held == {"parameter": "16", "gradient": "16", "temporary": "12"}
    assert any(line.startswith('  [gradient] tier = "host": saves ') for line in said)
    # The snapshot that the allocator left says where the rest of the 64 MiB is, and the model of torch's allocator agrees but
    # for a segment of 2 MiB: what was reserved before the history began is packed in a replay.
    found = json.loads(forked.python("-m", "zprof", "frag", "run.0.zprof", "--json", at=tmp_path).stdout)
    total = found["total"]
    assert total["reserved"] == 60 * MIB and total["stuck"] == total["reserved"] - total["allocated"]
    assert abs(found["score"]["peak_error"]) < 0.05 and len(found["replays"][0]["failures"]) == 1
