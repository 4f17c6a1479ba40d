"""What tests, benchmarks and examples import of ours is there: some of them run only by hand, or in a process that keeps quiet
about what it cannot import."""

from __future__ import annotations

import ast
import importlib
import importlib.util

import pytest

from tests.source_rules import PACKAGES
from tests.support.paths import ROOT


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_every_name_that_is_imported_of_ours_is_there(folder: str) -> None:
    imports = [
        (path, node)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and node.module
    ]
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"
        for path, node in imports
        if str(node.module).partition(".")[0] in PACKAGES
        for alias in node.names
        if not is_there(str(node.module), alias.name)
    ]
    assert imports and not missing, "\n".join(missing)


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


def test_a_name_that_is_gone_is_noticed() -> None:
    assert is_there("offload.kernels", "loops") and is_there("offload.policy", "Policy")
    assert not is_there("offload.kernels.loops", "squares_loop") and not is_there("offload.kernel", "loops")
