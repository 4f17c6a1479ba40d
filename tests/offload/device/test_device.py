"""The seam to the device: what a copy promises on a CPU, where a thread stands in for the stream, and on one with streams."""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from offload.device import Device, beside, open_device
from offload.device.cpu import CpuDevice
from offload.device.interface import INLINE_NBYTES
from offload.errors import CapabilityError, TierError
from offload.pages import ALIGN, aligned, locked_nbytes, round_up
from offload.threads import Task
from tests.support.on_gpus import keep_busy, module, on_gpus

LARGE = INLINE_NBYTES * 4
SMALL = 4096
SIZES = pytest.mark.parametrize("nbytes", [SMALL, LARGE], ids=["inline", "threaded"])


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device(torch.device("cpu"), addresses_host=False)
    yield opened
    opened.close()


def filled(nbytes: int, value: int = 7) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def wait_for(gate: threading.Event) -> None:
    assert gate.wait(60), "nobody opened the gate"


def hold(device: Device) -> threading.Event:
    """Keep the device's one worker busy until the event is set."""
    assert isinstance(device, CpuDevice)
    gate = threading.Event()
    # The queue is what the tests are about: nothing but a job that waits makes "not yet copied" a certainty.
    device._worker.start()
    device._worker.submit(Task(lambda: wait_for(gate)))
    return gate


@SIZES
def test_a_copy_is_there_after_wait(device: Device, nbytes: int) -> None:
    out = aligned(nbytes)
    ticket = device.copy(out, filled(nbytes), "block")
    ticket.wait()
    assert ticket.done()
    assert bool((out == 7).all())


