"""Memory defragmentation shown: one training step, recorded with and without an arena, replayed through the model of torch's
CUDA allocator under one limit.

pytest runs it; the training is recorded on a rank of its own. The replay is a model: nothing here was measured on a GPU.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import zhooks
from offload.allocator import ALLOC, RELEASE, Events, replay
from offload.events import Event, listen
from tests.support.inside import pool_of
from tests.support.ranks import Pool
from tests.support.widening import VOCAB, Widening
from zprof.recording.storages import Storages
from zprof.recording.tracker import Tracker
from zprof.rows import RowKind

MIB = 1 << 20
TOKENS = 32768


class Trace:
    """What a caching allocator is asked for: every storage that torch allocates, and every region an arena reserves.

    Ranges of an arena are not torch's allocations, and the tracker leaves them out.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []
        self._slots: dict[int | str, int] = {}
        self._made = 0
        self.storages = Storages(self._write, lambda *_: None)

    def on_event(self, event: Event) -> None:
        if event.what == "arena":
            self._free(event.key)
            self._alloc(event.key, event.nbytes)

    def _write(self, kind: int, what: str, key: str, nbytes: int, ident: int) -> None:
        if kind == RowKind.ALLOC:
            self._alloc(ident, nbytes)
        else:
            self._free(ident)

    def _alloc(self, key: int | str, nbytes: int) -> None:
        if nbytes:
            self._slots[key], self._made = self._made, self._made + 1
            self.rows.append((ALLOC, self._slots[key], nbytes))

    def _free(self, key: int | str) -> None:
        if key in self._slots:
            self.rows.append((RELEASE, self._slots.pop(key), 0))


def recorded(arena: str) -> tuple[list[tuple[int, int, int]], int, float]:
    """A training step on a rank: its allocations in order, ranges that fell back, and the loss."""
    torch.set_num_threads(1)
    gc.collect()
    trace = Trace()
    tracker = Tracker(trace.storages)
    stop = listen(trace)
    tracker.start()
    try:
        torch.manual_seed(0)
        model = Widening()
        units = {"classes": ["Block", "Embedding", "Linear"], "min_numel": 0}
        policy = {"units": units, "activation": {"checkpoint": "unit"}, "device": {"arena": arena}}
        attachment = zhooks.attach(model, policy=policy)
        # As on CUDA, where freed buffers are the allocator's to keep.
        pool_of(attachment).idle_nbytes = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, VOCAB, (TOKENS,))
        loss = F.cross_entropy(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    finally:
        stop()
        tracker.close()
    kept = pool_of(attachment).arena
    fell_back = kept.report().fell_back if kept is not None else 0
    attachment.detach()
    return trace.rows, fell_back, loss.item()


def least(events: Events) -> int:
    """The least MiB under which the allocator serves every request."""
    low, high = 1, 1 << 12
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if replay(events, limit=middle * MIB).failed else (low, middle)
    return low


@pytest.mark.slow
def test_a_step_that_fails_with_30_percent_free_goes_through_with_an_arena(ranks1: Pool) -> None:
    ((plain, _, plain_loss),) = ranks1.run("tests.zhooks.unit.test_arena_replay:recorded", limit_s=200, arena="none")
    ((apart, fell_back, apart_loss),) = ranks1.run("tests.zhooks.unit.test_arena_replay:recorded", limit_s=200, arena="all")
    without, with_it = Events.of(plain), Events.of(apart)
    limit = (least(without) - 1) * MIB
    replayed = replay(without, limit=limit)
    failure = replayed.failures[0]
    # What torch would call free: all that is not allocated, reserved by it or not.
    free = limit - failure.level.allocated
    assert free >= 0.3 * limit, f"{free / limit:.1%} free of {limit // MIB} MiB"
    assert failure.nbytes < free
    # The same bytes were wanted, but for one input that is there twice while it is copied; none of them stranded.
    assert replay(with_it, limit=limit).failed == 0
    assert least(with_it) * MIB < 0.95 * limit
    assert fell_back == 0 and plain_loss == apart_loss
