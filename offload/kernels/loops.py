"""The compiled loops: one pass over memory for each optimizer update.

`updates.py` imports it when a kernel is first used, because numba costs memory and time that a run without it
should not pay; each factory below compiles one variant at its first call.  A loop checks nothing and takes addresses.

Note: [Same bits at any split]
    Every operation on an element is an IEEE operation that rounds once, and none carries a fast-math flag, so LLVM may
    neither fuse nor reorder: the vector body and the scalar tail of a loop give an element the same bits, and a range
    may be split anywhere.  Where torch's vectorised operators fuse a product and a sum, an explicit `_fma` stands here.
    Only which NaN a NaN becomes is left open.

Note: [Vectorised casts]
    Loads and stores are intrinsics that say to which array they belong: with five arrays LLVM would need more overlap
    tests than it is ready to emit, and would leave the loop scalar.  bf16 is shifted as an integer (the hardware's own
    bf16 conversion flushes denormals); fp16 is converted by the hardware in the same pass.

Nothing is cached on disk: a variant compiles in about a fifth of a second, less than numba takes to start before
it could read one, and machine code in a shared folder must be matched to processor, numba and source.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import config, float32, int64, njit, types
from numba.extending import intrinsic

from offload.kernels.rounding import GOLDEN, MIX_ONE, MIX_TWO

__all__ = ["adam_loop", "lion_loop", "platform_lacks", "sgd_loop"]

#: ``loop(counter, chunk, numel, addresses, scalars)``: what `sharing.share` has its threads call.
Loop = Callable[[int, int, int, tuple[int, ...], tuple[float, ...]], None]

_HALF, _FLOAT = ir.HalfType(), ir.FloatType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_STORED = {torch.float32: _FLOAT, torch.float16: _HALF, torch.bfloat16: _I16}
_ARRAYS = ("master", "grad", "first", "second", "copy")
# What LLVM must find in the processor for these loops to be instructions and not calls.
_NEEDED = {"x86_64": ("avx2", "fma", "f16c"), "AMD64": ("avx2", "fma", "f16c"), "aarch64": (), "arm64": ()}


def platform_lacks() -> str | None:
    """Why the loops cannot be compiled for this machine, or None."""
    machine = platform.machine()
    if machine not in _NEEDED:
        return f"the loops are not known to vectorise on {machine or 'this processor'}"
    if getattr(config, "DISABLE_JIT", 0):
        return "numba's compiler is switched off by NUMBA_DISABLE_JIT"
    features = binding.get_host_cpu_features()
    missing = [name for name in _NEEDED[machine] if not features.get(name, False)]
    return f"the processor has no {', '.join(missing)}" if missing else None


# --- elements ---------------------------------------------------------------------------------------------------------


def _belongs(builder: Any, access: Any, array: str) -> None:
    """Let LLVM know that a load or store of ``array`` touches none of the other arrays: see Note [Vectorised casts]."""
    module = builder.module
    domain = module.add_metadata(["zhooks"])
    scopes = {name: module.add_metadata([name, domain]) for name in _ARRAYS}
    access.set_metadata("alias.scope", module.add_metadata([scopes.pop(array)]))
    access.set_metadata("noalias", module.add_metadata(list(scopes.values())))


def _element(builder: Any, address: Any, index: Any, stored: Any) -> Any:
    return builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])


def _reader(array: str, dtype: torch.dtype) -> Any:
    """``load(address, index) -> float32``: one element, widened."""
    stored = _STORED[dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index = arguments
        value = builder.load(_element(builder, address, index, stored), align=dtype.itemsize)
        _belongs(builder, value, array)
        if dtype is torch.bfloat16:
            return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _FLOAT)
        return builder.fpext(value, _FLOAT) if dtype is torch.float16 else value

    def load(typing: Any, address: Any, index: Any) -> Any:
        return float32(int64, int64), generate

    return intrinsic(load)


def _bf16_bits(builder: Any, value: Any) -> Any:
    """Round to the nearest, ties to even; a NaN keeps its sign and its upper bits, and is quiet."""
    bits = builder.bitcast(value, _I32)
    upper = builder.lshr(bits, _I32(16))
    tie = builder.add(_I32(0x7FFF), builder.and_(upper, _I32(1)))
    rounded = builder.lshr(builder.add(bits, tie), _I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, builder.or_(upper, _I32(0x40)), rounded), _I16)


def _writer(array: str, dtype: torch.dtype | None) -> Any:
    """``store(address, index, value)``: one element, rounded to ``dtype``; nothing at all where that is None."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index, value = arguments
        if dtype is not None:
            if dtype is torch.bfloat16:
                value = _bf16_bits(builder, value)
            elif dtype is torch.float16:
                value = builder.fptrunc(value, _HALF)
            place = _element(builder, address, index, _STORED[dtype])
            _belongs(builder, builder.store(value, place, align=dtype.itemsize), array)
        return context.get_dummy_value()

    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        return types.void(int64, int64, float32), generate

    return intrinsic(store)


