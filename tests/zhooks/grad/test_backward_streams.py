"""Gradients that arrive on several streams: whatever a backward does with them runs under one.

pytest runs it in this process, over streams on paper; `test_gpu.py` holds the same on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.device import CommContext
from offload.events import Event
from tests.support.inside import runtime_of
from tests.support.streams import Paper, Stream


class Watch:
    """The stream that each reduction begins and ends on."""

    def __init__(self, paper: Paper) -> None:
        self.paper, self.seen = paper, list[Stream]()

    def on_event(self, event: Event) -> None:
        if event.what == "reduce":
            self.seen.append(self.paper.current())


@pytest.mark.parametrize("policy", [{}, {"comm": {"buffer": "1 KiB"}}, {"schedule": {"max_reductions": 1}}], ids=str)
def test_all_reductions_of_a_backward_run_on_one_stream_of_their_own(policy: dict[str, Any]) -> None:
    model, paper = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), Paper()
    chosen = {"units": {"min_numel": 0}, "precision": {"reduce": "bf16"}, **policy}
    attachment = zhooks.attach(model, policy=chosen)
    runtime_of(attachment).reducer._context = CommContext(paper)
    streams, watch = [paper.stream(f"of {number}") for number in range(3)], Watch(paper)
    attachment.observe(watch)

    def on(number: int, grad: Tensor) -> None:
        paper._here.stream = streams[number]

    x = torch.ones(2, 32)
    for number, module in enumerate(model):
        x = module(x)
        x.register_hook(lambda grad, number=number: on(number, grad))
    x.sum().backward()
    assert len(watch.seen) >= 6 and set(watch.seen) == {paper.side("reduce")}
    watch.seen.clear()
    attachment.detach()
