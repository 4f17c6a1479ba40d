"""Host memory in whole pages, as tensors with a storage of their own.

Everything that direct I/O or page-locking touches is allocated here, and pooled by ``memory/host_tier.py``.  It never looks
at its content.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ALIGN", "LARGE_PAGE", "aligned", "locked_nbytes", "mapped", "over", "round_up"]

#: Every buffer of a tier starts on a page and owns whole pages: direct I/O and page-locking both ask for it.
ALIGN = 4096
#: A page that needs one entry of the processor's tables where 4 KiB pages need 512.
LARGE_PAGE = 2 << 20


def round_up(nbytes: int) -> int:
    """``nbytes`` in whole pages."""
    return -(-nbytes // ALIGN) * ALIGN


def over(memory: Any, nbytes: int) -> Tensor:
    """uint8 [nbytes] at the start of a writable buffer, in a storage of its own that spans and keeps the buffer."""
    # An attachment may be entered under inference_mode, yet what it allocates there is trained later.
    with torch.inference_mode(False), torch.no_grad():
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))


def aligned(nbytes: int) -> Tensor:
    """uint8 [nbytes] of fresh host memory on a page of its own; the storage is whole pages and unmapped with it."""
    if nbytes == 0:
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
    return over(mapped(round_up(nbytes)), nbytes)


def mapped(nbytes: int) -> mmap.mmap:
    """Fresh private memory, on large pages where the system has them: direct I/O locks each page it moves."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= LARGE_PAGE:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def locked_nbytes(root: Path = Path("/")) -> int:
    """Bytes this process has locked or pinned as the kernel counts them; 0 where there is no /proc."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("VmLck:", "VmPin:")))
