"""Short programs over a store, a stash and a device, without a model: for calls that training makes too, but no training shows.

run.py runs them by name on the virtual device beside the workloads, accelerated.py on the accelerator, where what they return
is compared.  Each does what the interface of `offload` allows.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import open_device
from offload.disk import Bytes, DiskFile, SystemIo
from offload.events import Bus
from offload.memory import HostPool
from offload.stash import Limits, Stash
from offload.store import Block, Mode, Store
from offload.tier import Tier
from offload.virtual import HOST, Races
from offload.work import DONE, HostWork, then
from tests.support.two_streams import on_accelerator, streams
from tests.support.virtual_store import store_on_virtual

NUMEL = 1024
#: Streams of which chance has none before the copies.
MANY = 6
#: Longer than a program takes from one call to the next.
BEHIND_S = 0.1
Program = Callable[[Store], list[Tensor]]


def on_device(store: Store, value: float = 1.0) -> Tensor:
    """Fresh memory, written."""
    return torch.empty(NUMEL, device=store.device.device).fill_(value)


def on_host(store: Store) -> Tensor:
    """Memory of the host's that copies do not stage."""
    return torch.zeros(NUMEL).pin_memory() if on_accelerator() else torch.empty(NUMEL, device=f"virtual:{HOST}")


def written(store: Store, tier: Tier, key: str = "block", value: float = 1.0) -> Block:
    """A block that holds values; nothing of it is under way."""
    block = store.put(key, NUMEL, torch.float32, tier)
    with store.lease(block, Tier.HOST, Mode.WRITE_ALL) as values:
        values.fill_(value)
    store.flush()
    return block


def second() -> Any:
    """A stream that comes after what the current one was given."""
    here = streams()
    made = here.stream("second")
    here.order(made, here.current)
    return made


def activation_of_two_streams(store: Store) -> list[Tensor]:
    """Two streams read it in backward."""
    stash, other = Stash(store, Tier.HOST, Limits(min_nbytes=0), Bus()), second()
    x = on_device(store)
    streams().order(other, streams().current)
    saved: list[Any] = [stash.put(x), stash.put(x)]
    del x
    seen = [stash.open(saved.pop()).sum()]
    with streams().using(other):
        seen.append(stash.open(saved.pop()).sum())
    on_device(store, 7.0)
    return seen


def activation_read_at_once(store: Store) -> list[Tensor]:
    """Another stream reads it while it is still on its way out, and the first goes on."""
    stash, other = Stash(store, Tier.HOST, Limits(min_nbytes=0), Bus()), second()
    saved = stash.put(on_device(store))
    assert saved is not None
    with streams().using(other):
        seen = [stash.open(saved).sum()]
    on_device(store, 7.0)
    return seen


def activations_in_a_small_window(store: Store) -> list[Tensor]:
    """Putting waits for what was put before."""
    stash = Stash(store, Tier.HOST, Limits(min_nbytes=0, window_nbytes=1), Bus())
    saved = [stash.put(on_device(store, float(number))) for number in range(4)]
    return [stash.open(one).sum() for one in saved if one is not None]


def block_written_under_a_copy(store: Store) -> list[Tensor]:
    """The host writes values that were on their way to the device."""
    block, out = written(store, Tier.HOST), on_device(store)
    store.read_into(block, out).wait()
    block.tensor(Mode.WRITE_ALL).fill_(2.0)
    return [out]


def lease_of_two_streams(store: Store) -> list[Tensor]:
    """Two streams wait for the same values, and the one that took their memory goes on."""
    block, other = written(store, Tier.HOST), second()
    lease = store.fetch(block, Tier.DEVICE, Mode.READ)
    seen = [lease.wait().sum()]
    with streams().using(other):
        seen.append(lease.wait().sum())
    del lease
    store.close(block)
    on_device(store, 7.0)
    return seen


