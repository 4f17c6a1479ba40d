"""Stochastic rounding: fp32 values become bf16, up or down with probabilities that leave their mean as it was.

``zhooks/optim/rounding.py`` calls it where torch updates, and ``loops.py`` emits the same noise into its own passes.

Note: [Noise]
    A bf16 value is the upper half of an fp32 one.  Added to the lower half, sixteen uniform bits carry into the upper half
    with the probability that the lower half is of its whole: the mean of what remains when the lower half is dropped is the
    value itself (arXiv:1502.02551; for bf16 training arXiv:2010.06192).  Values that bf16 can say never carry.  The bits of
    an element are a hash of a key and of its place in the parameter, so that neither ranks nor tiers nor the split into
    passes change them; a key is drawn from seed, parameter name and the count of its roundings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GOLDEN", "MIX_ONE", "MIX_TWO", "Noise", "noise_for", "round_to_bf16"]

#: The hash: a Weyl sequence through the finaliser "lowbias32" (Wellons, 2018), a second key between its two products.
GOLDEN, MIX_ONE, MIX_TWO = 0x9E3779B9, 0x7FEB352D, 0x846CA68B

_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Noise:
    """Where the noise of a range comes from: two keys below 2**32, and the place of its first element."""

    one: int
    two: int
    start: int = 0

    def at(self, start: int) -> Noise:
        """The noise of the range of the same parameter that begins at ``start``."""
        return Noise(self.one, self.two, start)


def noise_for(seed: int, name: str, count: int) -> Noise:
    """The noise of the ``count``-th rounding of the parameter ``name``."""
    drawn = hashlib.blake2b(f"{seed}/{count}/{name}".encode(), digest_size=8).digest()
    return Noise(int.from_bytes(drawn[:4], "little"), int.from_bytes(drawn[4:], "little"))


@torch.no_grad()
def round_to_bf16(values: Tensor, out: Tensor, noise: Noise) -> None:
    """Round ``values`` into ``out``; infinities and NaN stay what they are.

    A finite value beyond the largest of bf16 may become infinite, as it would by rounding to the nearest.

    Args:
        values: fp32, 1-D [numel], contiguous; only read.
        out: bf16, 1-D [numel], on the same device.
        noise: the bits to add.
    """
    for start, one, two in _chunks(values, out):
        bits = one.view(torch.int32) + _bits(noise, start, one.numel(), one.device)
        rounded = bits.bitwise_and_(-0x10000).view(torch.float32)
        two.copy_(torch.where(one.isfinite(), rounded, one))


def _chunks(values: Tensor, out: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Chunks of a bounded size, so that rounding needs no memory that grows with the model."""
    for start in range(0, values.numel(), _CHUNK):
        yield start, values[start : start + _CHUNK], out[start : start + _CHUNK]


def _bits(noise: Noise, start: int, numel: int, device: torch.device) -> Tensor:
    """Sixteen bits an element, int32 [numel]."""
    first = (noise.start + start) & 0xFFFFFFFF
    x = torch.arange(first, first + numel, dtype=torch.int64, device=device).to(torch.int32)
    x.mul_(_signed(GOLDEN)).add_(_signed(noise.one))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(MIX_ONE)).bitwise_xor_(_signed(noise.two))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(MIX_TWO))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0xFFFF)


def _signed(word: int) -> int:
    """Thirty-two bits as torch's int32 has them."""
    return word - (1 << 32) if word >= 1 << 31 else word
