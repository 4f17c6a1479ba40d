"""Owns where numba keeps the replay's machine code between runs: a private folder, one for each state of the sources.

`replay` imports the compiled modules within `kept`, which turns eight seconds of compiling into half a second of loading. It
never keeps code where another user could write: it would run.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from offload.private_files import make_folders

__all__ = ["folder", "keeps", "kept"]

#: numba knows when the file of a function changes, but not when that of a function it calls does: both are in the name.
_SOURCES = ("replay_blocks.py", "replay_loops.py")


def folder() -> Path | None:
    """The folder for these sources and this numba, made if need be; None where there can be no private one."""
    import numba

    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    try:
        for name in _SOURCES:
            digest.update(Path(__file__).with_name(name).read_bytes())
        path = Path(cache, "zhooks", f"numba-{digest.hexdigest()}")
        make_folders(path)
        found = path.stat()
        private = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return path if private and path.is_absolute() and os.access(path, os.W_OK) else None
    except (OSError, ValueError):
        return None


def keeps() -> bool:
    """Whether numba has a folder now."""
    return bool(_config().CACHE_DIR)


def _config() -> Any:
    return import_module("numba.core.config")


@contextmanager
def kept(where: Path | None) -> Iterator[None]:
    """While this lasts, functions that numba is to cache go to ``where``; None: nowhere. NUMBA_CACHE_DIR comes first."""
    config = _config()
    before = config.CACHE_DIR
    config.CACHE_DIR = before or ("" if where is None else str(where))
    try:
        yield
    finally:
        config.CACHE_DIR = before
