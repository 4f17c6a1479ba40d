"""Warnings of what all ranks of a job have in common come once a job, from its first rank; those of one rank from that rank."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import zhooks
from offload.events import Event
from offload.policy import Policy
from offload.user_warnings import warn_user
from tests.support.on_ranks import on_ranks, place


class Faulty:
    def on_event(self, event: Event) -> None:
        raise KeyError(event.what)


@on_ranks(2)
def test_what_every_rank_does_is_warned_of_on_the_first_rank_alone() -> None:
    rank, _ = place()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        policy = Policy.of({"zero_optimization": {"stage": 2}, "steps_per_print": 10})
        recomputing = {"activation": {"checkpoint": "unit"}, "rule": [{"match": "nowhere.*", "parameter": {"tier": "host"}}]}
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        zhooks.attach(model, policy={**recomputing, "stage": 3}).detach()
    texts = [str(one.message) for one in said]
    assert policy.stage == 2
    if rank:
        assert not texts, texts
    else:
        assert len(texts) == 3 and "steps_per_print" in texts[0] and "Nothing is recomputed" in "".join(texts), texts


@on_ranks(2)
def test_what_happens_to_one_rank_is_warned_of_there() -> None:
    rank, _ = place()
    model = nn.Linear(2, 2)
    attachment = zhooks.attach(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if rank:
            attachment.observe(Faulty())
        model(torch.ones(1, 2)).sum().backward()
    assert [str(one.message).split(":")[0] for one in said] == ["observer Faulty raised KeyError"] * rank, said
    attachment.detach()


@pytest.mark.parametrize(("told", "count"), [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0)])
def test_before_there_is_a_process_group_torchrun_says_which_rank_this_is(
    told: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", **told}.items() if told else ():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_user("a key is ignored")
    assert len(said) == count
