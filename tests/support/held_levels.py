"""An observer that knows how many bytes are held, from events alone, and a small model whose training it hears.

Tests of what the runtime says it holds call it, on every policy of ``POLICIES``.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch import nn

import zhooks
from offload.events import Event
from tests.support.inside import hush_earlier
from zprof.recording.sources import Sources
from zprof.recording.storages import Storages
from zprof.rows import RowKind


class Levels:
    """Bytes held by (what, key), as an observer can know them: counters, and storages until they die.

    Made before the run it shall hear: attachments that are alive already, of other tests, have nothing to say to it.
    """

    def __init__(self) -> None:
        gc.collect()
        hush_earlier()
        self.storages = Storages(self._row)
        self._sources = Sources(self._counter)
        self.levels: Counter[tuple[str, str]] = Counter()
        self.counters: dict[tuple[str, str], int] = {}
        self.seen: list[Event] = []

    def _row(self, kind: int, what: str, key: str, nbytes: int, ident: int) -> None:
        self.levels[what, key] += nbytes if kind == RowKind.ALLOC else -nbytes
        assert self.levels[what, key] >= 0, f"{what} {key}: {self.levels[what, key]} bytes"

    def _counter(self, what: str, key: str, level: int, time_ns: int) -> None:
        assert level >= 0, f"{what} {key}: {level} bytes"
        self.counters[what, key] = level

    def on_event(self, event: Event) -> None:
        if event.kind == "hold":
            self.storages.hold(event.what, event.key, event.subject)
        elif event.kind == "counter":
            self._sources.state(event.subject, event.what, event.key, event.nbytes, event.time_ns)
        else:
            self.seen.append(event)

    def of(self, what: str) -> int:
        both = [*self.levels.items(), *self.counters.items()]
        return sum(nbytes for (held, _), nbytes in both if held == what)

    def table(self) -> dict[str, int]:
        """Bytes by "category on tier", but for what only passes through."""
        whats = {what for what, _ in (*self.levels, *self.counters) if not what.startswith("communication")}
        return {what: nbytes for what in sorted(whats) if (nbytes := self.of(what))}

    def on(self, tier: str) -> int:
        """Bytes on a tier, but for the rings that ranks talk through."""
        levels = [*self.levels.items(), *self.counters.items()]
        return sum(nbytes for (what, key), nbytes in levels if what.endswith(f" on {tier}") and key != "message rings")


def training(policy: dict[str, Any]) -> tuple[zhooks.Attachment, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 8))
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **policy})
    return attachment, torch.optim.AdamW(model.parameters(), lr=0.01)


TIERED = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
POLICIES: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "bf16": {"stage": 2, "precision": {"param": "bf16"}},
    "host": {"stage": 3, **TIERED},
    "disk": {"stage": 3, "optimizer": {"tier": "disk"}},
    "share": {"stage": 3, **TIERED, "optimizer": {"tier": "host", "device_share": 0.6}},
}
