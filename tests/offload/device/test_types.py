"""Types of device that zhooks knows by torch alone: which device opens, what is asked of torch's module, and host memory.

pytest runs it. Modules of types that this machine does not have stand in for theirs; tests/accelerator has streams that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from offload.device import device_guard, memory_statistics, open_device, random_state, set_random_state, used_of
from offload.device import stream_device as under
from offload.device.cpu import SynchronousDevice
from offload.device.stream_device import StreamDevice
from offload.errors import CapabilityError
from offload.memory import HostPool
from offload.pages import ALIGN, round_up
from tests.support.streams import Paper
from zhooks.rng import check, generators, restore

MAIA = torch.device("maia", 1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """torch's module of a type without streams, whose generator is one of the CPU's."""
    generator = torch.Generator()
    made = SimpleNamespace(
        is_available=lambda: True,
        generator=generator,
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
    )
    monkeypatch.setattr(torch, "maia", made, raising=False)
    yield made


def test_a_type_without_streams_copies_synchronously(module: SimpleNamespace) -> None:
    module.mem_get_info = lambda device: (3, 8)
    module.memory_stats = lambda device: {"allocated_bytes.all.current": 2, "reserved_bytes.all.current": 3}
    device = open_device(MAIA)
    assert isinstance(device, SynchronousDevice) and device.device == MAIA
    assert device.memory() == (4, 8) and device.used() == (2, 2) and not device.pins()
    assert memory_statistics(MAIA)["reserved_bytes.all.current"] == 3
    device.close()


def test_a_device_that_does_not_say_how_much_memory_it_has_is_refused_in_one_line(module: SimpleNamespace) -> None:
    device = open_device(MAIA)
    with pytest.raises(CapabilityError, match=r"Cannot use maia:1. Expected torch to say how much memory it has") as caught:
        device.memory()
    assert "\n" not in str(caught.value) and used_of(MAIA) == (0, 0)
    module.recommended_max_memory, module.driver_allocated_memory = (lambda: 9), (lambda: 4)
    module.current_allocated_memory = lambda: 1
    assert device.memory() == (8, 9) and device.used() == (1, 1)
    device.close()


def test_synchronous_copies_are_over_when_they_have_been_started() -> None:
    device = SynchronousDevice(torch.device("cpu"))
    out, source = torch.zeros(64, dtype=torch.bfloat16), torch.randn(64)
    copy = device.copy(out, source, "up")
    assert copy.done() and torch.equal(out, source.bfloat16())
    device.close()


def test_the_random_state_of_any_device_is_saved_and_restored(module: SimpleNamespace) -> None:
    assert generators([torch.device("cpu")])["devices"] == {}
    states = generators([MAIA])
    assert list(states["devices"]) == ["maia"]
    first = torch.rand(4, generator=module.generator)
    restore(states, [MAIA])
    assert torch.equal(torch.rand(4, generator=module.generator), first)
    with pytest.raises(Exception, match="expected the random states of 0 maia devices on this rank, found 1"):
        check(states, [torch.device("cpu")])
    with pytest.raises(Exception, match="expected the random states of 1 maia device on this rank, found 0"):
        check(generators([torch.device("cpu")]), [MAIA])


def test_older_files_are_read_and_what_they_lack_is_said(module: SimpleNamespace) -> None:
    states = generators([torch.device("cpu")])
    del states["devices"]
    old = {**states, "cuda": []}
    check(old, [torch.device("cpu")])
    check(old, [MAIA])
    before = module.generator.get_state()
    with pytest.warns(UserWarning, match="no random state of maia:1, because an older zhooks saved it"):
        restore(old, [MAIA])
    assert torch.equal(module.generator.get_state(), before)


def test_a_type_whose_module_keeps_no_random_state_is_refused_by_what_is_missing(module: SimpleNamespace) -> None:
    del module.get_rng_state, module.set_rng_state
    with pytest.raises(CapabilityError, match=r"Expected torch\.maia\.get_rng_state, found none"):
        random_state(MAIA)
    # MPS has one device, and names none.
    kept: list[Tensor] = []
    module.get_rng_state, module.set_rng_state = (lambda: torch.zeros(1)), kept.append
    set_random_state(MAIA, random_state(MAIA))
    assert len(kept) == 1


def test_the_guard_of_a_device_is_its_modules_own(module: SimpleNamespace) -> None:
    given: list[torch.device] = []
    module.device = lambda device: given.append(device) or device_guard(torch.device("cpu"))
    with device_guard(MAIA), device_guard(torch.device("cpu")):
        assert given == [MAIA]


@pytest.mark.parametrize("shift", [0, 64])
def test_host_memory_of_a_device_that_registers_none_is_torchs_own_in_whole_pages(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """The allocator gives blocks that start anywhere; a tensor of one keeps it."""
    asked: list[int] = []

    def pinned(nbytes: int) -> Tensor:
        asked.append(nbytes)
        block = torch.empty(nbytes + 2 * ALIGN, dtype=torch.uint8)
        start = -block.data_ptr() % ALIGN + shift
        return block[start : start + nbytes]

    monkeypatch.setattr(under, "_pinned", pinned)
    monkeypatch.setattr(under, "_pinned_by_torch", lambda: True)
    device = StreamDevice(torch.device("cpu"), Paper())
    pool = HostPool(device, slab_nbytes=8 * ALIGN)
    first, second = pool.take(100, "first"), pool.take(2 * ALIGN + 1, "second")
    assert pool.pinned and asked[0] in (8 * ALIGN, 8 * ALIGN + ALIGN)
    for tensor in (first, second):
        assert tensor.data_ptr() % ALIGN == 0
        assert tensor.untyped_storage().nbytes() == round_up(tensor.numel())
    first.fill_(3)
    second.fill_(4)
    pool.close()
    assert int(first.min()) == int(first.max()) == 3
    device.close()


def test_a_pinned_allocator_that_refuses_is_said_in_the_hosts_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(nbytes: int) -> Tensor:
        raise RuntimeError("out of pinned memory\nat a line of C++")

    monkeypatch.setattr(under, "_pinned", refused)
    monkeypatch.setattr(under, "_pinned_by_torch", lambda: True)
    device = StreamDevice(torch.device("cpu"), Paper())
    with pytest.raises(CapabilityError, match=r"lock memory for block: .* page-lock .*\(out of pinned memory\). Expected"):
        HostPool(device, slab_nbytes=ALIGN).take(1, "block")
    device.close()
