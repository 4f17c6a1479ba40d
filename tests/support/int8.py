"""A quantised weight as torchao makes them: a tensor subclass that says what it is made of.

Tests of frozen quantised bases use it where torchao is not installed.  It has no gradient and is never trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Int8"]


class Int8(Tensor):
    """Whole numbers and a scale a row; whatever reads it reads their product."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scale)

        def read(value: Any) -> Any:
            return value.numbers * value.scale if isinstance(value, cls) else value

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))
