"""Ranks that come to attach at different times: those that are early wait for the others without a word."""

from __future__ import annotations

from tests.support.forked import launch

LATE = """
import sys, time
import torch.distributed as dist
from torch import nn
import zhooks
dist.init_process_group("gloo")
# Longer than the pause after which a rank that waits looks whether the others still run.
time.sleep(1.5 * dist.get_rank())
zhooks.attach(nn.Linear(4, 4)).detach()
dist.destroy_process_group()
"""


def test_a_rank_that_waits_for_a_late_one_prints_nothing() -> None:
    ended = launch(2, "-c", LATE)
    assert [(each.returncode, each.stderr) for each in ended] == [(0, "")] * 2