def _noise(builder: Any, place: Any, one: Any, two: Any) -> Any:
    """Sixteen bits for the element at ``place`` of its parameter: see Note [Noise] in `offload.rounding`."""
    at, first, second = (builder.trunc(word, _I32) for word in (place, one, two))
    x = builder.add(builder.mul(at, _I32(GOLDEN)), first)
    x = builder.mul(builder.xor(x, builder.lshr(x, _I32(16))), _I32(MIX_ONE))
    x = builder.xor(x, second)
    x = builder.mul(builder.xor(x, builder.lshr(x, _I32(15))), _I32(MIX_TWO))
    return builder.and_(builder.xor(x, builder.lshr(x, _I32(16))), _I32(0xFFFF))


def _master_writer(dtype: torch.dtype) -> Any:
    """``store(address, index, value, one, two, start)``: a master; bf16 is rounded stochastically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index, value, one, two, start = arguments
        if dtype is torch.bfloat16:
            bits, noise = builder.bitcast(value, _I32), _noise(builder, builder.add(start, index), one, two)
            finite = builder.icmp_unsigned("!=", builder.and_(bits, _I32(0x7F800000)), _I32(0x7F800000))
            rounded = builder.trunc(builder.lshr(builder.add(bits, noise), _I32(16)), _I16)
            value = builder.select(finite, rounded, _bf16_bits(builder, value))
        place = _element(builder, address, index, _STORED[dtype])
        _belongs(builder, builder.store(value, place, align=dtype.itemsize), "master")
        return context.get_dummy_value()

    def store(typing: Any, address: Any, index: Any, value: Any, one: Any, two: Any, start: Any) -> Any:
        return types.void(int64, int64, float32, int64, int64, int64), generate

    return intrinsic(store)


def _operation(operands: int, emit: Callable[[Any, Any], Any]) -> Any:
    """A float32 operation that is exactly one LLVM instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, arguments)

    def unary(typing: Any, a: Any) -> Any:
        return float32(float32), generate

    def binary(typing: Any, a: Any, b: Any) -> Any:
        return float32(float32, float32), generate

    def ternary(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return float32(float32, float32, float32), generate

    return intrinsic((unary, binary, ternary)[operands - 1])


def _emit_sqrt(builder: Any, arguments: Any) -> Any:
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [_FLOAT]), arguments)


def _emit_sign(builder: Any, arguments: Any) -> Any:
    """1, -1, or 0 for zeros and NaN, as torch.sign has it."""
    (value,) = arguments
    negative = builder.select(builder.fcmp_ordered("<", value, _FLOAT(0)), _FLOAT(-1), _FLOAT(0))
    return builder.select(builder.fcmp_ordered(">", value, _FLOAT(0)), _FLOAT(1), negative)


_fma = _operation(3, lambda builder, arguments: builder.fma(*arguments))
_div = _operation(2, lambda builder, arguments: builder.fdiv(*arguments))
_sqrt = _operation(1, _emit_sqrt)
_sign = _operation(1, _emit_sign)


# --- loops ------------------------------------------------------------------------------------------------------------


