"""Out of memory: what failed, who held what, and policy changes that would have let it fit, from recorded bytes alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.budget import Bound, Budget, Machine, Shared, cannot_admit, preflight
from offload.errors import BudgetError
from offload.policy import Policy
from offload.text import as_size
from offload.tier import Tier
from tests.support.cgroups import cgroup_of
from tests.support.forked import launch, python
from tests.support.slow import slow
from tests.support.zprof_traces import HEADER, KIB, MIB, write_trace
from zprof.analysis.analysis import Analysis
from zprof.oom.changes import Plight
from zprof.oom.explanation import explain
from zprof.oom.facts import failure_of
from zprof.oom.fit import Remedy, Verdict, remedies
from zprof.rows import CATEGORIES, TIERS, Row, RowKind, placed
from zprof.trace.reader import Trace

# What an error says.

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 8.81 MiB is free. "
    "Including non-PyTorch memory, this process has 79.13 GiB memory in use. Of the allocated memory 75.00 GiB is allocated by "
    "PyTorch, and 3.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_cudas_words_are_read_as_the_rounded_figures_they_are() -> None:
    import torch

    failure = failure_of(torch.OutOfMemoryError(CUDA))
    assert failure is not None
    assert (failure.kind, failure.tier, failure.exact) == ("cuda", "device", False)
    assert failure.nbytes == 20 * MIB
    assert failure.limit == int(79.15 * (1 << 30))
    assert failure.free == int(8.81 * MIB)
    assert failure.short == failure.nbytes - failure.free
    assert failure.idle == 3584 * MIB


@given(
    used=st.integers(0, 1 << 40),
    limit=st.integers(0, 1 << 40),
    nbytes=st.integers(1, 1 << 40),
    key=st.text("abc./() :", min_size=1, max_size=20),
)
def test_a_budgets_words_are_read_whatever_its_figures(used: int, limit: int, nbytes: int, key: str) -> None:
    if used + nbytes <= limit:
        limit = used
    failure = failure_of(cannot_admit(Tier.HOST, key.strip(), nbytes, used=used, limit=limit, note="on rank 3"))
    assert failure is not None
    assert (failure.kind, failure.tier) == ("budget", "host")
    for read, true in ((failure.nbytes, nbytes), (failure.short, used + nbytes - limit)):
        assert read == pytest.approx(true, rel=0.006)


def test_an_error_that_was_raised_from_another_is_explained_by_it() -> None:
    budget = Budget({Tier.DISK: 10})
    with pytest.raises(BudgetError) as caught:
        budget.admit(Tier.DISK, "optimizer/a", 12)
    try:
        try:
            raise caught.value
        except BudgetError as error:
            raise SystemExit("no room") from error
    except SystemExit as ended:
        failure = failure_of(ended)
    assert failure is not None
    assert (failure.tier, failure.key, failure.nbytes, failure.short) == ("disk", "optimizer/a", 12, 2)
    assert failure_of(ValueError("x")) is None
    assert failure_of(RuntimeError("CUDA error: device-side assert")) is None


def test_what_numpy_and_torch_could_not_make_is_known_to_the_byte() -> None:
    import numpy as np
    import torch

    of_torch = lambda: torch.empty(1 << 60, dtype=torch.uint8)  # noqa: E731
    for nbytes, make in (((1 << 55) * 8, lambda: np.empty((1 << 55,))), (1 << 60, of_torch)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            make()
        failure = failure_of(caught.value)
        assert failure is not None
        assert failure.nbytes == nbytes
        assert failure.short is not None
        assert 0 < failure.short <= nbytes


GIB = 1 << 30
REFUSED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12"
MACHINE = Bound("available memory (MemAvailable)", 13 * GIB // 5, "end other processes")


def space(free: int, most: int) -> Bound:
    """Address space is limited to 6 GiB."""
    return Bound("RLIMIT_AS (limit 6 GiB)", free, "raise it with ulimit -v unlimited", Shared.PROCESS, 6 * GIB, most)


def refused_by(patched: pytest.MonkeyPatch, nbytes: int, *bounds: Bound, before: str = "") -> Any:
    """What is known of a request on a machine with these bounds."""
    patched.setattr(Machine, "memory_bounds", lambda self, pinned=False: list(bounds))
    failure = failure_of(RuntimeError(before + REFUSED.format(nbytes)))
    assert failure is not None and failure.nbytes == nbytes
    return failure


def test_the_limit_that_refused_is_named_though_the_error_has_freed_memory_since(monkeypatch: pytest.MonkeyPatch) -> None:
    found = refused_by(monkeypatch, 412 * MIB, MACHINE, space(free=4 * GIB, most=6 * GIB - 300 * MIB))
    assert (found.bound, found.limit, found.free, found.short) == ("RLIMIT_AS", 6 * GIB, 300 * MIB, 112 * MIB)
    assert found.given_back == 4 * GIB - 300 * MIB and "ulimit -v" in found.remedy
    full = refused_by(monkeypatch, 412 * MIB, MACHINE, space(free=100 * MIB, most=7 * GIB))
    assert (full.free, full.short, full.given_back) == (100 * MIB, 312 * MIB, 0)
    before = refused_by(monkeypatch, 412 * MIB, MACHINE, space(free=4 * GIB, most=7 * GIB))
    assert (before.free, before.short) == (0, 412 * MIB), "it was larger once than it is allowed now"


def test_a_limit_that_cannot_have_refused_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    far = space(free=5 * GIB, most=GIB)
    found = refused_by(monkeypatch, 412 * MIB, MACHINE, far)
    assert (found.bound, found.free, found.short, found.remedy) == ("the system", None, None, "")
    larger = refused_by(monkeypatch, 3 * GIB, MACHINE, far)
    assert (larger.bound, larger.short) == ("available memory", 3 * GIB - MACHINE.free)
    data = Bound("RLIMIT_DATA (limit 6 GiB)", 4 * GIB, "raise it with ulimit -d unlimited", Shared.PROCESS, 6 * GIB)
    unsure = refused_by(monkeypatch, 412 * MIB, MACHINE, far, data)
    assert (unsure.bound, unsure.limit, unsure.free, unsure.short) == ("RLIMIT_DATA", 6 * GIB, None, None)


def test_a_loader_worker_has_the_same_limit_but_not_the_same_use(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = "Caught RuntimeError in DataLoader worker process 1.\n"
    found = refused_by(monkeypatch, 412 * MIB, MACHINE, space(free=100 * MIB, most=GIB), before=caught)
    assert (found.bound, found.key, found.limit) == ("RLIMIT_AS", "loader worker 1", 6 * GIB)
    assert (found.free, found.short, found.resident) == (None, None, None)


def test_what_attach_refuses_is_read_too() -> None:
    import torch

    import zhooks

    def refused(**policy: Any) -> Any:
        model = torch.nn.Linear(64, 64)
        with pytest.raises(BudgetError) as caught:
            zhooks.attach(model, policy=policy)
        return failure_of(caught.value)

    device = refused(budget={"device": "1 KiB"})
    assert (device.tier, device.bound, device.limit) == ("device", "[budget] device", KIB)
    assert device.key == "what the policy places there" and device.states is None
    assert device.short == device.nbytes - KIB > 0
    model = torch.nn.Linear(64, 64)
    with pytest.raises(BudgetError) as caught:
        zhooks.attach(model, torch.optim.Adam(model.parameters()), policy={"budget": {"device": "40 KiB"}})
    whole = failure_of(caught.value)
    # Parameters, gradients and as much twice of states, which are what does not fit.
    assert whole is not None and whole.limit == 40 * KIB and whole.key == "optimizer states of Adam"
    assert whole.nbytes == whole.states == pytest.approx(32.5 * KIB, rel=0.01)
    assert whole.short == pytest.approx(25 * KIB, rel=0.01)
    host = refused(parameter={"tier": "host"}, budget={"host": "1 KiB"})
    assert (host.tier, host.bound, host.limit) == ("host", "[budget] host", KIB)
    with pytest.raises(BudgetError) as caught:
        preflight({Tier.HOST: 1 << 50})
    machine = failure_of(caught.value)
    assert machine is not None
    assert (machine.kind, machine.tier, machine.nbytes) == ("budget", "host", 1 << 50)
    assert machine.short is not None


# What would have fitted.

UNITS = {f"layers.{number}": 20 * MIB for number in range(4)} | {"head": 10 * MIB, "embed": 10 * MIB}


def held(stage: int = 0, world: int = 1, **more: int) -> dict[tuple[str, str, str], int]:
    """A model of `UNITS` under Adam in fp32, with 30 MiB of activations a unit."""
    found: dict[tuple[str, str, str], int] = {}
    for unit, nbytes in UNITS.items():
        found["parameter", "device", unit] = nbytes // (world if stage == 3 else 1)
        found["gradient", "device", unit] = nbytes // (world if stage >= 2 else 1)
        found["optimizer", "device", unit] = 2 * nbytes // (world if stage >= 1 else 1)
        found["activation", "device", unit] = 30 * MIB
    return found | {("temporary", "device", name): nbytes for name, nbytes in more.items()}


def policy(**values: Any) -> dict[str, Any]:
    return Policy.of(values).values()


def by_name(plight: Plight) -> dict[str, Remedy]:
    return {remedy.what: remedy for remedy in remedies(plight)}


def test_each_change_saves_what_the_bytes_say() -> None:
    found = by_name(Plight(held(2, 2), ("device",), 1, 2, policy(stage=2), UNITS))
    # Three of the largest units are on the way whatever is stored elsewhere, but where the host computes the update.
    saved = {what: remedy.nbytes for what, remedy in found.items()}
    assert saved == {
        "stage = 3": (50 - 2 * 20) * MIB,
        '[activation] checkpoint = "unit"': 5 * 30 * MIB,
        '[gradient] tier = "host"': (50 - 3 * 10) * MIB,
        '[gradient] tier = "disk"': (50 - 3 * 10) * MIB,
        '[optimizer] tier = "host"': (100 - 3 * 20) * MIB,
        '[optimizer] tier = "disk"': (100 - 3 * 20) * MIB,
        '[gradient] tier = "host", [optimizer] tier = "host" and compute = "host"': 150 * MIB,
        '[activation] tier = "host"': 180 * MIB,
        '[activation] tier = "disk"': 180 * MIB,
        '[precision] param = "bf16"': 90 * MIB,
        "half the batch": 90 * MIB,
    }


def test_a_share_of_the_states_that_stays_on_the_device_may_go_to_the_others() -> None:
    divided = policy(optimizer={"tier": "host", "device_share": 0.5})
    found = by_name(Plight(held(3, 2), ("device",), 1, 2, divided, UNITS))
    assert found["[optimizer] device_share = 0"].nbytes == (100 - 3 * 20) * MIB
    assert "[optimizer] device_share = 0" not in by_name(Plight(held(3, 2), ("device",), 1, 2, policy(), UNITS))


def test_a_higher_stage_saves_the_share_of_the_other_ranks_less_the_units_in_flight() -> None:
    units = {f"layers.{number}": 10 * MIB for number in range(8)}
    now = {("parameter", "device", unit): nbytes for unit, nbytes in units.items()}
    found = by_name(Plight(now, ("device",), 1, 4, policy(stage=2), units))
    assert found["stage = 3"].nbytes == 80 * MIB * 3 // 4 - 2 * 10 * MIB
    now |= {("gradient", "device", unit): nbytes for unit, nbytes in units.items()}
    now |= {("optimizer", "device", unit): 2 * nbytes for unit, nbytes in units.items()}
    found = by_name(Plight(now, ("device",), 1, 4, policy(stage=0), units))
    assert [found[f"stage = {stage}"].nbytes // MIB for stage in (1, 2, 3)] == [120, 180, 220]
    alone = by_name(Plight(now, ("device",), 1, 1, policy(stage=0), units))
    assert not [what for what in alone if what.startswith("stage")], "one rank has nobody to share with"


def test_units_fetched_ahead_are_counted_at_their_smallest() -> None:
    now = {("parameter", "device", unit): nbytes // 4 + nbytes for unit, nbytes in UNITS.items()}
    found = by_name(Plight(now, ("device",), 1, 4, policy(), UNITS))
    assert found["[schedule] prefetch = 0"].nbytes == 10 * MIB
    # What is gathered is on the device wherever it is stored.
    assert found['[parameter] tier = "host"'].nbytes == (25 - 3 * 5) * MIB


def test_what_fits_comes_first_and_the_cheapest_of_that_before_all() -> None:
    found = remedies(Plight(held(), ("device",), 80 * MIB, 1, policy(stage=0), UNITS))
    fits = [bool(remedy.fits) for remedy in found]
    assert fits == sorted(fits, reverse=True)
    costs = [remedy.changes[0].cost for remedy in found if remedy.fits]
    assert costs == sorted(costs)


def test_where_no_change_is_enough_the_cheapest_that_are_together_come_first() -> None:
    plight = Plight(held(), ("device",), 340 * MIB, 1, policy(stage=0), UNITS)
    first = remedies(plight)[0]
    assert first.fits
    assert len(first.changes) == 2
    assert first.nbytes >= 340 * MIB
    assert all(not remedy.fits for remedy in remedies(plight) if len(remedy.changes) == 1)
    assert not any(remedy.fits for remedy in remedies(Plight(held(), ("device",), 10**12, 1, policy(stage=0), UNITS)))


def test_a_full_host_is_relieved_by_the_disk_and_no_tier_takes_more_than_it_has() -> None:
    sizes = {"optimizer": 20, "gradient": 10}
    on_host = {(cell, "host", unit): nbytes for cell, nbytes in sizes.items() for unit in "abcde"}
    now = policy(stage=0, optimizer={"tier": "host"}, gradient={"tier": "host"})
    found = by_name(Plight(on_host, ("host",), 30, 1, now))
    assert {what: (remedy.nbytes, remedy.fits) for what, remedy in found.items()} == {
        '[optimizer] tier = "disk"': (100 - 60, True),
        '[gradient] tier = "disk"': (50 - 30, False),
    }
    full = Plight(held(), ("device",), 1, 1, policy(stage=0), UNITS, {"host": 199 * MIB})
    assert '[gradient] tier = "host"' in by_name(full)
    assert '[optimizer] tier = "host"' not in by_name(full)
    assert '[optimizer] tier = "disk"' in by_name(full)


def test_where_device_and_host_are_one_memory_only_the_disk_helps() -> None:
    found = by_name(Plight(held(), ("device", "host"), 1, 1, policy(stage=0), UNITS, shared=True))
    assert not [what for what in found if '"host"' in what]
    assert found['[optimizer] tier = "disk"'].nbytes == (200 - 3 * 40) * MIB
    assert '[parameter] tier = "disk"' not in found, "so many units are in memory all the same"


def test_without_zhooks_plain_torch_and_what_zhooks_would_save_are_named() -> None:
    found = by_name(Plight(held(), ("device",), 1, 4, None, UNITS))
    assert found["zhooks.attach(model)"].nbytes == 300 * MIB
    assert found["torch.utils.checkpoint around each block"].nbytes == 150 * MIB
    assert 'zhooks.attach(model, policy={"optimizer": {"tier": "host"}})' in found
    assert "half the batch" in found


def test_a_change_that_a_later_moment_of_the_step_refutes_is_not_promised() -> None:
    activations = {("activation", "device", f"layers.{number}"): 10 * MIB for number in range(8)}
    inner = {("activation", "device", f"layers.0.{number}"): 0 for number in range(9)}
    early = {("parameter", "device", "layers.0"): 80 * MIB, **dict(list(activations.items())[:2]), **inner}
    late = {("parameter", "device", "layers.0"): 80 * MIB, ("gradient", "device", "layers.0"): 80 * MIB, **activations}
    seen = Plight(early, ("device",), short=MIB, room=100 * MIB, blocks=8, shared=True)
    for plight, verdict in (
        (seen, Verdict.REQUEST_ALONE),
        (dataclasses.replace(seen, step=(late,)), Verdict.NOT_THE_STEP),
        (dataclasses.replace(seen, step=(late,), room=175 * MIB), Verdict.MAY),
    ):
        found = {remedy.what: remedy for remedy in remedies(plight)}
        checkpoint = found["torch.utils.checkpoint around each block"]
        assert checkpoint.verdict is verdict and "the inputs of 8 blocks" in checkpoint.price


def test_idle_memory_of_the_allocator_is_the_cheapest_remedy() -> None:
    first = remedies(Plight(held(), ("device",), 5 * MIB, 1, policy(stage=0), UNITS, idle=10 * MIB))[0]
    assert (first.what, first.nbytes, first.fits) == ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", 10 * MIB, True)


PLACES = st.tuples(st.sampled_from(CATEGORIES), st.sampled_from(TIERS), st.sampled_from([*UNITS, "other"]))
POLICIES = st.builds(
    lambda stage, tiers: policy(stage=stage, **{cell: {"tier": tier} for cell, tier in tiers.items()}),
    st.sampled_from([0, 3]),
    st.dictionaries(st.sampled_from(["parameter", "gradient", "optimizer", "activation"]), st.sampled_from(TIERS)),
)


@given(
    now=st.dictionaries(PLACES, st.integers(0, 1 << 40), max_size=12),
    pool=st.sampled_from([("device",), ("host",), ("disk",), ("device", "host")]),
    short=st.none() | st.integers(1, 1 << 41),
    world=st.integers(1, 64),
    written=st.none() | POLICIES,
)
def test_no_remedy_promises_more_than_was_held_or_names_a_key_that_policies_lack(
    now: dict[tuple[str, str, str], int], pool: tuple[str, ...], short: int | None, world: int, written: dict[str, Any] | None
) -> None:
    total = sum(nbytes for (_, tier, _), nbytes in now.items() if tier in pool)
    for remedy in remedies(Plight(now, pool, short, world, written, UNITS)):
        assert 0 < remedy.nbytes <= total
        assert remedy.fits is (None if short is None else remedy.nbytes >= short)
        about = [each for change in remedy.changes for each in change.about]
        assert len(about) == len(set(about))
        assert remedy.price
        for change in remedy.changes:
            if change.what.startswith("["):
                table, _, line = change.what.partition("] ")
                key, _, value = line.partition(" = ")
                if written is not None and "," not in line:
                    named = int(value) if value.isdecimal() else value.strip('"')
                    Policy.of({**written, table[1:]: {**written[table[1:]], key: named}})


# From the trace.


def rows_of_a_failure() -> Iterator[Row]:
    at = HEADER.mono_ns
    for number, (unit, nbytes) in enumerate(UNITS.items()):
        yield Row(RowKind.INSTANT, "unit", unit, nbytes, at)
        yield Row(RowKind.ALLOC, placed("parameter", "device"), unit, nbytes, at, 0, number + 1)
    yield Row(RowKind.BEGIN, "forward", "model train", 0, at + 10)
    for number, unit in enumerate(UNITS):
        for part in ("a", "b"):
            ident = 10 + 2 * number + (part == "b")
            yield Row(RowKind.ALLOC, placed("activation", "device"), f"{unit}.{part} <- train.py:3", 5 * MIB, at + 20, 0, ident)
    # The error unwinds the stack: what the pass held is gone when the failure is noted.
    for number, unit in enumerate(UNITS):
        yield Row(RowKind.FREE, placed("activation", "device"), f"{unit}.a <- train.py:3", 5 * MIB, at + 30, 0, 10 + 2 * number)
    yield Row(RowKind.END, "forward", "model train", 0, at + 31)
    yield Row(RowKind.INSTANT, "oom", "", 64 * MIB, at + 40)


NOTES: dict[str, dict[str, object]] = {
    "policy": {"text": "stage = 0\n[optimizer]\ntier = 'device'\n"},
    "oom": {"kind": "cuda", "tier": "device", "message": "m\x1b[2J", "nbytes": 64 * MIB, "short": 4 * MIB, "exact": False},
}


def test_a_trace_is_explained_by_what_was_held_when_it_failed(tmp_path: Path) -> None:
    lines = explain(Analysis.of(Trace.open(write_trace(tmp_path / "run.zprof", rows_of_a_failure(), notes=NOTES))))
    assert lines[0] == "out of memory: device memory refused about 64 MiB, in forward: 4 MiB short"
    table = {line.split()[0]: line.split()[1:] for line in lines[1:5]}
    assert table["parameter"] == ["100", "MiB"]
    assert table["activation"] == ["60", "MiB"]
    assert any(line.startswith('  [activation] checkpoint = "unit": saves at most 50 MiB; ') for line in lines)
    assert lines.index(Verdict.REQUEST_ALONE.value) < next(at for at, line in enumerate(lines) if "checkpoint" in line)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("broken", [{}, {"kind": 3, "tier": "device"}, {"kind": "cuda", "tier": "moon", "message": "m"}])
def test_a_note_that_says_nothing_sensible_is_no_failure(broken: dict[str, object], tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", rows_of_a_failure(), notes={"oom": broken, "policy": {"text": "= ["}})
    assert explain(Analysis.of(Trace.open(path))) == []


def test_a_run_without_a_failure_is_not_explained(tmp_path: Path) -> None:
    assert explain(Analysis.of(Trace.open(write_trace(tmp_path / "run.zprof", [])))) == []


# Real runs.


def fresh(*words: str, at: Path, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In an interpreter that has imported nothing, with some more in its environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
    return subprocess.run(
        [sys.executable, *words], cwd=at, env=environment, capture_output=True, text=True, timeout=600
    )


PLACED = """
import sys, torch, zhooks
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
gradient, optimizer, budget, prefetch = *sys.argv[1:4], *(sys.argv[4:] or ["1"])
policy = {"gradient": {"tier": gradient}, "optimizer": {"tier": optimizer}, "budget": {"host": budget}, "disk": {"path": "."}}
policy["schedule"] = {"prefetch": int(prefetch)}
zhooks.attach(model, policy=policy)
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
"""


def explanation(stderr: str) -> list[str]:
    """The lines by which ``zprof run`` says why memory ran out, and what to do."""
    lines = [line.removeprefix("zprof: ") for line in stderr.splitlines() if line.startswith("zprof: ")]
    return lines[: next(at for at, line in enumerate(lines) if line.startswith("trace "))]


def test_a_budget_that_is_too_small_is_explained_and_the_remedies_are_some(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLACED)
    failed = python("-m", "zprof", "run", "train.py", "host", "host", "4 MiB", at=tmp_path)
    assert failed.returncode == 1
    assert "BudgetError: [budget] host is too small. Expected memory for " in failed.stderr
    said = explanation(failed.stderr)
    assert said[0] == (
        "out of memory: [budget] host refused about 4.02 MiB for optimizer states of Adam, in step: limit 4 MiB, 2.02 MiB short"
    )
    fitting = said.index("would have let it fit:")
    assert said[fitting + 1].startswith('  [optimizer] tier = "disk": saves ')
    assert said[-2] == "or raise [budget] host to 6.03 MiB"
    trace = Trace.open(tmp_path / "run.0.zprof")
    [note] = trace.notes("oom")
    assert (note.body["kind"], note.body["tier"], note.body["limit"]) == ("budget", "host", 4 * MIB)
    assert explain(Analysis.of(trace)) == said, "a report says the same"
    for tier, budget in (("disk", "4 MiB"), ("host", "6.03 MiB")):
        changed = python("train.py", "host", tier, budget, at=tmp_path)
        assert changed.returncode == 0, changed.stderr


def test_where_the_disk_alone_is_not_enough_what_is_named_beside_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLACED)

    def said(*words: str) -> list[str]:
        """What would have let it fit."""
        lines = explanation(python("-m", "zprof", "run", "--force", "train.py", *words, at=tmp_path).stderr)
        fitting = lines.index("would have let it fit:")
        good = [*takewhile(lambda line: line.startswith("  "), lines[fitting + 1 :])]
        return [line.strip().partition(": saves")[0] for line in good]

    def fits(*words: str) -> bool:
        return python("train.py", *words, at=tmp_path).returncode == 0

    # Gradients are 2.01 MiB, states of one unit 514 KiB.
    assert '[optimizer] tier = "disk"' in said("host", "host", "2600 KiB") and fits("host", "disk", "2600 KiB")
    both = said("host", "host", "2400 KiB")[0]
    assert set(both.split(" and ")) == {'[optimizer] tier = "disk"', '[gradient] tier = "disk"'}
    assert not fits("host", "disk", "2400 KiB") and fits("disk", "disk", "2400 KiB")
    # What was tried instead of it is explained too.
    assert '[gradient] tier = "disk"' in said("host", "disk", "2400 KiB")


@pytest.mark.parametrize("world", [*slow(1), 2])
def test_states_that_the_devices_budget_refuses_are_called_so_and_the_tier_that_is_proposed_fits(
    tmp_path: Path, world: int
) -> None:
    (tmp_path / "train.py").write_text(TIGHT)
    # Beside units in flight on two ranks; states are all of 4 MiB, or half.
    budget = "4.5 MiB"
    failed = launch(world, "-m", "zprof", "run", "--level", "alloc", "train.py", budget, at=tmp_path)
    assert all(rank.returncode == 1 for rank in failed), failed[0].stderr
    trace = Trace.open(tmp_path / "run.0.zprof")
    said = explain(Analysis.of(trace))
    assert said[0].startswith("out of memory: [budget] device refused about ")
    assert " for optimizer states of AdamW, in step: limit " in said[0]
    good = [*takewhile(lambda line: line.startswith("  "), said[said.index("would have let it fit:") + 1 :])]
    states = as_size((4 * MIB + 16 * KIB) // world)
    assert any(line.startswith(f'  [optimizer] tier = "host": saves {states}; ') for line in good)
    again = python("-m", "zprof", "oom", "run.0.zprof", at=tmp_path)
    assert again.stdout.splitlines() == said
    assert explanation(failed[0].stderr) == said
    cells = [line.strip(" [").partition("]")[0] for line in good if '] tier = "host": ' in line]
    for enough, *cell in ((said[-2].removeprefix("or raise [budget] device to "),), *((budget, cell) for cell in cells)):
        changed = launch(world, "train.py", enough, *cell, at=tmp_path)
        assert not any(rank.returncode for rank in changed), (cell, changed[0].stderr)


TIGHT = """
import os, sys, torch, zhooks
import torch.distributed as dist
torch.set_num_threads(1)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
budget, *cells = sys.argv[1:]
policy = {**{cell: {"tier": "host"} for cell in cells}, "budget": {"device": budget}, "units": {"min_numel": 0}}
zhooks.attach(model, policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.is_initialized():
    dist.destroy_process_group()
"""


CALLS = """
import resource, sys, torch, zhooks
torch.set_num_threads(1)
width = 1536 if sys.argv[1] == "detach" else 512
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
disk = {"units": {"min_numel": 0}, "disk": {"path": "."}, "optimizer": {"tier": "disk"}}
if sys.argv[1] == "attach":
    zhooks.attach(model, optimizer, policy={"budget": {"device": "12 MiB"}})
if sys.argv[1] == "apply states":
    disk["budget"] = {"device": "64 MiB"}
attachment = zhooks.attach(model, policy=disk)
model(torch.ones(4, width)).sum().backward()
optimizer.step()
optimizer.zero_grad()
attachment.save("checkpoint", optimizer)
attachment.load("checkpoint", optimizer)
if sys.argv[1] == "apply":
    attachment.apply({**disk, "budget": {"device": "1 MiB"}})
if sys.argv[1] == "apply states":
    attachment.apply({**disk, "optimizer": {"tier": "device"}, "budget": {"device": "12 MiB"}})
if sys.argv[1] == "none":
    attachment.apply({**disk, "optimizer": {"tier": "host"}})
if sys.argv[1] == "detach":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 10), resource.RLIM_INFINITY))
attachment.detach()
"""


def of_call(call: str, at: Path) -> tuple[list[str], Analysis]:
    """What is said of a run that ends in this call of the attachment, and the run."""
    (at / "train.py").write_text(CALLS)
    words = ("-m", "zprof", "run", "--level", "alloc", "train.py", call)
    # What is freed goes back at once, so that detach's limit refuses the next request.
    ended = fresh(*words, at=at, more={"MALLOC_MMAP_THRESHOLD_": "65536"}) if call == "detach" else python(*words, at=at)
    assert (ended.returncode == 0) == (call == "none"), ended.stderr
    analysis = Analysis.of(Trace.open(at / "run.0.zprof"))
    return explain(analysis), analysis


def test_memory_that_a_call_of_the_attachment_takes_is_under_its_name(tmp_path: Path) -> None:
    said, analysis = of_call("none", tmp_path)
    assert said == []
    calls = analysis.table.of("attachment")
    assert [calls.strings[key] for key in calls.key.tolist()] == ["attach", "save", "load", "apply", "detach"]
    keys = {series.key for series in analysis.ledger.series}
    assert keys >= {"(save)", "(load)", "(apply)", "(detach)"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits address space")
def test_a_request_that_fails_in_detach_is_said_to_be_for_it_and_no_smaller_batch_is_advised(tmp_path: Path) -> None:
    said, _ = of_call("detach", tmp_path)
    assert said[0].startswith("out of memory: RLIMIT_AS refused ") and ", in detach: " in said[0]
    assert any(line.startswith("most of it: ") and " of (detach) " in line for line in said)
    assert not any("half the batch" in line for line in said)


def test_states_that_attach_or_apply_refuses_have_the_tier_proposed_that_holds_them(tmp_path: Path) -> None:
    for call in ("attach", "apply states"):
        (tmp_path / call).mkdir()
        said, _ = of_call(call, tmp_path / call)
        refused = f"out of memory: [budget] device refused about 8.02 MiB for optimizer states of AdamW, in {call.split()[0]}"
        assert said[0].startswith(refused), said
        assert any(line.startswith('  [optimizer] tier = "host": saves 8.02 MiB; ') for line in said), said
        assert said[-2] == "or raise [budget] device to 16.04 MiB"
    import torch

    import zhooks

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    policy = {"budget": {"device": "12 MiB"}, "optimizer": {"tier": "host"}}
    attachment = zhooks.attach(model, torch.optim.AdamW(model.parameters()), policy=policy)
    attachment.apply(policy)
    attachment.detach()


def test_of_a_policy_that_apply_refuses_nothing_is_proposed_from_what_is_held_under_another(tmp_path: Path) -> None:
    said, _ = of_call("apply", tmp_path)
    assert ", in apply: limit 1 MiB" in said[0]
    assert said[-1].startswith("no change of the policy follows from what was recorded; the error says: [budget] device is too")


SMALL = """
import resource, sys, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(64, 256)).sum().backward()
optimizer.step()
kept = model[:2](torch.ones(1 << 15, 256))
# Only now: which request is refused must not depend on what the recorder's own thread takes meanwhile.
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 10), resource.RLIM_INFINITY))
try:
    model[2:](kept).sum().backward()
