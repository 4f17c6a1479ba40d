"""Calls the kernel that an operation has for one dispatch key, whatever modes of Python surround the call.

Modules of the virtual device call it.  It chooses no kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey

__all__ = ["by_key"]


def by_key(key: DispatchKey, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel for ``key`` returns."""
    # Inside a mode of torch functions (``with torch.device(...)`` is one) torch asks the mode, which knows no key.
    with torch._C.DisableTorchFunction():
        return overload._op_dk(key, *args, **kwargs)
