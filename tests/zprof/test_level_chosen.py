"""Where no level is named: every storage of a plain script, and of one under zhooks what level "events" records, no more."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
import zprof
from tests.support.inside import hush_earlier
from zprof.analysis.coverage import coverage
from zprof.analysis.ledger import Ledger
from zprof.recording.recorder import Recorder
from zprof.recording.resident import ResidentSampler
from zprof.recording.sampler import Reading
from zprof.recording.sampling import Sampling
from zprof.rows import RowKind
from zprof.trace.reader import Trace
from zprof.trace.tail import tail_path


@pytest.fixture(autouse=True)
def alone() -> None:
    """What earlier tests attached says nothing here."""
    gc.collect()
    hush_earlier()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(path: Path, level: Any) -> Trace:
    with zprof.record(path, level=level, nvml="off"):
        model = net()
        train(model, torch.optim.AdamW(model.parameters()))
        del model
        gc.collect()
    return Trace.open(path)


def attached(path: Path, level: Any) -> Trace:
    with zprof.record(path, level=level, nvml="off"):
        model = net()
        torch.ones(1 << 16).sum()
        attachment = zhooks.attach(model)
        train(model, torch.optim.AdamW(model.parameters()))
        attachment.detach()
    return Trace.open(path)


def rows_of(trace: Trace) -> Counter[tuple[str, ...]]:
    """How often each row is there, whenever it was; without samples, whose number is a matter of time."""
    names = trace.strings
    found: Counter[tuple[str, ...]] = Counter()
    for rows in trace.chunks():
        columns = (rows.kind.tolist(), rows.what.tolist(), rows.key.tolist(), rows.nbytes.tolist())
        for kind, what, key, nbytes in zip(*columns, strict=True):
            if kind != RowKind.COUNTER or " on " in names[what]:
                found[RowKind(kind).name, names[what], names[key], str(nbytes)] += 1
    return found


def test_a_plain_script_is_recorded_as_at_level_alloc(tmp_path: Path) -> None:
    plain(tmp_path / "warm.zprof", "alloc")
    chosen, named = plain(tmp_path / "auto.zprof", "auto"), plain(tmp_path / "alloc.zprof", "alloc")
    assert chosen.header.level == "alloc"
    assert [note.body for note in chosen.notes("level")] == [
        {"level": "alloc", "why": "zhooks was not attached before the first step"}
    ]
    assert not named.notes("level"), "it was named"
    assert Ledger.of(chosen).peak("device").nbytes == Ledger.of(named).peak("device").nbytes
    assert coverage(chosen).tier("device") is None


def test_a_script_that_attaches_zhooks_is_recorded_as_at_level_events(tmp_path: Path) -> None:
    attached(tmp_path / "warm.zprof", "events")
    chosen, named = attached(tmp_path / "auto.zprof", "auto"), attached(tmp_path / "events.zprof", "events")
    assert chosen.header.level == "events"
    assert [note.body["why"] for note in chosen.notes("level")] == ["zhooks was attached before the first step"]
    assert rows_of(chosen) == rows_of(named)
    assert coverage(chosen) == coverage(named)
    assert chosen.damage is None and not list(tmp_path.glob("*.part")) and not tail_path(chosen.path).exists()


def test_samples_from_before_the_attachment_stay(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.zprof", level="auto", interval_s=0.001, nvml="off").listen()
    before = torch.ones(1 << 10)
    recorder.flush()
    size = recorder.path.stat().st_size
    attachment = zhooks.attach(net())
    recorder.close()
    attachment.detach()
    trace = Trace.open(recorder.path)
    rss = [int(rows.time_ns[at]) for rows in trace.chunks() for at in range(len(rows)) if trace.strings[rows.what[at]] == "rss"]
    assert size and rss and rss[0] - trace.header.mono_ns < rss[-1] - rss[0] + (1 << 30)
    assert not any(name.startswith(("resident", "malloc")) for name in trace.strings), "of level alloc"
    assert before.numel()


def test_what_a_sampler_says_after_it_was_left_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(lambda what: pytest.fail(what))
    sampling.open(resident=True, nvml="off")
    handed: list[str] = []
    sampling.sample(lambda what, key, value: handed.append(what))
    assert ResidentSampler.WHATS.intersection(handed)

    handed.clear()
    asked = ResidentSampler.sample

    def left_while_asked(sampler: ResidentSampler) -> Sequence[Reading]:
        readings = asked(sampler)
        sampling.leave_resident()  # as another thread does, just then
        return readings

    monkeypatch.setattr(ResidentSampler, "sample", left_while_asked)
    sampling.sample(lambda what, key, value: handed.append(what))
    assert "rss" in handed and not ResidentSampler.WHATS.intersection(handed)


def test_nothing_of_the_tracker_is_left_in_torch_after_the_first_forward(tmp_path: Path) -> None:
    from torch.nn.modules import module as registry

    hooks = len(registry._global_forward_pre_hooks), len(registry._global_forward_hooks)
    modes = torch._C._len_torch_dispatch_stack()
    with zprof.record(tmp_path / "run.zprof", level="auto", nvml="off"):
        assert torch._C._len_torch_dispatch_stack() == modes + 1
        model = net()
        attachment = zhooks.attach(model)
        torch.randint(0, 2, (8,))  # without a tensor among its arguments
        with torch.inference_mode():
            model(torch.ones(4, 16))
        with torch.inference_mode(False):
            model(torch.ones(4, 16))
        torch.randint(0, 2, (8,))
        train(model, torch.optim.AdamW(model.parameters()))
        assert torch._C._len_torch_dispatch_stack() == modes
        assert (len(registry._global_forward_pre_hooks), len(registry._global_forward_hooks)) == hooks
        torch.randint(0, 2, (8,))
        attachment.detach()


def test_zhooks_attached_after_a_step_leaves_the_level_as_it_is(tmp_path: Path) -> None:
    with zprof.record(tmp_path / "run.zprof", level="auto", nvml="off"):
        model = net()
        train(model, torch.optim.AdamW(model.parameters()), steps=1)
        attachment = zhooks.attach(model)
        train(model, torch.optim.AdamW(model.parameters()))
        attachment.detach()
    trace = Trace.open(tmp_path / "run.zprof")
    assert trace.header.level == "alloc" and coverage(trace).every_storage
    assert Ledger.of(trace).peak("device", "activation").nbytes > 0


def test_a_recording_that_finds_zhooks_attached_already_is_of_its_events(tmp_path: Path) -> None:
    model = net()
    attachment = zhooks.attach(model)
    with zprof.record(tmp_path / "run.zprof", level="auto", nvml="off"):
        train(model, torch.optim.AdamW(model.parameters()))
    attachment.detach()
    trace = Trace.open(tmp_path / "run.zprof")
    assert trace.header.level == "events"
    assert Ledger.of(trace).peak("device", "parameter").nbytes == sum(each.nbytes for each in net().parameters())


def test_a_file_that_cannot_begin_anew_says_until_when_storages_were_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    trace = attached(tmp_path / "run.zprof", "auto")
    assert trace.header.level == "alloc" and not coverage(trace).every_storage
    assert "followed only until zhooks was attached (OSError" in str(coverage(trace).tier("device"))
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_a_run_that_is_killed_after_it_has_attached_has_all_its_steps(tmp_path: Path) -> None:
    import signal

    from tests.support.forked import python

    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, torch, zhooks\n"
        "model = torch.nn.Linear(64, 64)\n"
        "torch.ones(100).sum()\n"
        "attachment = zhooks.attach(model)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(30):\n"
        "    model(torch.ones(4, 64)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = python("-m", "zprof", "run", "-o", "run.zprof", "train.py", at=tmp_path)
    assert ended.returncode == -signal.SIGKILL
    trace = Trace.open(tmp_path / "run.zprof")
    assert trace.header.level == "events"
    steps = [row for row in rows_of(trace).items() if row[0][:2] == ("END", "step")]
    assert sum(count for _, count in steps) == 30
