"""A store of the process group that stops to answer: whoever asks it is told so in time, and since when.

pytest runs it on one rank, with a store that answers when the test lets it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import zhooks
from tests.support.slow import slow
from tests.support.waiting import soon
from zhooks.comm import CONTROL, Call, Meeting
from zhooks.comm.group_store import GroupStore
from zhooks.comm.lost_rank import AgreedFailure, Process
from zhooks.layout import Axis

ASKED = ("add", "check", "get", "set")
CALL, AXIS = Call(CONTROL, "agree", "all ranks"), Axis("shard", (0, 1), 0)


class Silent:
    """A store whose answers wait for ``answers``."""

    host, port = "10.0.0.1", 29500

    def __init__(self) -> None:
        self._store, self.answers = dist.HashStore(), threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        if name not in ASKED:
            raise AttributeError(name)

        def ask(*args: Any) -> Any:
            self.answers.wait()
            return getattr(self._store, name)(*args)

        return ask


@pytest.fixture
def silent() -> Iterator[Silent]:
    store = Silent()
    yield store
    store.answers.set()


def met(store: Any, monkeypatch: pytest.MonkeyPatch, verb: str) -> Meeting:
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return Meeting(verb, 0.2)


@pytest.mark.parametrize("ask", ["agree", "heard", "say", "arrive", "arrived", "met"])
@pytest.mark.parametrize("verb", ["attach", *slow("recover", "apply")])
def test_a_meeting_whose_store_falls_silent_says_so_in_time(
    ask: str, verb: str, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = met(silent, monkeypatch, verb)
    silent.answers.clear()
    given: dict[str, tuple[Any, ...]] = {"heard": ("x", 1), "say": ("x", "y"), "arrive": (["x"],), "met": ()}
    said = rf"^The process group's store at 10\.0\.0\.1:29500 has not answered for .* \(Rank 0 in {verb}\.\)$"
    with pytest.raises(zhooks.DivergenceError, match=said):
        getattr(meeting, ask)(*given.get(ask, ("x",)))


def test_a_refusal_is_raised_though_the_store_is_silent(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = met(silent, monkeypatch, "attach")
    silent.answers.clear()
    meeting.refuse(zhooks.AttachError("no"))


def test_ranks_that_connect_while_the_store_falls_silent_are_told(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = met(silent, monkeypatch, "attach")
    silent.answers.clear()
    with pytest.raises(zhooks.DivergenceError, match="has not answered for"):
        meeting.connect(lambda: silent.add("torch's own", 1))


def elsewhere(machine: str = "another") -> Process:
    return Process(machine, 7, 7, "node7")


def failure_of(store: Any, other: Process, answer_s: float = 0.5) -> AgreedFailure:
    return AgreedFailure(GroupStore(store, "rank 0", answer_s), "here", 0, {0: Process.here(), 1: other}, 1.0)


def test_a_wait_that_fails_while_the_store_is_silent_names_the_store_and_the_ranks_elsewhere(silent: Silent) -> None:
    failure = failure_of(silent, elsewhere())
    silent.answers.clear()
    said = str(failure.fail(CALL, AXIS, "the backend said: Operation timed out!"))
    assert said.startswith("The process group's store at 10.0.0.1:29500 has not answered for")
    assert "Expected every rank in agree within 1.0 s, found rank 0 waiting for it." in said
    assert "nothing is known of rank 1 on node7" in said and "gone" not in said and "attachment.recover()" in said


def test_a_rank_of_this_machine_that_runs_is_not_named_by_one_that_reaches_no_store(silent: Silent) -> None:
    failure = failure_of(silent, Process.here())
    silent.answers.clear()
    said = str(failure.fail(CALL, AXIS, "the backend said: Connection closed by peer", kind="gone", suspects=[1]))
    assert "has not answered for" in said and "rank 1" not in said.lower()


def test_a_wait_goes_on_while_the_store_is_silent_and_hears_of_the_others_once_it_answers(silent: Silent) -> None:
    failure = failure_of(silent, Process.here(), 60.0)
    silent.answers.clear()
    assert not failure.called(AXIS)
    began = time.monotonic()
    assert not failure.called(AXIS) and time.monotonic() - began < 60
    other = threading.Thread(target=lambda: failure_of(silent, Process.here(), 60.0).fail(CALL, AXIS, "late"))
    silent.answers.set()
    other.start()
    assert soon(lambda: failure.called(AXIS))
    other.join()


def test_a_store_that_is_gone_is_named_with_what_to_do() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            if name not in ASKED:
                raise AttributeError(name)

            def ask(*_: Any) -> Any:
                raise dist.DistNetworkError("Connection reset by peer\nframe #0")

            return ask

    failure = failure_of(Gone(), elsewhere(), 60.0)
    assert failure.called(AXIS)
    said = str(failure.fail(CALL, AXIS, "Connection closed by peer", kind="gone", suspects=[1]))
    assert "The process group's store is gone: Connection reset by peer, and rank 1 on node7 closed the" in said
    assert "frame" not in said and "load the last checkpoint in new" in said


def test_a_rank_that_ended_while_the_store_was_silent_is_not_said_to_be_the_cause(silent: Silent) -> None:
    failure = failure_of(silent, dataclasses.replace(Process.here(), ticks=1))
    silent.answers.clear()
    said = str(failure.fail(CALL, AXIS, "the backend said: Connection closed by peer", kind="gone", suspects=[1]))
    assert "has not answered for" in said and ", and rank 1 ended" in said and "gone" not in said
