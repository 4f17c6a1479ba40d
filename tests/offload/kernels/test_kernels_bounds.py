"""What the kernels refuse, what autograd learns, and how their threads end."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import kernels
from offload.errors import CapabilityError, LayoutError
from offload.kernels import Adam, Lion, Sgd
from offload.kernels import loops as kernel_loops
from offload.kernels import sharing as kernel_threads
from tests.support.forked import python

HOW = Adam(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(numel: int = 8) -> dict[str, Any]:
    return {name: torch.ones(numel) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}


def strided() -> Tensor:
    return torch.ones(16)[::2]


def crooked() -> Tensor:
    return torch.frombuffer(bytearray(40), dtype=torch.float32, count=8, offset=2)


REFUSED: list[tuple[str, Callable[[], Tensor], str]] = [
    ("master", lambda: torch.ones(8, dtype=torch.bfloat16), "adam master expected float32, found bfloat16"),
    ("exp_avg", lambda: torch.ones(8, dtype=torch.float64), "adam exp_avg expected float32, found float64"),
    ("grad", lambda: torch.ones(8, dtype=torch.int32), "adam grad expected float32 or bfloat16 or float16, found int32"),
    ("copy", lambda: torch.ones(8), "adam copy expected bfloat16 or float16, found float32"),
    ("grad", lambda: torch.ones(2, 4), r"adam grad expected 1-D contiguous, found shape \[2, 4\]"),
    ("grad", strided, r"adam grad expected 1-D contiguous, found shape \[8\]"),
    ("exp_avg_sq", lambda: torch.ones(7), "adam exp_avg_sq expected 8 elements, found 7"),
    ("grad", lambda: torch.ones(8, device="meta"), "adam grad expected CPU memory, found meta"),
    ("grad", lambda: torch.ones(8).to_sparse(), "adam grad expected 1-D contiguous"),
    ("grad", crooked, "adam grad expected elements on multiples of their size"),
]


@pytest.mark.parametrize(("name", "wrong", "says"), REFUSED)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_written(name: str, wrong: Callable[[], Tensor], says: str) -> None:
    given = tensors()
    with pytest.raises(LayoutError, match=says):
        kernels.adam(HOW, **{**given, name: wrong()})
    assert all((tensor == 1).all() for tensor in given.values())


def test_tensors_that_share_memory_are_refused() -> None:
    given, shared = tensors(), torch.ones(12)
    with pytest.raises(LayoutError, match="adam exp_avg needs memory of its own, found it overlapping master"):
        kernels.adam(HOW, **{**given, "master": shared[:8], "exp_avg": shared[4:]})
    half = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="memory of its own"):
        kernels.adam(HOW, **{**given, "grad": half}, copy=half)


def test_tensors_that_lie_side_by_side_are_welcome() -> None:
    block = torch.ones(32)
    kernels.adam(HOW, block[:8], block[8:16], block[16:24], block[24:])
    assert (block[:8] < 1).all() and (block[8:16] == 1).all()


def test_a_momentum_buffer_is_asked_for_exactly_where_there_is_momentum() -> None:
    one, two = torch.ones(4), torch.ones(4)
    with pytest.raises(LayoutError, match=r"expected a buffer for momentum 0\.9, found none"):
        kernels.sgd(Sgd(lr=0.1, momentum=0.9), one, two)
    with pytest.raises(LayoutError, match=r"expected no buffer for momentum 0\.0, found one"):
        kernels.sgd(Sgd(lr=0.1), one, two, torch.ones(4))


def test_no_elements_are_no_work_and_are_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(kernels.updates, "share", lambda loop, numel, **_: ran.append(numel))
    kernels.adam(HOW, **tensors(0))
    assert ran == []
    with pytest.raises(LayoutError, match="expected 0 elements, found 7"):
        kernels.adam(HOW, **{**tensors(0), "grad": torch.ones(7)})
    kernels.adam(HOW, **tensors(1))
    assert ran == [1]


def test_fake_tensors_are_checked_and_have_nothing_to_update() -> None:
    with FakeTensorMode():
        given = tensors()
        kernels.adam(HOW, **given)
        with pytest.raises(LayoutError, match="expected 8 elements, found 7"):
            kernels.adam(HOW, **{**given, "grad": torch.ones(7)})


def test_real_tensors_are_updated_under_a_fake_tensor_mode_too() -> None:
    given = tensors()
    with FakeTensorMode():
        kernels.adam(HOW, **given)
    assert (given["master"] < 1).all()


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_the_version_of_everything_written_moves_and_the_gradient_s_does_not() -> None:
    given, copy = tensors(), torch.ones(8, dtype=torch.bfloat16)
    before = {name: tensor._version for name, tensor in given.items()}
    kernels.adam(HOW, **given, copy=copy)
    moved = {name for name, tensor in given.items() if tensor._version > before[name]}
    assert moved == {"master", "exp_avg", "exp_avg_sq"} and copy._version == 1


def test_a_backward_through_a_parameter_updated_meanwhile_raises() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    loss = (weight * weight).sum()
    kernels.sgd(Sgd(lr=0.1), weight, torch.ones(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_made_in_inference_mode_can_be_updated() -> None:
    with torch.inference_mode():
        given = tensors()
        kernels.lion(Lion(1e-3, 0.9, 0.99, 0.0), given["master"], given["grad"], given["exp_avg"])
    assert (given["master"] < 1).all()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_two_callers_at_once_get_the_bits_of_one() -> None:
    torch.manual_seed(1)
    numel = 1 << 20
    grad = torch.randn(numel)
    expected: dict[str, Any] = {name: torch.zeros(numel) if "exp" in name else torch.ones(numel) for name in tensors(1)}
    expected["grad"] = grad
    states = [{name: tensor.clone() for name, tensor in expected.items()} for _ in range(3)]
    kernels.adam(HOW, **expected)

    def update(state: dict[str, Any]) -> None:
        kernels.adam(HOW, **state, threads=2)

    callers = [threading.Thread(target=update, args=(state,)) for state in states]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(state[name], expected[name]) for state in states for name in expected)


class Claims:
    """A loop in Python that notes what it was given; the main thread is interrupted at its first call."""

    def __init__(self, numel: int, interrupt: bool) -> None:
        self.numel, self.interrupt = numel, interrupt
        self.seen: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, counter: int, chunk: int) -> None:
        if self.interrupt and threading.current_thread() is threading.main_thread():
            self.interrupt = False
            raise KeyboardInterrupt
        unclaimed = ctypes.c_int64.from_address(counter)
        while True:
            with self._lock:
                begin = unclaimed.value
                if begin >= self.numel:
                    return
                unclaimed.value += chunk
                self.seen.append(begin)


def test_an_interrupt_is_raised_only_when_every_chunk_was_done_once() -> None:
    numel = kernel_threads.LEAST_NUMEL * 5 + 3
    claims = Claims(numel, interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        kernel_threads.share(claims, numel, threads=3, multiple=1024)
    chunk = sorted(claims.seen)[1]
    assert chunk % 1024 == 0 and sorted(claims.seen) == list(range(0, numel, chunk))


def test_a_small_range_is_done_in_one_call_by_its_caller() -> None:
    claims = Claims(1000, interrupt=False)
    kernel_threads.share(claims, 1000, threads=8, multiple=1024)
    assert claims.seen == [0]


def test_where_no_thread_can_be_started_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kernel_threads._pool.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    numel = kernel_threads.LEAST_NUMEL * 4
    claims = Claims(numel, interrupt=False)
    kernel_threads.share(claims, numel, threads=4, multiple=1024)
    assert len(claims.seen) == -(-numel // sorted(claims.seen)[1])
    monkeypatch.undo()
    kernel_threads._pool.cache_clear()


# torch's own OpenMP threads do not survive a fork, so torch gets none here.
FORKS = """
import faulthandler, os, torch
from offload import kernels
torch.set_num_threads(1)
def step():
    master = torch.zeros(1 << 20)
    kernels.sgd(kernels.Sgd(lr=1.0), master, torch.ones(1 << 20), threads=4)
    return bool((master == -1).all())
