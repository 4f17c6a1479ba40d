"""The CUDA allocator's history in a trace: nothing without CUDA, the allocator's snapshot with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zprof
from zprof.trace.reader import Trace


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_nothing_is_noted(tmp_path: Path) -> None:
    with zprof.record(tmp_path / "run.zprof", level="alloc"):
        torch.zeros(10)
    assert [note.name for note in Trace.open(tmp_path / "run.zprof").notes() if "snapshot" in note.name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocators_own_snapshot_is_noted_and_its_history_switched_off_again(tmp_path: Path) -> None:
    with zprof.record(tmp_path / "run.zprof", level="alloc"):
        held = torch.zeros(10 << 20, device="cuda")
        torch.zeros(20 << 20, device="cuda")
    notes = Trace.open(tmp_path / "run.zprof").notes("snapshot")
    assert len(notes) == 1 and notes[0].body["segments"]
    assert not torch._C._cuda_isHistoryEnabled()
    assert held.is_cuda
