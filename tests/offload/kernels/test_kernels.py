"""The compiled updates against plain torch: same numbers, same bits at any cut and on any number of threads."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload import kernels
from offload.kernels import RTOL, Adam, Lion, Sgd

ADAMW = Adam(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=3)
SGD = Sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, nesterov=False)
LION = Lion(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
HALVES = (torch.bfloat16, torch.float16)
GRADS = (torch.float32, *HALVES)
STEPS = 100


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def off(found: Tensor, expected: Tensor, lr: float) -> float:
    """The largest difference, relative to the larger of the expected magnitude and the learning rate."""
    return ((found - expected).abs() / expected.abs().clamp_min(lr)).max().item()


def spread_grad(numel: int) -> Tensor:
    """Gradients over eight orders of magnitude."""
    return torch.randn(numel) * 10 ** (8 * torch.rand(numel) - 7)


# --- plain torch ------------------------------------------------------------------------------------------------------


def plain_adam(how: Adam, p: Tensor, g: Tensor, m: Tensor, v: Tensor, scale: float) -> None:
    g = g.float() * (-scale if how.maximize else scale)
    if how.decoupled:
        p.mul_(1 - how.lr * how.weight_decay)
    elif how.weight_decay != 0:
        g = g.add(p, alpha=how.weight_decay)
    m.lerp_(g, 1 - how.beta1)
    v.mul_(how.beta2).addcmul_(g, g, value=1 - how.beta2)
    root = (1 - how.beta2**how.step) ** 0.5
    p.addcdiv_(m, (v.sqrt() / root).add_(how.eps), value=-how.lr / (1 - how.beta1**how.step))


def plain_sgd(how: Sgd, p: Tensor, g: Tensor, m: Tensor | None, scale: float) -> None:
    g = g.float() * (-scale if how.maximize else scale)
    if how.weight_decay != 0:
        g = g.add(p, alpha=how.weight_decay)
    if m is not None:
        if how.first:
            m.copy_(g)
        else:
            m.mul_(how.momentum).add_(g, alpha=1 - how.dampening)
        g = g.add(m, alpha=how.momentum) if how.nesterov else m
    p.add_(g, alpha=-how.lr)


def plain_lion(how: Lion, p: Tensor, g: Tensor, m: Tensor, scale: float) -> None:
    g = g.float() * scale
    p.mul_(1 - how.lr * how.weight_decay)
    p.add_(m.mul(how.beta1).add(g, alpha=1 - how.beta1).sign_(), alpha=-how.lr)
    m.mul_(how.beta2).add_(g, alpha=1 - how.beta2)


class State:
    """The tensors of one kernel, and the two ways to update them."""

    def __init__(self, name: str, numel: int, grad: torch.dtype = torch.float32, copy: torch.dtype | None = None) -> None:
        self.name = name
        self.master = torch.randn(numel)
        self.grad = (torch.randn(numel) * 0.1).to(grad)
        self.moments = [torch.randn(numel) * 0.1]
        if name == "adam":
            self.moments.append(torch.rand(numel) * 0.01)
        self.copy = None if copy is None else torch.zeros(numel, dtype=copy)

    def twin(self) -> State:
        other = State.__new__(State)
        other.name, other.master, other.grad = self.name, self.master.clone(), self.grad.clone()
        other.moments = [moment.clone() for moment in self.moments]
        other.copy = None if self.copy is None else self.copy.clone()
        return other

    def written(self) -> list[Tensor]:
        return [self.master, *self.moments, *([] if self.copy is None else [self.copy])]

    def update(self, begin: int = 0, end: int | None = None, *, scale: float = 1.0, threads: int | None = None) -> None:
        part = slice(begin, end)
        kernel: Callable[..., None] = getattr(kernels, self.name)
        how = {"adam": ADAMW, "sgd": SGD, "lion": LION}[self.name]
        copy = None if self.copy is None else self.copy[part]
        moments = [moment[part] for moment in self.moments]
        kernel(how, self.master[part], self.grad[part], *moments, copy=copy, scale=scale, threads=threads)

    def plain(self, *, scale: float = 1.0) -> None:
        if self.name == "adam":
            plain_adam(ADAMW, self.master, self.grad, self.moments[0], self.moments[1], scale)
        elif self.name == "sgd":
            plain_sgd(SGD, self.master, self.grad, self.moments[0], scale)
        else:
            plain_lion(LION, self.master, self.grad, self.moments[0], scale)
        if self.copy is not None:
            self.copy.copy_(self.master)


NAMES = ("adam", "sgd", "lion")


#: By default a diagonal: numba compiles each of them for two seconds.
EVERY = [
    pytest.param(name, grad, copy, marks=[pytest.mark.slow] if (first + second + third) % 3 else [], id=f"{name}-{grad}-{copy}")
    for first, name in enumerate(NAMES)
    for second, grad in enumerate(GRADS)
    for third, copy in enumerate((None, *HALVES))
]


@pytest.mark.parametrize(("name", "grad", "copy"), EVERY)
def test_every_dtype_of_gradient_and_copy_gives_plain_torch_numbers(
    name: str, grad: torch.dtype, copy: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    ours = State(name, 1027, grad, copy)
    plain = ours.twin()
    ours.update(scale=0.37)
    plain.plain(scale=0.37)
    assert off(ours.master, plain.master, 1e-3) <= RTOL
    for found, expected in zip(ours.moments, plain.moments, strict=True):
        assert off(found, expected, 1e-3) <= RTOL
    if ours.copy is not None:
        assert same_bits(ours.copy, ours.master.to(ours.copy.dtype))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        ADAMW,
        replace(ADAMW, beta1=0.5, beta2=0.9, lr=0.1, weight_decay=0.1, maximize=True),
        replace(ADAMW, beta1=0.0, beta2=0.99, lr=1e-4, weight_decay=0.0, eps=1e-6),
    ],
    ids=["usual", "beta1 one half", "beta1 zero"],
)
def test_adam_stays_within_the_stated_tolerance_of_torch_over_a_hundred_steps(how: Adam, decoupled: bool) -> None:
    torch.manual_seed(1)
    theirs = torch.nn.Parameter(torch.randn(4099))
    master, moments = theirs.detach().clone(), (torch.zeros(4099), torch.zeros(4099))
    made = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [theirs],
        lr=how.lr,
        betas=(how.beta1, how.beta2),
        eps=how.eps,
        weight_decay=how.weight_decay,
        maximize=how.maximize,
        foreach=False,
    )
    for step in range(1, STEPS + 1):
        theirs.grad = spread_grad(4099)
        made.step()
        kernels.adam(replace(how, step=step, decoupled=decoupled), master, theirs.grad, *moments)
        assert off(master, theirs.detach(), how.lr) <= RTOL, step
    assert off(moments[1], made.state[theirs]["exp_avg_sq"], 1e-12) <= RTOL


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    ],
    ids=str,
)
def test_sgd_stays_within_the_stated_tolerance_of_torch_over_a_hundred_steps(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    theirs = torch.nn.Parameter(torch.randn(4099))
    master = theirs.detach().clone()
    # What the buffer holds before the first step must not matter.
    buffer = torch.full((4099,), torch.nan) if "momentum" in options else None
    made = torch.optim.SGD([theirs], lr=0.01, foreach=False, **options)
    for step in range(1, STEPS + 1):
        theirs.grad = torch.randn(4099)
        made.step()
        kernels.sgd(Sgd(lr=0.01, first=step == 1, **options), master, theirs.grad, buffer)
        assert off(master, theirs.detach(), 0.01) <= RTOL, step


def test_lion_stays_within_the_stated_tolerance_of_its_formula_over_a_hundred_steps() -> None:
    torch.manual_seed(3)
    ours = State("lion", 4099)
    plain = ours.twin()
    for step in range(STEPS):
        ours.grad = plain.grad = torch.randn(4099)
        ours.update()
        plain.plain()
        assert off(ours.master, plain.master, LION.lr) <= RTOL, step


def test_lion_moves_nothing_where_the_direction_is_zero_or_not_a_number() -> None:
    master, moment = torch.ones(3), torch.zeros(3)
    kernels.lion(replace(LION, weight_decay=0.0), master, torch.tensor([0.0, torch.nan, 2.0]), moment)
    assert torch.equal(master, torch.tensor([1.0, 1.0, 1 - 1e-3]))


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 700), max_size=12),
    grad=st.sampled_from(GRADS),
    copy=st.sampled_from(HALVES),
    seed=st.integers(0, 2**20),
)
def test_a_range_cut_anywhere_has_the_bits_of_one_call(
    name: str, cuts: list[int], grad: torch.dtype, copy: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    whole = State(name, 700, grad, copy)
    pieces = whole.twin()
    whole.update(scale=0.37)
    edges = [0, *sorted(cuts), 700]
    for begin, end in pairwise(edges):
        pieces.update(begin, end, scale=0.37)
    for one, other in zip(whole.written(), pieces.written(), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_each_element_alone_has_the_bits_it_has_among_others(name: str) -> None:
    torch.manual_seed(4)
    whole = State(name, 97, torch.bfloat16, torch.bfloat16)
    pieces = whole.twin()
    whole.update()
    for index in range(97):
        pieces.update(index, index + 1)
    for one, other in zip(whole.written(), pieces.written(), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(5)
    start = State(name, (1 << 20) + 13, torch.bfloat16, torch.bfloat16)
    alone = start.twin()
    alone.update(threads=1)
    for threads in (2, 3, 8):
        many = start.twin()
        many.update(threads=threads)
        for one, other in zip(alone.written(), many.written(), strict=True):
            assert same_bits(one, other), threads


@pytest.mark.parametrize(
    ("rank", "ranks", "cores"),
    [
        ("0", "2", (0, 1, 2, 3)), ("1", "2", (4, 5, 6, 7)), ("2", "3", (4, 5)), ("9", "16", (1,)), ("0", "1", ()),
        (None, None, ()), ("0", None, ()), ("x", "2", ()), ("2", "2", ()), ("-1", "2", ()),
    ],
)  # fmt: skip
def test_a_rank_among_others_updates_on_its_share_of_the_cores(
    rank: str | None, ranks: str | None, cores: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert kernels.cores_of_rank() == cores
    assert kernels.update_threads() == max(1, len(cores))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert kernels.update_threads() == 3
    assert kernels.cores_of_rank() == (), "a number that was chosen is bound to no cores"


def test_threads_take_the_caller_s_mode_of_denormals() -> None:
    numel = 1 << 20
    grad = torch.full((numel,), 1e-42)
    how = Sgd(lr=1.0)
    moved, flushed = torch.zeros(numel), torch.zeros(numel)
    kernels.sgd(how, moved, grad, threads=4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        kernels.sgd(how, flushed, grad, threads=4)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(moved), bits(-grad)) and not bits(flushed).any()


# --- casts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_16_bit_gradient_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    grad = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    master = torch.zeros(1 << 16)
    kernels.sgd(Sgd(lr=-1.0), master, grad)
    torch.testing.assert_close(master, grad.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_copy_is_rounded_as_torch_does_and_a_nan_stays_one(dtype: torch.dtype) -> None:
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    value = (upper[:, None] + lower).flatten().to(torch.int32).view(torch.float32)
    master, copy = value.clone(), torch.empty(value.numel(), dtype=dtype)
    kernels.sgd(Sgd(lr=0.0), master, torch.zeros_like(master), copy=copy)
    number = ~value.isnan()
    assert same_bits(master[number], value[number])
    assert same_bits(copy[number], value[number].to(dtype))
    assert copy[~number].isnan().all()
    assert torch.equal(copy[~number].signbit(), value[~number].signbit())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the names are of x86 instructions")
def test_the_loops_with_casts_are_vectorised() -> None:
    from offload.kernels import loops as kernel_loops

    packed = {
        torch.bfloat16: (r"vsqrtps", r"vpmovzxwd|vpunpck", r"vpmovdw|vpackusdw|vpshufb"),
        # With an x where the processor has instructions for fp16.
        torch.float16: (r"vsqrtps", r"vcvtph2psx?\s[^%]*[%(][^\n]*%[yz]mm", r"vcvtps2phx?\s[^\n]*%[yz]mm"),
    }
    for dtype, instructions in packed.items():
        loop = kernel_loops.adam_loop(torch.float32, dtype, dtype, coupled=False, light=True)
        (assembly,) = loop.inspect_asm().values()  # type: ignore[attr-defined]
        for instruction in instructions:
            assert re.search(instruction, assembly), (dtype, instruction)
