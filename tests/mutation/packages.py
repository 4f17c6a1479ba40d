"""What is changed, by name, and which tests may find it.

``__main__.py`` reads it.  Quick tests come first: those that run in pytest's process, then those that start a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutation.run import Tests
from tests.support.paths import ROOT


@dataclass(frozen=True, slots=True)
class Package:
    """Sources, and their tests."""

    paths: tuple[str, ...]
    tests: Tests


def _sources(folder: str, *names: str) -> tuple[str, ...]:
    found = (path.name for path in sorted((ROOT / folder).glob("*.py")) if path.name != "__init__.py")
    return tuple(f"{folder}/{name}" for name in found if not names or name in names)


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


PACKAGES = {
    "layout": Package(
        _sources("zhooks/layout"),
        Tests(
            _in("zhooks/layout", "flat_kind", "layout", "tiling", "units", "precision_rules"),
            (*_in("zhooks/layout", "mesh", "precision_parallel"), *_in("zhooks/plan", "ignored", "quantised")),
        ),
    ),
    "schedule": Package(
        _sources("zhooks/run", "schedule.py", "paths.py", "passes.py"),
        Tests(
            _in("zhooks/run", "schedule", "recorded_paths"),
            _in("zhooks/run", "order", "partial_passes", "kept", "uneven"),
        ),
    ),
    "reduce": Package(
        _sources(
            "zhooks/grad",
            "accumulation.py",
            "gradient.py",
            "reduce.py",
            "reduce_hooks.py",
            "reduction.py",
            "replicas.py",
            "shard.py",
        ),
        Tests(
            _in("zhooks/grad", "reduction", "shard", "accumulate", "direct", "reduce_hooks", "reduce_order"),
            ("tests/zhooks/grad",),
        ),
    ),
    "store": Package(
        _sources("offload/store"),
        Tests(
            _in("offload/store", "store", "limits", "allocation", "store_faults"),
            (*_in("offload/stash", "stash"), *_in("mutants", "mutants")),
        ),
    ),
}
