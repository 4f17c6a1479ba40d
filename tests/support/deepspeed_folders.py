"""Real checkpoints of DeepSpeed, unpacked from tests/support/deepspeed, and the program that made them.

Tests of readers and loaders unpack them; nothing here imports DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

ARCHIVE = ROOT / "tests/support/deepspeed/checkpoints.tar.xz"


def unpacked(into: Path, names: Iterable[str]) -> Path:
    """These checkpoints below ``into``."""
    wanted = set(names)
    with tarfile.open(ARCHIVE) as archive:
        members = [each for each in archive.getmembers() if each.name.partition("/")[0].removesuffix(".losses.json") in wanted]
        archive.extractall(into, members, filter="data")
    return into


def losses_of(folder: Path, name: str) -> list[float]:
    """Of three steps before the save and of three after it."""
    found: list[float] = json.loads((folder / f"{name}.losses.json").read_text())
    return found


@cache
def program() -> Any:
    """benchmarks/deepspeed_checkpoints.py: the model that was trained, its groups, batches and loss."""
    spec = importlib.util.spec_from_file_location("deepspeed_checkpoints", ROOT / "benchmarks/deepspeed_checkpoints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
