"""No race where units are used on several streams."""

from __future__ import annotations

import gc
from typing import Any

import torch

import zhooks
from offload.virtual import Races
from tests.support.two_streams import TOWERS
from tests.support.virtual import machine, on_virtual

HOST_TIERS = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
POLICIES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": HOST_TIERS,
    "arena": {"device": {"arena": "all"}},
    "activations on host": {"activation": {"tier": "host", "min_bytes": 0}},
}


@on_virtual(policy=tuple(POLICIES))
def test_units_that_two_streams_use_in_turn_are_freed_after_both(policy: str) -> None:
    with machine(world=4) as made:
        races = Races()
        made.listeners.append(races)
        with torch.device("virtual"):
            model = TOWERS.make()
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **POLICIES[policy]})
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            TOWERS.loss(model, tuple(tensor.to("virtual") for tensor in TOWERS.batch(step, 0, 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        attachment.detach()
        gc.collect()
        assert races.checked > 300
        assert not races.found, "\n".join(map(str, races.found))