def lease_of_a_stream_ahead(store: Store) -> list[Tensor]:
    """A second stream is ahead of the one that fetched the values, in memory that held others."""
    block = written(store, Tier.HOST)
    # All that the allocator has of this size, wherever it begins to look.
    before = [on_device(store, 7.0) for _ in range(MANY)]
    del before
    other = second()
    lease = store.fetch(block, Tier.DEVICE, Mode.READ)
    lease.wait()
    with streams().using(other):
        seen = [lease.wait().sum()]
        other.synchronize()
    store.close(block)
    return seen


def read_after_a_flush(store: Store) -> list[Tensor]:
    """The host reads what the device has written back."""
    block = written(store, Tier.HOST)
    with store.lease(block, Tier.DEVICE, Mode.UPDATE) as values:
        values.add_(1.0)
    del values
    store.flush()
    return [block.tensor(Mode.READ).clone()]


def gradients_added(store: Store) -> list[Tensor]:
    """Values are added to a block on another tier."""
    block = written(store, Tier.HOST)
    store.change(block, on_device(store), add=True)
    return [block.tensor(Mode.READ).clone()]


def opened_while_it_arrives(store: Store) -> list[Tensor]:
    """A block is asked for that was fetched ahead, from disk, into memory that held others."""
    block = written(store, Tier.DISK)
    written(store, Tier.HOST, "before", 7.0).drop()
    store.fetch(block, Tier.HOST, Mode.READ)
    seen = [block.tensor(Mode.READ).sum()]
    store.close(block)
    return seen


def read_from_disk_by_many_streams(store: Store) -> list[Tensor]:
    """What is under way to the device on one stream comes after what that stream did with the memory before."""
    block, seen = written(store, Tier.DISK), []
    for number in range(MANY):
        with streams().using(streams().stream(f"reader {number}")):
            out = on_device(store, 7.0)
            store.read_into(block, out).wait()
            seen.append(out.sum())
    return seen


def fetched_through_a_small_host(store: Store) -> list[Tensor]:
    """What passes through the host's memory waits for its turn there."""
    blocks = [written(store, Tier.DISK, f"block {number}", float(number)) for number in range(3)]
    store.change_limits({Tier.HOST: 4 * NUMEL})
    seen = [store.fetch(block, Tier.DEVICE, Mode.READ).wait().sum() for block in blocks]
    for block in blocks:
        store.close(block)
    return seen


def read_back_by_the_host(store: Store) -> list[Tensor]:
    """The host opens what a device keeps, once it has come."""
    block = store.put("block", NUMEL, torch.float32, Tier.DEVICE)
    with store.lease(block, Tier.DEVICE, Mode.WRITE_ALL) as values:
        values.fill_(1.0)
    del values
    written(store, Tier.HOST, "before", 7.0).drop()
    with store.lease(block, Tier.HOST, Mode.READ) as values:
        seen = [values.clone()]
    del values
    written(store, Tier.HOST, "before", 7.0).drop()
    store.fetch(block, Tier.HOST, Mode.READ)
    seen.append(block.tensor(Mode.READ).clone())
    store.close(block)
    return seen


def moved_to_disk(store: Store) -> list[Tensor]:
    """A block changes its tier, and the memory it had is used again."""
    block = written(store, Tier.HOST)
    store.move(block, Tier.DISK)
    written(store, Tier.HOST, "next", 2.0)
    return [block.tensor(Mode.READ).clone()]


def dropped_while_it_arrives(store: Store) -> list[Tensor]:
    """A block is given back while the disk reads it, and its extent is used again."""
    block = written(store, Tier.DISK)
    store.fetch(block, Tier.HOST, Mode.READ)
    block.drop()
    return [written(store, Tier.DISK, "next", 2.0).tensor(Mode.READ).clone()]


def dropped_while_it_is_written(store: Store) -> list[Tensor]:
    """A block is given back while what the device wrote goes back to it, and its memory is used again."""
    block = written(store, Tier.HOST)
    with store.lease(block, Tier.DEVICE, Mode.WRITE_ALL) as values:
        values.fill_(7.0)
    del values
    block.drop()
    return [written(store, Tier.HOST, "next", 2.0).tensor(Mode.READ).clone()]


