"""The optimizer updates on host memory: gradient, fp32 state, fp32 master and 16-bit copy in one pass over each.

Nothing as large as the tensors is allocated, and numba is imported when a kernel is first used.

Note: [Agreement with torch]
    Each kernel does torch's single-tensor operations in torch's order, with its fused products.  SGD and Lion then
    have the same bits as torch's vectorised operators (AVX2, AVX-512), and so have Adam's moments where nothing but the
    gradient enters them; Adam's quotient differs in the last place, because the square root here rounds correctly and
    torch's (MKL) does not always.  Over 100 steps in fp32 a parameter stays within `RTOL` of torch's, relative to the
    larger of its own magnitude and the learning rate (measured: 4e-6)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from offload.errors import CapabilityError, LayoutError
from offload.kernels.rounding import Noise
from offload.kernels.sharing import share, update_threads

if TYPE_CHECKING:
    from offload.kernels.loops import Loop

__all__ = ["RTOL", "Adam", "Lion", "Sgd", "adam", "available", "lion", "sgd"]

#: The tolerance of Note [Agreement with torch].
RTOL = 1e-5

_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_COPIES = (torch.bfloat16, torch.float16)
# A multiple of elements that keeps any dtype's chunks on cache lines of their own.
_LINE = 1024


@dataclass(frozen=True, slots=True)
class Adam:
    """One step of torch.optim.Adam, or of AdamW where ``decoupled``; ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class Sgd:
    """One step of torch.optim.SGD; ``first``: the momentum buffer holds nothing yet, and takes the gradient."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    first: bool = False


@dataclass(frozen=True, slots=True)
class Lion:
    """One step of Lion, decay decoupled (arXiv:2302.06675, algorithm 2)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


@cache
def available() -> str | None:
    """None where the kernels work on this machine, else the reason in words, e.g. for the event that says so.

    The first call imports numba, and compiles and runs a kernel: the only proof there is.
    """
    try:
        lacks = _loops().platform_lacks()
        if lacks is None:
            # Arrays of the standard library: under a fake tensor mode or another default device torch makes no memory.
            master, grad = array("f", [0.0] * 3), array("f", [1.0] * 3)
            places = (master.buffer_info()[0], grad.buffer_info()[0], 0, 0, 0, 0, 0)
            form = {"coupled": False, "buffered": False, "first": False, "nesterov": False}
            plain = _loops().sgd_loop(torch.float32, torch.float32, None, **form)
            _run(plain, 3, places, (1.0, 0.0, 0.0, 0.0, -1.0), 1, multiple=_LINE)
            lacks = None if master.tolist() == [-1.0] * 3 else f"a trial update gave {master.tolist()}"
    # Whatever numba, llvmlite or the dynamic linker raises is the reason asked for.
    except Exception as error:
        lacks = f"{type(error).__name__}: {error}".partition("\n")[0]
    return None if lacks is None else f"numba kernels cannot run here: {lacks}"


def adam(
    how: Adam,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    copy: Tensor | None = None,
    scale: float = 1.0,
    noise: Noise | None = None,
    threads: int | None = None,
) -> None:
    """Update ``master`` and both moments in place, and round the new master into ``copy``.

    Args:
        how: the step's numbers.
        master: fp32 parameters, or bf16 ones with ``noise``; like all of these 1-D [numel], contiguous, on the CPU,
            overlapping none of the others.
        grad: fp32, bf16 or fp16; only read.
        exp_avg: fp32.
        exp_avg_sq: fp32.
        copy: bf16 or fp16; only written.
        scale: the gradient is multiplied by it first, in fp32: unscaling and clipping in one factor.
        noise: where ``master`` is bf16, and only there: the result is rounded stochastically (`offload.rounding`).
        threads: at most so many; default `update_threads()`. The bits do not depend on it.
    Raises:
        LayoutError: a tensor is not as said above; nothing has been written.
        CapabilityError: `available` says why.
    """
    assert how.step >= 1, "steps count from 1"
    tensors = {"master": master, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "copy": copy}
    _check("adam", tensors, noise)
    coupled = how.weight_decay != 0 and not how.decoupled
    # torch.lerp compares the weight as fp32.
    light = abs(ctypes.c_float(1 - how.beta1).value) < 0.5
    scalars = (
        -scale if how.maximize else scale,
        1 - how.lr * how.weight_decay if how.decoupled else 1.0,
        how.weight_decay,
        1 - how.beta1,
        how.beta2,
        1 - how.beta2,
        (1 - how.beta2**how.step) ** 0.5,
        how.eps,
        -(how.lr / (1 - how.beta1**how.step)),
    )
    dtype = None if copy is None else copy.dtype
    form = {"coupled": coupled, "light": light}
    _update(lambda loops: loops.adam_loop(master.dtype, grad.dtype, dtype, **form), tensors, scalars, threads, noise)