assert step()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(60, exit=True)
    os._exit(0 if step() else 1)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    done = python("-c", FORKS)
    assert done.returncode == 0, done.stderr


# --- the platform -----------------------------------------------------------------------------------------------------


#: What a process that has torch, and nothing of ours or of numba, imports next.
ANEW = """
import sys
for name in [*sys.modules]:
    if name.partition(".")[0] in ("offload", "numba", "llvmlite"):
        del sys.modules[name]
"""


def test_importing_the_package_brings_in_no_numba() -> None:
    check = "import offload.kernels; sys.exit(', '.join({'numba', 'llvmlite'} & set(sys.modules)) or 0)"
    done = python("-c", ANEW + check)
    assert done.returncode == 0, done.stderr


def test_the_kernels_are_available_where_the_tests_run() -> None:
    assert kernels.available() is None


def test_a_platform_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert kernel_loops.platform_lacks() == "the loops are not known to vectorise on riscv64"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True, "fma": False})
    assert kernel_loops.platform_lacks() == "the processor has no fma, f16c"


def test_a_missing_numba_is_a_reason_and_a_kernel_called_all_the_same_raises_it() -> None:
    check = (
        "sys.modules['numba'] = None\n"
        "import torch\nfrom offload import kernels\nfrom offload.errors import CapabilityError\n"
        "reason = kernels.available()\n"
        "assert reason and reason.startswith('numba kernels cannot run here: ModuleNotFoundError'), reason\n"
        "try:\n    kernels.sgd(kernels.Sgd(lr=1.0), torch.ones(3), torch.ones(3))\n"
        "except CapabilityError as error:\n    assert str(error).startswith(reason), error\n"
        "else:\n    raise SystemExit('nothing was raised')\n"
    )
    done = python("-c", ANEW + check)
    assert done.returncode == 0, done.stderr


def test_where_the_kernels_cannot_run_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.updates, "available", lambda: "numba kernels cannot run here: because")
    with pytest.raises(CapabilityError, match=r'because\. Set \[optimizer\] kernel = "torch"\.'):
        kernels.adam(HOW, **tensors())
