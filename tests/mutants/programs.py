"""Short programs over a store, a stash and a device, without a model: for calls that training makes too, but no training shows.

run.py runs them by name beside the workloads.  Each does what the interface of `offload` allows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.events import Bus
from offload.stash import Limits, Stash
from offload.store import Block, Mode, Store
from offload.tier import Tier
from offload.virtual import HOST, NAME, Races, Stream, running
from offload.work import DONE, HostWork, then
from tests.support.virtual_store import store_on_virtual

NUMEL = 1024


def on_device() -> Tensor:
    """Fresh memory, written."""
    return torch.empty(NUMEL, device=NAME).fill_(1.0)


def written(store: Store, tier: Tier, key: str = "block") -> Block:
    """A block that holds values; nothing of it is under way."""
    block = store.put(key, NUMEL, torch.float32, tier)
    with store.lease(block, Tier.HOST, Mode.WRITE_ALL) as values:
        values.fill_(1.0)
    store.flush()
    return block


def second() -> Stream:
    """A stream that comes after what the current one was given."""
    here = running()
    made = here.stream("second")
    here.order(made, here.current)
    return made


def activation_of_two_streams(store: Store) -> None:
    """Two streams read it in backward."""
    stash, other = Stash(store, Tier.HOST, Limits(min_nbytes=0), Bus()), second()
    x = on_device()
    running().order(other, running().current)
    saved: list[Any] = [stash.put(x), stash.put(x)]
    del x
    stash.open(saved.pop()).sum()
    with running().using(other):
        stash.open(saved.pop()).sum()
    on_device()


def activation_read_at_once(store: Store) -> None:
    """Another stream reads it while it is still on its way out, and the first goes on."""
    stash, other = Stash(store, Tier.HOST, Limits(min_nbytes=0), Bus()), second()
    saved = stash.put(on_device())
    assert saved is not None
    with running().using(other):
        stash.open(saved).sum()
    on_device()


def activations_in_a_small_window(store: Store) -> None:
    """Putting waits for what was put before."""
    stash = Stash(store, Tier.HOST, Limits(min_nbytes=0, window_nbytes=1), Bus())
    saved = [stash.put(on_device()) for _ in range(4)]
    for one in saved:
        assert one is not None
        stash.open(one).sum()


def block_written_under_a_copy(store: Store) -> None:
    """The host writes values that were on their way to the device."""
    block, out = written(store, Tier.HOST), on_device()
    store.read_into(block, out).wait()
    block.tensor(Mode.WRITE_ALL).fill_(2.0)


def lease_of_two_streams(store: Store) -> None:
    """Two streams wait for the same values, and the one that took their memory goes on."""
    block, other = written(store, Tier.HOST), second()
    lease = store.fetch(block, Tier.DEVICE, Mode.READ)
    lease.wait().sum()
    with running().using(other):
        lease.wait().sum()
    del lease
    store.close(block)
    on_device()


def gradients_added(store: Store) -> None:
    """Values are added to a block on another tier."""
    store.change(written(store, Tier.HOST), on_device(), add=True)


def opened_while_it_arrives(store: Store) -> None:
    """A block is asked for that was fetched ahead, from disk."""
    block = written(store, Tier.DISK)
    store.fetch(block, Tier.HOST, Mode.READ)
    block.tensor(Mode.READ).sum()
    store.close(block)


def moved_to_disk(store: Store) -> None:
    """A block changes its tier, and the memory it had is used again."""
    block = written(store, Tier.HOST)
    store.move(block, Tier.DISK)
    written(store, Tier.HOST, "next").tensor().fill_(2.0)


def dropped_while_it_arrives(store: Store) -> None:
    """A block is given back while the disk reads it, and its extent is used again."""
    block = written(store, Tier.DISK)
    store.fetch(block, Tier.HOST, Mode.READ)
    block.drop()
    written(store, Tier.DISK, "next")


def closed_unread_in_a_full_tier(store: Store) -> None:
    """What was fetched ahead and is not wanted makes room at once."""
    one, other = written(store, Tier.DISK), written(store, Tier.DISK, "other")
    store.change_limits({Tier.HOST: 4 * NUMEL})
    store.fetch(one, Tier.HOST, Mode.READ)
    store.close(one)
    store.fetch(other, Tier.HOST, Mode.READ).wait()
    store.close(other)


def copy_heard_of(store: Store) -> None:
    """Whoever hears that a copy is over finds it over."""
    there, over = torch.empty(NUMEL, device=f"{NAME}:{HOST}"), list[bool]()
    copy = store.device.copy(there, on_device())
    copy.when_over(lambda: over.append(copy.done()))
    assert over == [True], "a copy was heard of before it was over"


class Failed:
    """Work that is over, badly."""

    def wait(self) -> None:
        raise OSError("injected")

    synchronize = wait

    def done(self) -> bool:
        return True

    def when_over(self, call: Callable[[], None]) -> None:
        call()


def second_of_a_failed_first(store: Store) -> None:
    """What was to follow is not begun."""
    begun: list[bool] = []

    def follow() -> HostWork:
        begun.append(True)
        return DONE

    then(Failed(), follow)
    assert not begun, "the second of two was begun although the first had failed"


class Begun:
    """Work that a thread ends, once the one that made it is blocked until then, or has not waited at all."""

    def __init__(self) -> None:
        self.over, self.passed = False, threading.Event()
        self._waiter, self._thread = threading.get_ident(), threading.Thread()

    def wait(self) -> None:
        assert self.over, "what a thread was to end was not waited for"

    synchronize = wait

    def done(self) -> bool:
        return self.over

    def when_over(self, call: Callable[[], None]) -> None:
        def end() -> None:
            while not self.passed.is_set() and not _blocked(self._waiter):
                pass
            self.over = not self.passed.is_set()
            with suppress(AssertionError):
                call()

        self._thread = threading.Thread(target=end)
        self._thread.start()

    def close(self) -> None:
        self.passed.set()
        self._thread.join()


def _blocked(thread: int) -> bool:
    """It waits for an `Ending`."""
    frame = sys._current_frames()[thread]
    names: list[tuple[str, str]] = []
    while frame is not None and len(names) < 3:
        names.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return names == [("threading.py", "wait"), ("threading.py", "wait"), ("work.py", "join")]


def end_in_a_thread(store: Store) -> None:
    """Both ways to wait for what a thread begins are blocked until it has."""
    for synchronize in (False, True):
        first = Begun()
        both = then(first, lambda: DONE)
        try:
            both.synchronize() if synchronize else both.wait()
            first.synchronize()
        finally:
            first.close()


PROGRAMS: dict[str, Callable[[Store], None]] = {
    program.__name__.replace("_", " "): program
    for program in (
        activation_of_two_streams,
        activation_read_at_once,
        activations_in_a_small_window,
        block_written_under_a_copy,
        lease_of_two_streams,
        gradients_added,
        opened_while_it_arrives,
        moved_to_disk,
        dropped_while_it_arrives,
        closed_unread_in_a_full_tier,
        copy_heard_of,
        second_of_a_failed_first,
        end_in_a_thread,
    )
}


def run_program(name: str) -> Races:
    """What races in it, on hardware whose copies and disk are slow."""
    with store_on_virtual(issue=1e-3, kernel=1e-2, transfer=10.0, drive=30.0) as (store, races):
        PROGRAMS[name](store)
        store.flush()
    return races