except RuntimeError:
    if sys.argv[1] == "handled":
        sys.exit(0)
    raise
"""


@pytest.mark.parametrize("left_kib", [64, pytest.param(4096, marks=pytest.mark.slow)])
def test_an_allocation_the_system_refuses_is_explained_from_every_storage(tmp_path: Path, left_kib: int) -> None:
    (tmp_path / "train.py").write_text(SMALL)
    failed = python("-m", "zprof", "run", "--level", "alloc", "train.py", "raised", str(left_kib), at=tmp_path)
    assert failed.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in failed.stderr
    said = failed.stderr[failed.stderr.index("zprof: out of memory") :]
    assert said.startswith("zprof: out of memory: RLIMIT_AS refused 32 MiB")
    assert "activation" in said
    assert "torch.utils.checkpoint around each block: saves at most " in said
    assert "half the batch: saves at most " in said
    [note] = Trace.open(tmp_path / "run.0.zprof").notes("oom")
    assert note.body["nbytes"] == 32 * MIB


BLOCKS = """
import ctypes, resource, sys, torch
from torch.utils.checkpoint import checkpoint
torch.set_num_threads(1)
# What is freed goes back at once, so that what fits does not depend on malloc.
ctypes.CDLL(None).mallopt(-3, 1 << 16)
left, changed = int(sys.argv[1]) << 20, sys.argv[2:]
block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(8))
    def forward(self, x):
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=False) if CHECKPOINT in changed else each(x)
        return x
