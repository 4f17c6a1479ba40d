"""What is changed, by name, and which tests may find it.

``__main__.py`` reads it, and measures which of the tests run what is changed.  It never imports what it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.paths import ROOT


@dataclass(frozen=True, slots=True)
class Package:
    """Sources, and files or folders of their tests."""

    paths: tuple[str, ...]
    tests: tuple[str, ...]


def _sources(folder: str, *names: str) -> tuple[str, ...]:
    found = (path.name for path in sorted((ROOT / folder).glob("*.py")) if path.name != "__init__.py")
    return tuple(f"{folder}/{name}" for name in found if not names or name in names)


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


PACKAGES = {
    "layout": Package(
        _sources("zhooks/layout"),
        ("tests/zhooks/layout", *_in("zhooks/plan", "ignored", "quantised")),
    ),
    "schedule": Package(
        _sources("zhooks/run", "schedule.py", "paths.py", "passes.py"),
        _in("zhooks/run", "schedule", "recorded_paths", "order", "partial_passes", "kept", "uneven"),
    ),
    "reduce": Package(
        _sources(
            "zhooks/grad",
            "accumulation.py",
            "grad_buffer.py",
            "reduce.py",
            "reduce_hooks.py",
            "reduction.py",
            "replicas.py",
        ),
        ("tests/zhooks/grad",),
    ),
    "store": Package(
        _sources("offload/store"),
        (
            *_in("offload/store", "store", "limits", "allocation", "store_faults"),
            *_in("offload/stash", "stash"),
            *_in("mutants", "mutants"),
        ),
    ),
}
