"""Owns the measurements of operations that are neither a plain product nor a plain pass over memory, forward and backward.

`bench/samples.py` calls `operations`: small programs run under a mode that times each of torch's operations, so that what is
measured is what a training step calls, backward kernels included. It knows nothing of models, and stores nothing.

Note: [Names]
    An operation is called what torch calls it, without the underscore of one in place; its bytes are those of the tensors it
    takes and makes, its FLOPs torch's own formulas: the simulator counts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload.counting import flops, moved, name_of
from offload.hardware import Sample
from zprof.clock import now_ns

__all__ = ["Operations", "operations"]

REPEATS = 5
#: Plain products and sums are measured on their own, by shape and by size.
_MEASURED_ALONE = frozenset({"mm", "addmm", "bmm", "baddbmm", "add", "copy", "empty", "empty_strided", "empty_like"})
#: What never has so many bytes has no curve.
_LARGE = 1 << 20
_NUMELS = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
_WIDTH = 256
_CACHED = 1 << 26
_ROWS_OF_TABLE = 4096

Program = Callable[[], object]
Key = tuple[str, int, int]


class _Timing(TorchDispatchMode):
    """Seconds of every operation by name, bytes and FLOPs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: dict[Key, list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        begin = now_ns()
        made = func(*args, **(kwargs or {}))
        seconds = (now_ns() - begin) / 1e9
        name = name_of(func)
        if not func.is_view and name not in _MEASURED_ALONE:
            nbytes = moved(func, _tensors([args, kwargs]), _tensors(made))
            key = name, nbytes, flops(func, args, kwargs or {}, made)
            self.seconds.setdefault(key, []).append(seconds)
        return made


class Operations(TorchDispatchMode):
    """Counts those that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(most: int) -> list[Sample]:
    """What each operation takes at several sizes, up to about ``most`` bytes."""
    found: dict[Key, list[float]] = {}
    with torch.random.fork_rng(devices=[]):
        for program in _programs(most):
            program()
            timing = _Timing()
            with timing:
                for _ in range(REPEATS):
                    program()
            # Of one that a program has warm and cold, between the two.
            for key, seconds in timing.seconds.items():
                found.setdefault(key, []).extend(seconds)
    beside = _beside()
    large = {name for name, nbytes, _ in found if nbytes >= _LARGE}
    return [
        Sample("operation", median(seconds) - beside, nbytes, float(done), name=name)
        for (name, nbytes, done), seconds in sorted(found.items())
        if name in large and median(seconds) > 2 * beside
    ]


def _beside() -> float:
    """Seconds that a timed operation takes for being timed."""
    timing, one = _Timing(), torch.ones(1)
    with timing:
        for _ in range(100):
            torch.neg(one)
    return min(min(seconds) for seconds in timing.seconds.values())


def _programs(most: int) -> Iterator[Program]:
    for numel in _NUMELS:
        if 12 * numel <= most:
            yield _elementwise(numel // _WIDTH)
            yield _rows(numel // _WIDTH)
            yield _updates(numel)
            yield _images(numel)
    for channels, side in ((16, 32), (64, 16), (128, 16), (256, 8)):
        yield _convolutions(channels, side)
    for length in (32, 128, 512):
        yield _attention(length)
    for width in (64, 256, 512):
        yield _recurrent(width)


def _leaf(*shape: int) -> Tensor:
    return torch.rand(shape).requires_grad_()


def _elementwise(rows: int) -> Program:
    x, y = _leaf(rows, _WIDTH), torch.rand(rows, _WIDTH) + 0.5

    def run() -> None:
        made = [F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.relu(x), x.tanh(), x.sigmoid(), x.exp(), x * y, x / y]
        made += [(x + 1).pow(2), (x + 1).rsqrt(), (x + 1).sqrt(), (x + 1).log(), F.dropout(x, 0.1), x.cos(), x.sin(), -x]
        for each in made:
            each.backward(y)
        x.grad = None
        torch.where(y > 1, y, 0.0)
        torch.cat([y, y], -1)
        y.view(rows // 8, 8, -1, 64).transpose(1, 2).contiguous()

    return run


def _rows(rows: int) -> Program:
    """What goes over the last dimension, and tables."""
    x, grad = _leaf(rows, _WIDTH), torch.rand(rows, _WIDTH)
    norm, table = nn.LayerNorm(_WIDTH), nn.Embedding(_ROWS_OF_TABLE, _WIDTH)
    places = torch.randint(_ROWS_OF_TABLE, (rows,))
    targets = torch.randint(_WIDTH, (rows,))

    def run() -> None:
        for each in (x.softmax(-1), torch._safe_softmax(x, -1), norm(x), table(places)):
            each.backward(grad)
        F.cross_entropy(x, targets).backward()
        for reduced in (x.sum(-1), x.mean(-1), x.sum(0), x.mean(0)):
            reduced.backward(torch.ones_like(reduced))
        x.grad = None
        grad.index_select(0, places % rows)
        torch.zeros_like(grad).index_copy(0, torch.arange(rows), grad)
        grad.cumsum(0)
        grad.amax(-1)

    return run


def _updates(numel: int) -> Program:
    # As many as caches do not hold: a step comes to each once.
    weights = [nn.Parameter(torch.rand(numel)) for _ in range(max(1, min(64, _CACHED // (16 * numel))))]
    for weight in weights:
        weight.grad = torch.rand(numel)
    adam, sgd = torch.optim.AdamW(weights, foreach=False), torch.optim.SGD(weights, 0.1, momentum=0.9, foreach=False)

    def run() -> None:
        adam.step()
        sgd.step()

    return run


def _images(numel: int) -> Program:
    channels, side = 32, 16
    x = _leaf(max(1, numel // (channels * side * side)), channels, side, side)
    norm = nn.BatchNorm2d(channels)

    def run() -> None:
        for each in (norm(x), F.group_norm(x, 8), F.max_pool2d(x, 2), F.avg_pool2d(x, 2), x.mean((2, 3))):
            each.backward(torch.ones_like(each))
        x.grad = None

    return run


def _convolutions(channels: int, side: int) -> Program:
    x = _leaf(8, channels, side, side)
    kernels = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False)]
    kernels += [nn.Conv2d(channels, channels, 1, bias=False)]

    def run() -> None:
        for kernel in kernels:
            made = kernel(x)
            made.backward(torch.ones_like(made))
        x.grad = None

    return run


def _attention(length: int) -> Program:
    query, key, value = (_leaf(4, 4, length, 64) for _ in range(3))

    def run() -> None:
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        made.backward(torch.ones_like(made))
        F.scaled_dot_product_attention(query, key, value).backward(torch.ones_like(made))

    return run


def _recurrent(width: int) -> Program:
    layer, x = nn.LSTM(width, width, batch_first=True), _leaf(8, 32, width)

    def run() -> None:
        made = layer(x)[0]
        made.backward(torch.ones_like(made))

    return run


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [tensor for each in inside for tensor in _tensors(each)]