def closed_unread_in_a_full_tier(store: Store) -> list[Tensor]:
    """What was fetched ahead and is not wanted makes room at once."""
    one, other = written(store, Tier.DISK), written(store, Tier.DISK, "other", 2.0)
    store.change_limits({Tier.HOST: 4 * NUMEL})
    store.fetch(one, Tier.HOST, Mode.READ)
    store.close(one)
    seen = [store.fetch(other, Tier.HOST, Mode.READ).wait().clone()]
    store.close(other)
    return seen


def copy_heard_of(store: Store) -> list[Tensor]:
    """Whoever hears that a copy is over finds it over."""
    there, over, heard = on_host(store), list[bool](), threading.Event()
    copy = store.device.copy(there, on_device(store))

    def hear() -> None:
        over.append(copy.done())
        heard.set()

    copy.when_over(hear)
    assert heard.wait(60)
    assert over == [True], "a copy was heard of before it was over"
    return [there]


def copy_that_nobody_waits_for(store: Store) -> list[Tensor]:
    """What it copies is freed, and its memory used again, while it is under way."""
    there = on_host(store)
    store.device.copy(there, on_device(store))
    on_device(store, 7.0)
    return [there]


def device_closed_under_a_copy(store: Store) -> list[Tensor]:
    """What was under way has arrived."""
    there = on_host(store)
    store.device.copy(there, on_device(store))
    store.device.close()
    return [there.clone()]


class Failed:
    """Work that is over, badly."""

    def wait(self) -> None:
        raise OSError("injected")

    synchronize = wait

    def done(self) -> bool:
        return True

    def when_over(self, call: Callable[[], None]) -> None:
        call()


def second_of_a_failed_first(store: Store) -> list[Tensor]:
    """What was to follow is not begun."""
    begun: list[bool] = []

    def follow() -> HostWork:
        begun.append(True)
        return DONE

    then(Failed(), follow)
    assert not begun, "the second of two was begun although the first had failed"
    return []


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


def end_in_a_thread(store: Store) -> list[Tensor]:
    """Both ways to wait for what a thread begins are blocked until it has."""
    for synchronize in (False, True):
        first = Begun()
        both = then(first, lambda: DONE)
        try:
            both.synchronize() if synchronize else both.wait()
            first.synchronize()
        finally:
            first.close()
    return []


PROGRAMS: dict[str, Program] = {
    program.__name__.replace("_", " "): program
    for program in (
        activation_of_two_streams,
        activation_read_at_once,
        activations_in_a_small_window,
        block_written_under_a_copy,
        lease_of_two_streams,
        lease_of_a_stream_ahead,
        read_after_a_flush,
        gradients_added,
        opened_while_it_arrives,
        read_from_disk_by_many_streams,
        fetched_through_a_small_host,
        read_back_by_the_host,
        moved_to_disk,
        dropped_while_it_arrives,
        dropped_while_it_is_written,
        closed_unread_in_a_full_tier,
        copy_heard_of,
        copy_that_nobody_waits_for,
        device_closed_under_a_copy,
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


class SlowIo(SystemIo):
    """A disk that is behind the host: what is read before it is over has not come."""

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        time.sleep(BEHIND_S)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        time.sleep(BEHIND_S)
        return super().pwritev(fd, buffers, offset)


@contextmanager
def store_on_accelerator() -> Iterator[Store]:
    """A store over the accelerator and a real file, shut at the end."""
    device = open_device(torch.device("accel", torch.accelerator.current_device_index()))
    device.start()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(device, HostPool(device), lambda: DiskFile(Path(folder), io=SlowIo()), Budget({}), staging_nbytes=1 << 20)
        try:
            yield store
        finally:
            store.shut()


def run_on_accelerator(name: str) -> list[Tensor]:
    """What it computes."""
    with store_on_accelerator() as store:
        seen = PROGRAMS[name](store)
        store.flush()
        torch.accelerator.synchronize()
        return [tensor.cpu() for tensor in seen]