def _claim() -> Any:
    """``claim(counter, chunk) -> int64``: the first element of a chunk that no other thread gets."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter, chunk = arguments
        return builder.atomic_rmw("add", builder.inttoptr(counter, chunk.type.as_pointer()), chunk, "monotonic")

    def claim(typing: Any, counter: Any, chunk: Any) -> Any:
        return int64(int64, int64), generate

    return intrinsic(claim)


_claimed = _claim()


def _compiled(loop: Callable[..., None], words: int, scalars: int) -> Loop:
    """Compile ``loop(begin, end, words, scalars)`` into what threads call to do chunks of it until none is left.

    The words are addresses and, last, what noise comes from: two keys and the place of the first element.
    """
    given = f"UniTuple(int64, {words}), UniTuple(float32, {scalars})"
    inner = njit([f"void(int64, int64, {given})"], error_model="numpy")(loop)

    def shared(counter: int, chunk: int, numel: int, places: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        while True:
            begin = _claimed(counter, chunk)
            if begin >= numel:
                break
            inner(begin, min(begin + chunk, numel), places, numbers)

    compiled: Loop = njit([f"void(int64, int64, int64, {given})"], nogil=True)(shared)
    return compiled


@cache
def adam_loop(
    master: torch.dtype, grad: torch.dtype, copy: torch.dtype | None, *, coupled: bool, light: bool
) -> Loop:
    """Adam and AdamW.  ``coupled``: the decay goes into the gradient; ``light``: 1 - beta1 is below one half.

    ``light`` chooses between torch.lerp's two formulas.  Scalars: scale, 1 - lr decay (or 1), decay, 1 - beta1, beta2,
    1 - beta2, sqrt(1 - beta2^t), eps, -lr / (1 - beta1^t).
    """
    read_p, read_g = _reader("master", master), _reader("grad", grad)
    read_m, read_v = _reader("first", torch.float32), _reader("second", torch.float32)
    write_p, write_c = _master_writer(master), _writer("copy", copy)
    write_m, write_v = _writer("first", torch.float32), _writer("second", torch.float32)

    def loop(begin: int, end: int, places: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        p, g, m, v, c, one, two, start = places
        scale, keep, decay, weight, beta2, rest2, root, eps, size = numbers
        for i in range(begin, end):
            x = read_p(p, i)
            y = read_g(g, i) * scale
            if coupled:
                y = _fma(x, decay, y)
            else:
                x = x * keep
            before = read_m(m, i)
            first = _fma(weight, y - before, before) if light else _fma(weight - float32(1), y - before, y)
            second = _fma(rest2 * y, y, read_v(v, i) * beta2)
            x = x + _div(size * first, _div(_sqrt(second), root) + eps)
            write_m(m, i, first)
            write_v(v, i, second)
            write_p(p, i, x, one, two, start)
            write_c(c, i, x)

    return _compiled(loop, words=8, scalars=9)


@cache
def sgd_loop(
    master: torch.dtype,
    grad: torch.dtype,
    copy: torch.dtype | None,
    *,
    coupled: bool,
    buffered: bool,
    first: bool,
    nesterov: bool,
) -> Loop:
    """SGD.  ``coupled``: there is decay; ``buffered``: there is momentum; ``first``: its buffer takes the gradient.

    Scalars: scale, decay, momentum, 1 - dampening, -lr.
    """
    read_p, read_g, read_m = _reader("master", master), _reader("grad", grad), _reader("first", torch.float32)
    write_p, write_m = _master_writer(master), _writer("first", torch.float32)
    write_c = _writer("copy", copy)

    def loop(begin: int, end: int, places: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        p, g, m, c, one, two, start = places
        scale, decay, factor, kept, size = numbers
        for i in range(begin, end):
            x = read_p(p, i)
            y = read_g(g, i) * scale
            if coupled:
                y = _fma(x, decay, y)
            if buffered:
                held = y if first else _fma(y, kept, read_m(m, i) * factor)
                write_m(m, i, held)
                y = _fma(held, factor, y) if nesterov else held
            x = _fma(y, size, x)
            write_p(p, i, x, one, two, start)
            write_c(c, i, x)

    return _compiled(loop, words=7, scalars=5)


@cache
def lion_loop(master: torch.dtype, grad: torch.dtype, copy: torch.dtype | None) -> Loop:
    """Lion (arXiv:2302.06675, algorithm 2).

    Scalars: scale, 1 - lr decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr.
    """
    read_p, read_g, read_m = _reader("master", master), _reader("grad", grad), _reader("first", torch.float32)
    write_p, write_m = _master_writer(master), _writer("first", torch.float32)
    write_c = _writer("copy", copy)

    def loop(begin: int, end: int, places: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        p, g, m, c, one, two, start = places
        scale, keep, beta1, rest1, beta2, rest2, size = numbers
        for i in range(begin, end):
            y = read_g(g, i) * scale
            held = read_m(m, i)
            x = _fma(_sign(_fma(y, rest1, held * beta1)), size, read_p(p, i) * keep)
            write_m(m, i, _fma(y, rest2, held * beta2))
            write_p(p, i, x, one, two, start)
            write_c(c, i, x)

    return _compiled(loop, words=7, scalars=7)
