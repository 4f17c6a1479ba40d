"""Parameters whose memory is another tensor's too: what plain training would write in both places at once.

``request.py`` asks before ranks meet.  Sharding copies each tensor, so that two objects over one memory would part without a
word; the same object in two places is a tied weight, and fine.  It never changes a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.errors import AttachError
from zhooks import tree
from zhooks.layout import Ignored, part_of

__all__ = ["check_own_memory"]


@dataclass(frozen=True, slots=True)
class _Range:
    """The addresses from a tensor's first element to its last; others may have those between."""

    start: int
    stop: int
    name: str
    tensor: Tensor
    written: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, written: bool) -> _Range:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return cls(start, start + (last + 1) * tensor.element_size(), name, tensor, written)


def check_own_memory(model: nn.Module, ignored: Ignored) -> None:
    """No trainable parameter shares memory with another parameter or a buffer.

    Raises:
        AttachError: one does.
    """
    trained = {id(param) for param in ignored.parameters(model) if param.requires_grad}
    named = [*tree.named_parameters(model), *tree.named_buffers(model)]
    parts = [(name, part_of(tensor), id(tensor) in trained) for name, tensor in named if not torch.nn.parameter.is_lazy(tensor)]
    ranges = sorted(
        (_Range.of(name, part, written=written) for name, part, written in parts if _has_memory(part)),
        key=lambda one: one.start,
    )
    reaches: list[_Range] = []
    for one in ranges:
        reaches = [other for other in reaches if other.stop > one.start and other.tensor.device == one.tensor.device]
        for other in reaches:
            if (one.written or other.written) and _meet(one, other):
                raise AttachError(
                    f"attach expected {one.name} to have memory of its own, found that it shares memory with {other.name}, "
                    "which is another tensor: each would be copied, and a step would no longer reach both. Tie them as one "
                    "object (b.weight = a.weight), or give one of them a copy (param.data = param.data.clone())."
                )
        reaches.append(one)


def _has_memory(part: Tensor) -> bool:
    plain = type(part) in (Tensor, nn.Parameter)
    return plain and part.layout is torch.strided and part.device.type != "meta" and part.numel() > 0


def _meet(one: _Range, other: _Range) -> bool:
    """They have an element in common: ranges that interleave (columns of one matrix) have none."""
    first, second = one.tensor, other.tensor
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() or first.dtype != second.dtype:
        return True
    begin = min(first.storage_offset(), second.storage_offset())
    size = (max(one.stop, other.stop) - min(one.start, other.start)) // first.element_size()
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    marks.as_strided(first.shape, first.stride(), first.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), second.storage_offset() - begin).any())
