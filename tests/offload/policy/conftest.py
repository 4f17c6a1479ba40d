"""What tests of policies share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a policy file, ``write(text, name="policy.toml")``, and returns its path."""

    def into(text: str | bytes, name: str = "policy.toml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return into
