"""Holders of an object are found under every Python on this machine, though they count references differently.

pytest runs it; the module needs no torch, so that an interpreter without one can run it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

VERSIONS = ("3.11", "3.12", "3.13", "3.14")

STORY = """
from offload.references import held_elsewhere

class Thing:
    pass

def table():
    return tuple(Thing() for _ in range(3))

def inside(things, thing):
    return held_elsewhere(things)

def given(things, *rest, **named):
    return held_elsewhere(things)

things = table()
assert not held_elsewhere(things) and not inside(things, None)
assert not held_elsewhere(list(table())) and not held_elsewhere(())
for thing in things:
    pass
assert held_elsewhere(things)
del thing
assert not held_elsewhere(things)
assert inside(things, things[1]) and given(things, things[2]) and given(things, one=things[0])
kept = {"there": things[2]}
assert held_elsewhere(things) and not held_elsewhere(things, known=1)
kept.clear()
keeper = Thing()
keeper.it = things[0]
assert held_elsewhere(things)
keeper.it = None

def closed():
    thing = things[1]
    return lambda: thing

function = closed()
assert held_elsewhere(things)
del function

def generator():
    mine = things[0]
    yield mine

running = generator()
next(running)
assert held_elsewhere(things)
running.close()
assert not held_elsewhere(things)
print("held")
"""


def python(version: str) -> str | None:
    """An interpreter of that version, if this machine has one."""
    if sys.version_info[:2] == tuple(int(number) for number in version.split(".")):
        return sys.executable
    own = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(own[-1]) if own else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", VERSIONS)
def test_an_object_somebody_else_holds_is_found_whatever_this_python_counts(version: str) -> None:
    found = python(version)
    if found is None:
        pytest.skip(f"this machine has no Python {version}")
    ran = subprocess.run([found, "-c", STORY], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.stderr.startswith("pyenv:"):
        pytest.skip(f"this machine has no Python {version}")
    assert ran.stdout == "held\n", ran.stderr
