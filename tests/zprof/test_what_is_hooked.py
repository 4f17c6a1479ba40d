"""What a recording replaces in torch while it lasts: all of it is on the page that says so, and is put back."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # what FSDP2 loads

import zprof
from tests.support.paths import ROOT


def functions() -> dict[str, object]:
    """Every function of torch's modules and classes, by the place where it lies."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[f"{name}.{key}"] = value
                if issubclass(type(value), type) and str(value.__module__).startswith("torch"):
                    members: Mapping[str, object] = vars(value)
                    owner = f"{value.__module__}.{value.__qualname__}"
                    found |= {f"{owner}.{key}": each for key, each in members.items() if callable(each)}
    return found


@pytest.mark.parametrize(
    ("level", "replaced"),
    [
        ("events", {"wait", "_broadcast_coalesced", "trigger_wait", "__next__", "__iter__"}),
        ("alloc", {"wait", "_broadcast_coalesced", "trigger_wait", "__next__", "__iter__", "resize_"}),
        (
            "ops",
            {
                "wait",
                "_broadcast_coalesced",
                "trigger_wait",
                "__next__",
                "__iter__",
                "resize_",
                "_prepare_profiler",
                "_enable_profiler",
            },
        ),
    ],
)
def test_a_recording_replaces_what_the_page_says_and_puts_it_back(level: Any, replaced: set[str], tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    with zprof.record(tmp_path / "warm.zprof", level=level):
        layer(torch.ones(1, 2)).sum().backward()
    before = functions()
    with zprof.record(tmp_path / "run.zprof", level=level):
        layer(torch.ones(1, 2)).sum().backward()
        during = functions()
    after = functions()
    # A method may be inherited before; what was imported meanwhile is nothing that was replaced.
    owners = {name.rpartition(".")[0] for name in before}
    known = {name for name in during if name in before or name.rpartition(".")[0] in owners}
    changed = {name for name in known if during[name] is not before.get(name)}
    assert {name.rpartition(".")[2] for name in changed} == replaced
    assert not {name for name in changed if after.get(name) is not before.get(name)}
    page = (ROOT / "docs" / "zprof.md").read_text(encoding="utf-8")
    assert all(f".{name}`" in page for name in replaced)
