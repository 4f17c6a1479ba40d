"""The history of a device's allocator in a trace: nothing without a device, the allocator's snapshot with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zprof
from tests.support.on_gpus import allocator_snapshot, module, on_gpus
from tests.support.on_ranks import folder
from zprof.trace.reader import Trace


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_device_nothing_is_noted(tmp_path: Path) -> None:
    with zprof.record(tmp_path / "run.zprof", level="alloc"):
        torch.zeros(10)
    assert [note.name for note in Trace.open(tmp_path / "run.zprof").notes() if "snapshot" in note.name] == []


@on_gpus()
def test_the_allocators_own_snapshot_is_noted_and_its_history_switched_off_again(device: str) -> None:
    def known() -> int:
        return sum(len(entries) for entries in allocator_snapshot(device)["device_traces"])

    with folder() as at:
        with zprof.record(at / "run.zprof", level="alloc"):
            held = torch.zeros(10 << 20, device=device)
            torch.zeros(20 << 20, device=device)
        notes = Trace.open(at / "run.zprof").notes("snapshot")
    assert len(notes) == 1 and notes[0].body["segments"] and any(notes[0].body["device_traces"])
    before = known()
    torch.zeros(30 << 20, device=device)
    assert known() == before and held.device.type == device


@on_gpus()
def test_a_history_that_the_program_records_itself_is_not_ended(device: str) -> None:
    memory = module(device).memory
    memory._record_memory_history()
    try:
        first = torch.zeros(10 << 20, device=device)
        with folder() as at, zprof.record(at / "run.zprof", level="alloc"):
            pass
        second = torch.zeros(10 << 20, device=device)
        known = {entry["addr"] for entries in allocator_snapshot(device)["device_traces"] for entry in entries}
    finally:
        memory._record_memory_history(None)
    assert {first.data_ptr(), second.data_ptr()} <= known
