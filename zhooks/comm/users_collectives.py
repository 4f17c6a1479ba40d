"""Waits for the user's own collectives, which ``tensor/aten.py`` carries out on whole values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._pytree import tree_leaves

__all__ = ["wait_for"]


def wait_for(returned: Any) -> None:
    """Wait for what an operation of torch.distributed has returned: works, or tensors that are under way."""
    for one in tree_leaves(returned):
        if isinstance(one, Tensor):
            torch.ops._c10d_functional.wait_tensor(one)
        elif isinstance(one, torch.ScriptObject):
            Work.unbox(one).wait()
