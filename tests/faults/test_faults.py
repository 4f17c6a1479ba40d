"""A sample of faults at labelled events of a run: it recovers bit for bit, or all name one rank and a checkpoint loads.

pytest runs it in processes of their own; ``python -m tests.faults`` runs as many as are asked for.
"""

from __future__ import annotations

import random

import pytest

from tests.faults.harness import SETTINGS, Undisturbed, check, faults
from tests.faults.program import Fault, Setting

BACKWARD = "begin backward backward of Sequential train"


@pytest.mark.parametrize(
    ("setting", "fault", "how"),
    [
        (Setting(2, "shm", 3), Fault("kill", 0, BACKWARD, 3), "stopped; step-3 loads"),
        pytest.param(
            Setting(4, "p2p", 3), Fault("kill", 2, "begin wait gather 2", 3), "stopped; step-3 loads", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_rank_is_named_alike_by_all_others_and_a_checkpoint_loads(setting: Setting, fault: Fault, how: str) -> None:
    checked = check(Undisturbed.of(setting), fault)
    assert not checked.problem, checked
    assert checked.how in (how, "stopped; step-0 loads"), checked


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_any_fault_at_any_event_leaves_equal_bits_or_one_named_error(setting: Setting) -> None:
    base, rng = Undisturbed.of(setting), random.Random(str(setting))
    found = faults(base, rng)
    for fault in (next(found) for _ in range(6)):
        checked = check(base, fault)
        assert not checked.problem, (fault, checked)