net = Net()
optimizer = torch.optim.Adam(net.parameters())
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
for step in range(2):
    for rows in [1536, 1536] if "half the batch" in changed else [3072]:
        net(torch.ones(rows, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""".replace("CHECKPOINT", "'torch.utils.checkpoint around each block'")


def proposed(stderr: str) -> list[str]:
    """The changes below the first promise, the first one first."""
    lines = [line.removeprefix("zprof: ") for line in stderr[stderr.index("zprof: out of memory") :].splitlines()]
    begin = next(at for at, line in enumerate(lines) if line in {verdict.value for verdict in Verdict}) + 1
    end = next((at for at, line in enumerate(lines) if at >= begin and not line.startswith("  ")), len(lines))
    return [line.strip().partition(": saves")[0] for line in lines[begin:end]]


@pytest.mark.slow
def test_each_change_proposed_to_a_first_step_that_failed_lets_the_whole_run_finish(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BLOCKS)
    failed = python("-m", "zprof", "run", "--level", "alloc", "train.py", "190", at=tmp_path)
    assert failed.returncode == 1 and "DefaultCPUAllocator" in failed.stderr, failed.stderr
    # Of 16 MiB of parameters: as many of gradients, and twice as many of Adam's.
    assert "gradients of 16 MiB and states of 32.1 MiB still to be made" in failed.stderr
    assert Verdict.MAY.value in failed.stderr and "the inputs of 8 blocks stay" in failed.stderr
    changes = proposed(failed.stderr)
    assert changes == ["half the batch", "torch.utils.checkpoint around each block"]
    for change in changes:
        again = python("train.py", "190", change, at=tmp_path)
        assert again.returncode == 0, (change, again.stderr)


def test_where_nothing_lets_a_whole_step_fit_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BLOCKS)
    failed = python("-m", "zprof", "run", "--level", "alloc", "train.py", "40", at=tmp_path)
    assert "no change that was tried on these bytes, alone or combined, would have let it fit" in failed.stderr
    assert Verdict.MAY.value not in failed.stderr and Verdict.WOULD.value not in failed.stderr
    changes = proposed(failed.stderr)
    assert changes and Verdict.NOT_THE_STEP.value in failed.stderr
    assert python("train.py", "40", *changes, at=tmp_path).returncode == 1


FREED = """
import resource, torch, zhooks
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
zhooks.attach(model)
rows, kept = torch.ones(1 << 15, 256), [torch.ones(1 << 22) for _ in range(8)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    model(rows)
finally:
    kept.clear()
"""


def test_a_forward_under_ulimit_v_whose_activations_were_not_recorded_is_advised_on_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FREED)
    failed = python("-m", "zprof", "run", "train.py", at=tmp_path)
    said = [line.removeprefix("zprof: ") for line in failed.stderr[failed.stderr.index("zprof: out of memory") :].splitlines()]
    assert said[0].startswith("out of memory: RLIMIT_AS refused 32 MiB, in forward: "), failed.stderr
    assert " in use, " in said[0] and " left, " in said[0] and " short" in said[0]
    assert said[1].startswith("RLIMIT_AS limits this process, not the machine") and "ulimit -v unlimited" in said[1]
    assert "of what was in use has been freed since" in said[2], "128 MiB that would else be taken for what was left"
    [advice] = [line for line in said if line.startswith("activations were not recorded: ")]
    assert '[activation] checkpoint = "unit" or half the batch' in advice and "--level alloc" in advice
    assert python("-m", "zprof", "oom", at=tmp_path).stdout.splitlines()[:3] == said[:3]


TORN = """
import os, resource, sys, torch
torch.set_num_threads(1)
torch.empty(2 << 20)  # from now on malloc takes blocks of up to 8 MiB from its heap
full = [torch.empty(1 << 14) for _ in range(400)]  # no small tensor below finds a hole that importing has left
[size] = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize:")]
resource.setrlimit(resource.RLIMIT_AS, (size + (112 << 20), resource.RLIM_INFINITY))
torn = [(torch.empty(1 << 18), torch.empty(1 << 14)) for _ in range(80)]
kept = [small for _, small in torn]
del torn
torch.empty(16 << 20)
"""


@pytest.mark.slow
def test_what_malloc_keeps_of_what_was_freed_is_offered_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORN)
    failed = fresh("-m", "zprof", "run", "--level", "alloc", "train.py", at=tmp_path)
    assert failed.returncode == 1 and "RLIMIT_AS refused 64 MiB" in failed.stderr, failed.stderr
    first = proposed(failed.stderr)[0]
    assert first == "MALLOC_MMAP_THRESHOLD_=1048576 in the environment"
    name, _, value = first.partition(" ")[0].partition("=")
    again = fresh("train.py", at=tmp_path, more={name: value})
    assert again.returncode == 0, again.stderr


def test_a_failure_the_script_handles_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SMALL)
    handled = python("-m", "zprof", "run", "train.py", "handled", "4096", at=tmp_path)
    assert handled.returncode == 0, handled.stderr
    assert "out of memory" not in handled.stderr
    assert Trace.open(tmp_path / "run.0.zprof").notes("oom") == []


ALONE = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
held = []
while True:
    held.append(bytearray(1 << 20))
"""


def test_a_script_without_torch_that_leaves_too_little_to_load_numpy_says_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    failed = fresh("-m", "zprof", "run", "train.py", at=tmp_path)
    assert failed.returncode == 1
    assert "zprof: out of memory: RLIMIT_AS refused memory" in failed.stderr
    [end] = Trace.open(tmp_path / "run.0.zprof").notes("end")
    assert (end.body["reason"], end.body["exit"]) == ("MemoryError", 1)


NEAR = """
import resource, sys, time
field = {"RLIMIT_AS": "VmSize:", "RLIMIT_DATA": "VmData:"}[sys.argv[1]]
[used] = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field)]
resource.setrlimit(getattr(resource, sys.argv[1]), (used + (int(sys.argv[2]) << 20), resource.RLIM_INFINITY))
time.sleep(1.5)  # longer than rows wait to be written
print("done")
if sys.argv[3:]:
    bytearray(1 << 40)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_mib", "limit"),
    [(60, "RLIMIT_DATA"), (4, "RLIMIT_AS"), (4, "RLIMIT_DATA"), (60, "RLIMIT_AS")],
)
def test_a_script_that_leaves_little_memory_is_not_ended_by_what_the_recording_loads(
    tmp_path: Path, left_mib: int, limit: str
) -> None:
    (tmp_path / "train.py").write_text(NEAR)
    ended = fresh("-m", "zprof", "run", "train.py", limit, str(left_mib), at=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    died = fresh("-m", "zprof", "run", "-f", "train.py", limit, str(left_mib), "ask", at=tmp_path)
    assert (died.returncode, died.stdout) == (1, "done\n"), died.stderr
    assert "\nMemoryError\n" in died.stderr and f"zprof: out of memory: {limit} refused memory" in died.stderr


EATS = """
import time
held = []
for _ in range(200):
    held.append(bytearray(8 << 20))
    time.sleep(0.02)
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup of 100 MiB below our own."""
    with cgroup_of(100 * MIB) as folder:
        yield folder


def test_a_process_the_kernel_kills_for_want_of_memory_is_told_from_other_kills(small_cgroup: Path, tmp_path: Path) -> None:
    (tmp_path / "eat.py").write_text(EATS)
    inside = f"echo $$ > {small_cgroup}/cgroup.procs && exec {sys.executable} -m zprof run eat.py"
    killed = subprocess.run(["sh", "-c", inside], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert killed.returncode == -9, killed.stderr
    assert f"zprof: out of memory: cgroup {small_cgroup} (limit 100 MiB): the kernel killed the process" in killed.stderr
    trace = Trace.open(tmp_path / "run.0.zprof")
    said = [line.removeprefix("zprof: ") for line in killed.stderr.splitlines()]
    lines = explain(Analysis.of(trace))
    assert lines == said[: len(lines)], "the trace itself says so from now on"
    assert trace.header.argv[0] == "eat.py"
