"""Work under way: one of two, one of many, and where what follows is begun."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from offload.threads import Task
from offload.work import DONE, HostWork, all_of, then


class Manual:
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._calls: list[Callable[[], None]] = []
        self.error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def wait(self) -> None:
        assert self._over.wait(60)
        if self.error is not None:
            raise self.error

    synchronize = wait

    def done(self) -> bool:
        return self._over.is_set()

    def when_over(self, call: Callable[[], None]) -> None:
        if self._over.is_set():
            call()
        else:
            self._calls.append(call)


def test_what_follows_is_begun_by_the_thread_that_ended_the_first_and_by_no_look() -> None:
    first, second = Manual(), Manual()
    begun_by: list[int] = []

    def follow() -> HostWork:
        begun_by.append(threading.get_ident())
        return second

    both = then(first, follow)
    assert not both.done() and not begun_by
    worker = threading.Thread(target=first.end)
    worker.start()
    worker.join()
    assert begun_by == [worker.ident] and not both.done()
    second.end()
    assert both.done()
    both.wait()
    both.synchronize()


def test_what_follows_an_end_already_past_is_begun_at_once() -> None:
    second = Manual()
    both = then(DONE, lambda: second)
    assert not both.done()
    second.end()
    assert both.done()


@pytest.mark.parametrize("where", ["first", "start", "second"])
def test_an_error_is_raised_at_each_wait_wherever_it_was_made(where: str) -> None:
    first, second = Manual(), Manual()
    started: list[bool] = []

    def follow() -> HostWork:
        started.append(True)
        if where == "start":
            raise OSError("start")
        return second

    both = then(first, follow)
    first.end(OSError("first") if where == "first" else None)
    second.end(OSError("second"))
    assert both.done() and bool(started) == (where != "first")
    for wait in (both.wait, both.synchronize):
        with pytest.raises(OSError, match=where):
            wait()


def test_three_follow_each_other_and_the_end_is_heard_once() -> None:
    works = [Manual(), Manual(), Manual()]
    heard: list[str] = []
    chain = then(then(works[0], lambda: works[1]), lambda: works[2])
    chain.when_over(lambda: heard.append("early"))
    for work in works:
        assert not chain.done() and not heard
        work.end()
    assert chain.done() and heard == ["early"]
    chain.when_over(lambda: heard.append("late"))
    assert heard == ["early", "late"]


def test_all_of_many_is_over_when_the_last_is() -> None:
    one, other = Manual(), Manual()
    both = all_of([one, other])
    one.end()
    assert not both.done()
    other.end(OSError("other"))
    assert both.done()
    with pytest.raises(OSError, match="other"):
        both.wait()
    assert all_of([one]) is one and all_of([]).done()


def test_a_task_raises_what_its_job_raised_to_all_who_wait_and_runs_once() -> None:
    def job() -> None:
        raise OSError("of the job")

    task = Task(job, lambda error: ValueError(f"explained: {error}"))
    heard: list[str] = []
    task.when_over(lambda: heard.append("over"))
    assert not task.done() and not heard
    task.run()
    assert task.done() and heard == ["over"] and type(task.error()) is OSError
    for wait in (task.wait, task.synchronize):
        with pytest.raises(ValueError, match="explained: of the job"):
            wait()
    with pytest.raises(AssertionError, match="once"):
        task.run()


def test_memory_of_a_job_that_ended_is_free_before_what_follows_begins() -> None:
    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    task = Task(partial(lambda used: None, memory))
    del memory
    freed: list[bool] = []
    task.when_over(lambda: freed.append(alive() is None))
    task.run()
    assert freed == [True]