@SIZES
def test_a_copy_converts_between_dtypes(device: Device, nbytes: int) -> None:
    source = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))
    out = torch.empty(nbytes // 4, dtype=torch.bfloat16)
    device.copy(out, source).wait()
    assert torch.equal(out, source.bfloat16())


@SIZES
def test_a_copy_follows_strides_on_either_side(device: Device, nbytes: int) -> None:
    square = torch.arange(nbytes, dtype=torch.int64).view(-1, 64)
    out = torch.zeros(64, nbytes // 64, dtype=torch.int64)
    device.copy(out, square.t()).wait()
    assert torch.equal(out, square.t())
    back = torch.zeros(nbytes // 64, 128, dtype=torch.int64)[:, ::2]
    device.copy(back, square).wait()
    assert torch.equal(back, square)


def test_a_copy_resolves_lazy_conjugation(device: Device) -> None:
    source = torch.tensor([1 + 2j, 3 - 4j])
    out = torch.zeros(2, dtype=torch.complex64)
    device.copy(out, source.conj()).wait()
    assert out.tolist() == [1 - 2j, 3 + 4j]


def test_a_large_copy_does_not_hold_the_caller(device: Device) -> None:
    gate = hold(device)
    out = filled(LARGE, 0)
    ticket = device.copy(out, filled(LARGE))
    assert not ticket.done()
    assert not bool(out.any())
    gate.set()
    ticket.synchronize()
    assert ticket.done()
    assert bool((out == 7).all())


def test_copies_run_in_the_order_of_issue_whatever_their_sizes(device: Device) -> None:
    gate = hold(device)
    first, second = filled(LARGE, 0), filled(SMALL, 0)
    device.copy(first, filled(LARGE, 3))
    # Small enough to be done at once, were it not for the copy before it that it reads from.
    last = device.copy(second, first[:SMALL])
    gate.set()
    last.wait()
    assert bool((second == 3).all())


def test_a_small_copy_is_over_when_nothing_is_before_it(device: Device) -> None:
    assert device.copy(filled(SMALL, 0), filled(SMALL)).done()


@SIZES
def test_an_error_surfaces_at_wait_with_the_key_and_at_every_wait(device: Device, nbytes: int) -> None:
    # Writing to expanded memory is an error that only the copy itself finds.
    ticket = device.copy(torch.empty(1, dtype=torch.uint8).expand(nbytes), filled(nbytes), "optim/layers.7")
    for _ in range(2):
        with pytest.raises(TierError, match=r"^The copy of optim/layers\.7 did not finish: .*RuntimeError"):
            ticket.wait()
    with pytest.raises(TierError):
        ticket.synchronize()
    assert ticket.done()
    out = filled(nbytes, 0)
    device.copy(out, filled(nbytes)).wait()
    assert bool((out == 7).all()), "a failed copy must not stop the next"


def test_copies_of_unequal_shape_are_refused_at_once(device: Device) -> None:
    with pytest.raises(AssertionError, match=r"block: \(3,\) into \(4,\)"):
        device.copy(torch.empty(4), torch.empty(3), "block")


def test_an_empty_copy_is_a_copy_that_ends_and_holds_up_no_other(device: Device) -> None:
    empty = device.copy(torch.empty(0), torch.empty(0), "nothing")
    out = filled(LARGE, 0)
    device.copy(out, filled(LARGE)).wait()
    empty.wait()
    assert empty.done() and bool((out == 7).all())


def test_both_tensors_live_until_the_copy_is_over_and_no_longer(device: Device) -> None:
    gate = hold(device)
    out, source = filled(LARGE, 0), filled(LARGE)
    alive = weakref.ref(source.untyped_storage())
    ticket = device.copy(out, source)
    del source
    gc.collect()
    assert alive() is not None
    gate.set()
    ticket.wait()
    assert bool((out == 7).all())
    # The worker lets go of its job as it takes the next.
    device.copy(filled(LARGE, 0), filled(LARGE)).wait()
    assert alive() is None


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["same dtype", "converting"])
def test_a_copy_into_a_parameter_leaves_no_graph_and_counts_as_a_write(
    device: Device, nbytes: int, dtype: torch.dtype
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(nbytes // 4))
    used = (parameter * parameter).sum()
    before = parameter._version
    gate = hold(device)
    ticket = device.copy(parameter, torch.ones(nbytes // 4, dtype=dtype, requires_grad=True))
    assert parameter._version > before, "the write is seen when it is issued"
    gate.set()
    ticket.wait()
    assert parameter.is_leaf and parameter.grad_fn is None
    assert bool((parameter == 1).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["same dtype", "converting"])
def test_copies_work_into_and_from_inference_tensors(device: Device, nbytes: int, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        there = torch.zeros(nbytes // 4)
        fresh = device.empty(nbytes)
    device.copy(there, torch.ones(nbytes // 4, dtype=dtype)).wait()
    back = torch.zeros(nbytes // 4, dtype=dtype)
    with torch.inference_mode():
        device.copy(back, there).wait()
    assert bool((back == 1).all())
    assert not fresh.is_inference()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 10_000_000])
def test_memory_for_a_cpu_is_page_aligned_exact_and_alone(device: Device, nbytes: int) -> None:
    memory = device.empty(nbytes)
    assert (memory.dtype, memory.shape, memory.storage_offset()) == (torch.uint8, (nbytes,), 0)
    assert memory.data_ptr() % ALIGN == 0
    assert memory.untyped_storage().nbytes() == round_up(nbytes)
    memory.fill_(1)
    assert memory.view(torch.uint8).sum(dtype=torch.int64) == nbytes


def test_empty_of_nothing_is_an_empty_tensor(device: Device) -> None:
    assert device.empty(0).shape == (0,)


def test_memory_is_made_on_the_cpu_whatever_the_default_device(device: Device) -> None:
    with torch.device("meta"):
        memory = device.empty(5000)
    assert memory.device.type == "cpu"
    assert memory.untyped_storage().nbytes() == 8192


def test_memory_is_returned_when_its_tensor_goes() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    keep = aligned(1 << 30)
    held = mapped()
    del keep
    assert held - mapped() >= 1 << 30


def test_a_cpu_addresses_host_memory_unless_it_is_not_to() -> None:
    for asked, expected in ((None, True), (True, True), (False, False)):
        opened = open_device(torch.device("cpu"), addresses_host=asked)
        assert opened.addresses_host is expected
        assert opened.device == torch.device("cpu")
        opened.close()


def test_a_cpu_locks_nothing(device: Device) -> None:
    before = locked_nbytes()
    memory = device.empty(1 << 20)
    device.pin(memory)
    assert locked_nbytes() == before
    device.unpin(memory)
    assert not device.pins()
    assert not device.memlock_applies()
    assert device.pci_address() is None


def test_free_memory_is_part_of_the_machines(device: Device) -> None:
    free, total = device.memory()
    assert 0 < free < total
    with open("/proc/meminfo") as file:
        assert total == int(file.readline().split()[1]) << 10


def test_close_finishes_what_was_begun() -> None:
    opened = open_device(torch.device("cpu"))
    gate = hold(opened)
    out = filled(LARGE, 0)
    opened.copy(out, filled(LARGE))
    gate.set()
    opened.close()
    opened.close()
    assert bool((out == 7).all())
    with pytest.raises(AssertionError, match="closed"):
        opened.copy(filled(LARGE, 0), out)


def test_a_copy_that_gets_no_thread_is_refused_and_changes_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    out = filled(LARGE, 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for call in (device.start, lambda: device.copy(out, filled(LARGE))):
        with pytest.raises(CapabilityError, match=r"cannot start thread zhooks-copy-0 of 1.*ulimit -u"):
            call()
    assert not bool(out.any()) and out._version == 0
    device.copy(out[:SMALL], filled(SMALL)).wait()
    monkeypatch.undo()
    device.copy(out, filled(LARGE)).wait()
    assert bool((out == 7).all())


def test_what_follows_a_copy_is_begun_when_it_ends_and_by_nobody_else(device: Device) -> None:
    gate, heard = hold(device), threading.Event()
    ticket = device.copy(filled(LARGE, 0), filled(LARGE))
    ticket.when_over(heard.set)
    assert not heard.is_set()
    gate.set()
    assert heard.wait(60) and ticket.done()
    late = threading.Event()
    ticket.when_over(late.set)
    assert late.is_set()


def test_copies_from_many_threads_all_arrive(device: Device) -> None:
    sources = [filled(LARGE, value) for value in range(8)]
    results = [filled(LARGE, 255) for _ in sources]

    def issue(index: int) -> None:
        for size in (SMALL, LARGE):
            device.copy(results[index][:size], sources[index][:size]).wait()

    threads = [threading.Thread(target=issue, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(result, source) for result, source in zip(results, sources, strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("meta", "torch has no module torch.meta for it; import the package that registers it"),
        ("hpu", "torch has no module torch.hpu for it; import the package that registers it"),
        ("mps", "Expected one that is available, found none; install its driver"),
        ("xpu:0", "Expected one that is available, found none; install its driver"),
    ],
)
def test_a_device_that_does_not_compute_here_is_refused_in_one_line(name: str, said: str) -> None:
    with pytest.raises(CapabilityError, match=f"device {name}. .*{re.escape(said)}") as caught:
        open_device(torch.device(name))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test needs to be missing")
def test_cuda_without_cuda_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build without a driver says so before it is asked
        with pytest.raises(CapabilityError, match=r"device cuda. Expected one that is available, found none; install"):
            open_device(torch.device("cuda"))


# --- of a device with streams -----------------------------------------------------------------------------------------


@contextmanager
def opened(kind: str) -> Iterator[Device]:
    """The device of this process that has this type."""
    device = open_device(torch.device(kind))
    try:
        yield device
    finally:
        device.close()


@contextmanager
def pinned(device: Device, nbytes: int) -> Iterator[Tensor]:
    """Page-locked memory of the host."""
    memory = device.map_host(nbytes, locked=True)
    tensor = memory.tensor(0, nbytes)
    device.pin(tensor)
    try:
        yield tensor
    finally:
        device.unpin(tensor)
        memory.close()


@on_gpus()
def test_bytes_survive_the_way_there_and_back(device: str) -> None:
    with opened(device) as gpu, pinned(gpu, 1 << 24) as source, pinned(gpu, 1 << 24) as result:
        source.copy_(torch.randint(0, 256, (1 << 24,), dtype=torch.uint8))
        there = gpu.empty(1 << 24)
        gpu.copy(there, source, "up").wait()
        ticket = gpu.copy(result, there, "down")
        ticket.synchronize()
        assert ticket.done()
        assert torch.equal(result, source)
        assert source.is_pinned()


@on_gpus()
def test_a_copy_comes_after_what_the_callers_stream_has_queued(device: str) -> None:
    width = 4096 if device == "cuda" else 64
    with opened(device) as gpu, pinned(gpu, width * width * 4) as result:
        matrix = torch.randn(width, width, device=device)
        for _ in range(8):
            matrix = matrix @ matrix
            matrix = matrix / matrix.norm()
        gpu.copy(result.view(torch.float32).view(width, width), matrix).synchronize()
        assert torch.equal(result.view(torch.float32).view(width, width), matrix.cpu())


@on_gpus()
def test_the_callers_stream_waits_without_the_host(device: str) -> None:
    nbytes = 1 << 26 if device == "cuda" else 1 << 16
    with opened(device) as gpu, pinned(gpu, nbytes) as source:
        source.fill_(3)
        side = module(device).Stream()
        for _ in range(8):
            with module(device).stream(side):
                there = gpu.empty(nbytes)
                gpu.copy(there, source).wait()
                total = there.sum(dtype=torch.int64)
            side.synchronize()
            assert int(total) == 3 * nbytes


@on_gpus()
def test_a_dropped_ticket_frees_nothing_under_a_running_copy(device: str) -> None:
    nbytes = 1 << 26 if device == "cuda" else 1 << 16
    with opened(device) as gpu, pinned(gpu, nbytes) as source:
        source.fill_(3)
        for _ in range(16):
            gpu.copy(gpu.empty(nbytes), source)
            # The allocator must not hand the dropped destination out while the copy still writes to it.
            mine = torch.full((nbytes,), 5, dtype=torch.uint8, device=device)
            torch.accelerator.synchronize()
            assert bool((mine == 5).all())


@on_gpus()
def test_copies_convert_dtypes_both_ways(device: str) -> None:
    with opened(device) as gpu:
        source = torch.randn(1 << 20)
        there = torch.empty(1 << 20, dtype=torch.bfloat16, device=device)
        gpu.copy(there, source).wait()
        assert torch.equal(there.cpu(), source.bfloat16())
        back = torch.empty(1 << 20)
        gpu.copy(back, there).synchronize()
        assert torch.equal(back, source.bfloat16().float())


@on_gpus()
def test_it_says_where_it_is_and_what_is_free(device: str) -> None:
    with opened(device) as gpu:
        free, total = gpu.memory()
        assert 0 < free <= total
        place = gpu.pci_address()
        assert place is None or len(place) == len("0000:3b:00.0")
        assert gpu.memlock_applies() in (True, False)
        with pytest.raises(CapabilityError, match="own memory"):
            open_device(torch.device(device), addresses_host=True)


@on_gpus()
def test_a_copy_after_a_mark_does_not_wait_for_what_was_queued_since(device: str) -> None:
    with opened(device) as gpu, pinned(gpu, 1 << 20) as source:
        source.fill_(3)
        there, mark = gpu.empty(1 << 20), gpu.mark()
        keep_busy(device, cycles=1 << 31)
        busy = module(device).Event()
        busy.record()
        ticket = gpu.copy(there, source, "up", after=mark)
        ticket.synchronize()
        assert not busy.query(), "the copy waited for a kernel that it does not depend on"
        ticket.wait()
        assert bool((there == 3).all())


@on_gpus()
def test_what_is_waited_for_beside_the_stream_does_not_hold_the_stream_up(device: str) -> None:
    nbytes = 1 << 28 if device == "cuda" else 1 << 16
    with opened(device) as gpu, pinned(gpu, nbytes) as source:
        source.fill_(3)
        there, over = gpu.empty(nbytes), module(device).Event()
        ticket = gpu.copy(there, source, "up")
        with beside(torch.device(device, module(device).current_device()), "gather"):
            ticket.wait()
            keep_busy(device, cycles=1 << 31)
            total = there.sum(dtype=torch.int64)
            over.record()
        mine = torch.ones(64, device=device).sum().item()
        assert mine == 64 and not over.query(), "the stream waited for what only the work beside it uses"
        module(device).current_stream().wait_event(over)
        assert int(total) == 3 * nbytes


@on_gpus()
def test_a_copys_end_is_heard_in_a_thread_of_the_device(device: str) -> None:
    with opened(device) as gpu, pinned(gpu, 1 << 20) as result:
        heard = threading.Event()
        keep_busy(device, cycles=1 << 28)
        ticket = gpu.copy(result, torch.full((1 << 20,), 3, dtype=torch.uint8, device=device), "down")
        ticket.when_over(heard.set)
        assert heard.wait(60) and ticket.done()
        assert bool((result == 3).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: others lock no memory that is mapped")
def test_memory_that_cannot_be_locked_leaves_no_error_for_the_next_kernel() -> None:
    with opened("cuda") as cuda:
        memory = aligned(1 << 20)
        cuda.pin(memory)
        # Locked already: CUDA refuses it.
        with pytest.raises(CapabilityError, match="cannot page-lock"):
            cuda.pin(memory)
        assert torch.ones(64, device="cuda").add_(1).sum().item() == 128
        cuda.unpin(memory)
        with pytest.raises(AssertionError, match="not locked"):
            cuda.unpin(memory)
        assert torch.ones(64, device="cuda").add_(1).sum().item() == 128
