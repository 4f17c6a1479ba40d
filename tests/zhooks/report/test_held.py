"""What the runtime says it holds, and how long it stood still: the events that zprof's ledger and stalls are made of."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
from collections import Counter
from typing import Any

import pytest
import torch

import zhooks
from offload.budget import Account
from offload.budget.budget import holder_of
from offload.events import Bus, Recorder, listen, state_all
from offload.tier import Tier
from tests.support.held_levels import POLICIES, TIERED, Levels, training
from tests.support.inside import flats_of, units_of
from tests.support.on_ranks import on_ranks
from zprof.recording.sources import Sources
from zprof.recording.storages import Storages
from zprof.rows import RowKind


def step(attachment: zhooks.Attachment, optimizer: torch.optim.Optimizer) -> None:
    attachment.model(torch.ones(4, 8)).sum().backward()
    optimizer.step()


def by_report(attachment: zhooks.Attachment) -> dict[str, int]:
    """The same from ``Attachment.memory``, which reads the storages themselves."""
    return {f"{row.what} on {row.tier}": row.nbytes for row in attachment.memory().rows if row.nbytes}


@on_ranks(1, 2, name=tuple(POLICIES), late=(False, True))
def test_what_is_held_is_what_the_memory_report_counts(name: str, late: bool) -> None:
    levels, scratch = Levels(), tempfile.TemporaryDirectory()
    stop = listen(levels) if not late else None
    attachment, optimizer = training({**POLICIES[name], "disk": {"path": scratch.name}})
    step(attachment, optimizer)
    if stop is None:
        attachment.observe(levels)
    else:
        state_all()
    gc.collect()
    held = levels.table()
    flats = flats_of(attachment)
    full = sum(flat.plan.full_nbytes for flat in flats if flat.releasable and flat.full is not None)
    held["parameter on device"] = held.get("parameter on device", 0) - full
    # Counters of steps belong to no unit; both leave them out.
    assert {what: nbytes for what, nbytes in held.items() if nbytes} == by_report(attachment)
    if stop is not None:
        stop()
    attachment.detach()
    scratch.cleanup()


def test_nothing_is_held_after_the_model_is_gone() -> None:
    levels = Levels()
    stop = listen(levels)
    attachment, optimizer = training({"stage": 3, "parameter": {"tier": "host"}})
    step(attachment, optimizer)
    state_all()
    assert levels.of("parameter on host") > 0 and levels.of("optimizer on device") > 0
    attachment.detach()
    del attachment, optimizer
    gc.collect()
    stop()
    assert levels.table() == {}


def test_two_attachments_that_name_units_alike_are_counted_together() -> None:
    levels = Levels()
    stop = listen(levels)
    first, one = training({"stage": 3, **TIERED})
    second, other = training({"stage": 3, **TIERED})
    step(first, one)
    alone = sum(nbytes for what, nbytes in by_report(first).items() if what.endswith("host"))
    step(second, other)
    assert alone > 0 and levels.on("host") == 2 * alone
    first.detach()
    assert levels.on("host") == alone
    second.detach()
    assert levels.on("host") == 0
    stop()


def test_what_a_run_still_held_when_it_was_dropped_is_held_no_longer() -> None:
    class Source:
        pass

    said: list[tuple[str, str, int]] = []
    sources = Sources(lambda what, key, level, time_ns: said.append((what, key, level)))
    one, two = Source(), Source()
    sources.state(one, "parameter on host", "a", 5, 0)
    sources.state(two, "parameter on host", "a", 7, 0)
    del one
    sources.bury(0)
    del two
    sources.state(Source(), "optimizer on host", "b", 1, 0)
    assert [level for what, _, level in said if what == "parameter on host"] == [5, 12, 7, 0]


def test_an_observer_may_come_twice_go_in_between_and_come_again() -> None:
    levels, late = Levels(), Levels()
    attachment, optimizer = training({"stage": 3, **TIERED})
    handle = attachment.observe(levels)
    stop, again = listen(levels), listen(levels)
    step(attachment, optimizer)
    handle.close()
    handle.close()
    step(attachment, optimizer)
    with attachment.observe(levels):
        stop()
        again()
        attachment.observe(levels)
        step(attachment, optimizer)
        attachment.observe(late)
        state_all()
        assert levels.table() == late.table() == by_report(attachment)
    attachment.detach()


def test_who_listens_from_another_thread_while_steps_are_made_misses_nothing() -> None:
    levels = [Levels() for _ in range(8)]
    attachment, optimizer = training({"stage": 3, **TIERED})
    stops: list[Any] = []
    comer = threading.Thread(target=lambda: stops.extend(listen(one) for one in levels))
    comer.start()
    while comer.is_alive():
        step(attachment, optimizer)
    comer.join()
    step(attachment, optimizer)
    state_all()
    tables = [one.table() for one in levels]
    assert len(stops) == 8 and tables == [tables[0]] * 8 and tables[0]["optimizer on host"] > 0
    for stop in stops:
        stop()
    attachment.detach()


@on_ranks(2)
def test_waits_lie_inside_what_is_waited_for_and_units_compute_in_order() -> None:
    attachment, optimizer = training({"stage": 3})
    recorder = Recorder()
    attachment.observe(recorder)
    step(attachment, optimizer)
    step(attachment, optimizer)
    for what in ("gather", "reduce"):
        whole, waits = recorder.spans(what), recorder.spans(f"wait {what}")
        assert len(waits) == len(whole) > 0
        for key, begin, end in waits:
            assert any(key == other and first <= begin and end <= last for other, first, last in whole)
    computed = [key for key, _, _ in recorder.spans("compute")]
    assert computed == [unit.name for unit in units_of(attachment)] * 2
    ready = [event.key for event in recorder.events if event.what == "ready"]
    assert ready == [flat.name for unit in reversed(units_of(attachment)) for flat in unit.flats] * 2


def test_the_policy_is_stated_so_that_it_can_be_read_again() -> None:
    attachment, _ = training({"stage": 2})
    recorder = Recorder()
    attachment.observe(recorder)
    (text,) = [event.key for event in recorder.events if event.what == "policy"]
    assert zhooks.Policy.of(json.loads(text)) == attachment.policy


def test_an_observer_with_a_beginning_and_an_end_gets_them() -> None:
    class Whole(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.life: list[str] = []

        def start(self) -> None:
            self.life.append("start")

        def close(self) -> None:
            self.life.append("close")

    attachment, _ = training({})
    whole = Whole()
    with attachment.observe(whole):
        assert whole.life == ["start"]
    assert whole.life == ["start", "close"]


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("parameter/layers.0", ("parameter", "layers.0")),
        ("copy/layers.0", ("parameter", "layers.0")),
        ("gradient/layers.0", ("gradient", "layers.0")),
        ("optimizer/exp_avg/layers.0", ("optimizer", "layers.0")),
        ("optimizer/master/a/b", ("optimizer", "a/b")),
        ("staging of blocks", ("communication", "staging")),
        ("GPT train activation 12", ("activation", "GPT train")),
        ("something", ("other", "something")),
        ("parameter/", ("other", "parameter/")),
    ],
)
def test_a_key_says_whose_the_bytes_are(key: str, owner: tuple[str, str]) -> None:
    assert holder_of(key) == owner


def test_an_account_states_levels_as_they_change_and_all_of_them_when_asked() -> None:
    account, recorder = Account(), Recorder()
    account.take(Tier.HOST, "parameter/a", 100, None)
    account.bus = bus = Bus()
    bus.attach(recorder)
    account.take(Tier.HOST, "optimizer/x/a", 50, None)
    account.take(Tier.HOST, "optimizer/y/a", 50, None)
    account.give(Tier.HOST, "optimizer/x/a", 50)
    memory = torch.zeros(10, dtype=torch.uint8)
    account.take(Tier.DEVICE, "gradient/a", 10, memory)
    said = [(event.kind, event.what, event.key, event.nbytes) for event in recorder.events]
    assert said == [
        ("counter", "optimizer on host", "a", 50),
        ("counter", "optimizer on host", "a", 100),
        ("counter", "optimizer on host", "a", 50),
        ("hold", "gradient on device", "a", 10),
    ]
    recorder.clear()
    account.state()
    assert {(event.what, event.nbytes) for event in recorder.events} == {
        ("parameter on host", 100),
        ("optimizer on host", 50),
        ("gradient on device", 10),
    }
    recorder.clear()
    del memory
    account.state()
    assert "gradient on device" not in [event.what for event in recorder.events]


def test_what_is_given_back_after_the_store_was_shut_is_not_counted_below_nothing() -> None:
    account, recorder = Account(), Recorder()
    account.bus.attach(recorder)
    account.take(Tier.HOST, "parameter/a", 100, None)
    account.close()
    account.give(Tier.HOST, "parameter/a", 100)
    assert [event.nbytes for event in recorder.events] == [100, 0]


def test_threads_that_name_one_storage_at_once_count_it_once() -> None:
    rows: list[tuple[int, str, str, int, int]] = []
    storages = Storages(lambda *row: rows.append(row))
    held = [torch.zeros(4).untyped_storage()]
    start = threading.Barrier(4)

    def name(number: int) -> None:
        start.wait()
        for turn in range(2000):
            storages.hold(("parameter on device", "gradient on device")[(turn + number) % 2], "a", held[0])

    threads = [threading.Thread(target=name, args=(number,)) for number in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    held.clear()
    levels: Counter[str] = Counter()
    for kind, what, _, nbytes, _ in rows:
        levels[what] += nbytes if kind == RowKind.ALLOC else -nbytes
        assert 0 <= levels[what] <= 16
    assert len(storages) == sum(levels.values()) == 0 and {ident for *_, ident in rows} == {1}


def test_a_storage_is_held_until_it_dies_and_once_only() -> None:
    rows: list[tuple[int, str, str, int, int]] = []
    storages = Storages(lambda *row: rows.append(row))
    tensor = torch.zeros(4)
    storages.hold("parameter on device", "a", tensor.untyped_storage())
    storages.hold("parameter on device", "a", tensor.view(2, 2).untyped_storage())
    storages.hold("other on device", "guess", tensor.untyped_storage(), guess=True)
    assert rows == [(RowKind.ALLOC, "parameter on device", "a", 16, 1)]
    storages.hold("communication on device", "idle", tensor.untyped_storage())
    assert rows[1:] == [
        (RowKind.FREE, "parameter on device", "a", 16, 1),
        (RowKind.ALLOC, "communication on device", "idle", 16, 1),
    ]
    tensor.untyped_storage().resize_(64)
    storages.hold("communication on device", "idle", tensor.untyped_storage())
    saved = torch.zeros(1, requires_grad=True) * tensor[:1]
    address = tensor.untyped_storage()._cdata
    del tensor
    assert storages.knows(address) and rows[-1][3] == 64
    del saved
    assert rows[-1] == (RowKind.FREE, "communication on device", "idle", 64, 1)
    assert len(storages) == 0