def sgd(
    how: Sgd,
    master: Tensor,
    grad: Tensor,
    momentum: Tensor | None = None,
    *,
    copy: Tensor | None = None,
    scale: float = 1.0,
    noise: Noise | None = None,
    threads: int | None = None,
) -> None:
    """Update ``master`` and the momentum buffer in place, and round the new master into ``copy``.

    ``momentum`` is fp32 where ``how.momentum`` is not 0, else None; with ``how.first`` it is only written.  Everything
    else is as in `adam`.
    """
    tensors = {"master": master, "grad": grad, "momentum": momentum, "copy": copy}
    _check("sgd", tensors, noise)
    buffered = how.momentum != 0
    if buffered != (momentum is not None):
        found = "none" if momentum is None else "one"
        raise LayoutError(
            f"sgd momentum expected {'a buffer' if buffered else 'no buffer'} for momentum {how.momentum}, "
            f"found {found}: pass a buffer exactly where the momentum is not 0."
        )
    scalars = (
        -scale if how.maximize else scale,
        how.weight_decay,
        how.momentum,
        1 - how.dampening,
        -how.lr,
    )
    dtype = None if copy is None else copy.dtype
    form = {"coupled": how.weight_decay != 0, "buffered": buffered}
    form |= {"first": buffered and how.first, "nesterov": buffered and how.nesterov}
    _update(lambda loops: loops.sgd_loop(master.dtype, grad.dtype, dtype, **form), tensors, scalars, threads, noise)


def lion(
    how: Lion,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    copy: Tensor | None = None,
    scale: float = 1.0,
    noise: Noise | None = None,
    threads: int | None = None,
) -> None:
    """Update ``master`` and the moment in place, and round the new master into ``copy``; arguments as in `adam`."""
    tensors = {"master": master, "grad": grad, "exp_avg": exp_avg, "copy": copy}
    _check("lion", tensors, noise)
    scalars = (
        scale,
        1 - how.lr * how.weight_decay,
        how.beta1,
        1 - how.beta1,
        how.beta2,
        1 - how.beta2,
        -how.lr,
    )
    dtype = None if copy is None else copy.dtype
    _update(lambda loops: loops.lion_loop(master.dtype, grad.dtype, dtype), tensors, scalars, threads, noise)


# --- checks and calls -------------------------------------------------------------------------------------------------


@cache
def _loops() -> ModuleType:
    from offload.kernels import loops as kernel_loops

    return kernel_loops


def _check(kernel: str, tensors: Mapping[str, Tensor | None], noise: Noise | None = None) -> None:
    """Raise LayoutError unless all tensors are as `adam` says."""
    numel = next(tensor.numel() for tensor in tensors.values() if tensor is not None)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        masters = (torch.float32 if noise is None else torch.bfloat16,)
        allowed = {"master": masters, "grad": _GRADS, "copy": _COPIES}.get(name, (torch.float32,))
        wrong = _wrong(tensor, numel, allowed)
        if wrong is not None:
            raise LayoutError(f"{kernel} {name} {wrong}.")
    _check_apart(kernel, tensors)


def _wrong(tensor: Tensor, numel: int, allowed: tuple[torch.dtype, ...]) -> str | None:
    """What is wrong with one tensor, and what to do about it."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        return f"expected {names}, found {str(tensor.dtype).removeprefix('torch.')}: cast it, or use torch's own optimizer"
    if tensor.device.type != "cpu":
        return f"expected CPU memory, found {tensor.device}: fetch it to the host first"
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        return f"expected 1-D contiguous, found shape {list(tensor.shape)}: pass a flat view"
    if tensor.numel() != numel:
        return f"expected {numel} elements, found {tensor.numel()}: pass the same range of every tensor"
    if isinstance(tensor, FakeTensor) or numel == 0:
        return None
    if tensor.data_ptr() == 0:
        return "expected memory, found a tensor without any: pass its local data"
    if tensor.data_ptr() % tensor.element_size():
        return f"expected elements on multiples of their size, found address {tensor.data_ptr():#x}: copy it"
    return None


def _check_apart(kernel: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise LayoutError where two tensors share memory: the loops read and write in any order."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in tensors.items()
        if tensor is not None and not isinstance(tensor, FakeTensor)
    )
    for (_, end, one), (begin, _, other) in pairwise(ranges):
        if begin < end:
            raise LayoutError(f"{kernel} {other} needs memory of its own, found it overlapping {one}: pass a copy.")


def _update(
    choose: Callable[[ModuleType], Loop],
    tensors: Mapping[str, Tensor | None],
    scalars: tuple[float, ...],
    threads: int | None,
    noise: Noise | None,
) -> None:
    """Run the loop that ``choose`` picks over all elements, and let autograd know what was written."""
    given = [tensor for tensor in tensors.values() if tensor is not None]
    numel = given[0].numel()
    # A fake tensor has no elements to update; that it was written is all that can be known of it.
    if numel > 0 and not any(isinstance(tensor, FakeTensor) for tensor in given):
        lacks = available()
        if lacks is not None:
            raise CapabilityError(f'{lacks}. Set [optimizer] kernel = "torch".')
        words = (0, 0, 0) if noise is None else (noise.one, noise.two, noise.start)
        places = (*(0 if tensor is None else tensor.data_ptr() for tensor in tensors.values()), *words)
        _run(choose(_loops()), numel, places, scalars, threads, multiple=_LINE)
    torch.autograd.graph.increment_version(
        [tensor for name, tensor in tensors.items() if tensor is not None and name != "grad"]
    )


def _run(
    loop: Loop, numel: int, places: tuple[int, ...], scalars: tuple[float, ...], threads: int | None, *, multiple: int
) -> None:
    share(
        lambda counter, chunk: loop(counter, chunk, numel, places, scalars),
        numel,
        threads=threads or update_threads(),
        multiple=multiple,
    )
