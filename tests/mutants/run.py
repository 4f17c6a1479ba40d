"""Each call that orders streams is taken out in turn, and what is trained without it looked at for races.

test_mutants.py and ``python -m tests.mutants`` call it, in a process in which torch knows of the virtual device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.mutants.sites import Site, counted, without
from tests.mutants.workloads import WORKLOADS, run

#: What a missing call must not lead to: then this package has changed the sources wrongly.
BROKEN = (AttributeError, NameError, TypeError, SyntaxError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one missing call: the workload that showed it and how, or in which it was missing without a trace."""

    site: Site
    shown_by: str | None
    how: str
    tried: int


#: Calls of the seam to the device that no workload shows to be missing, by function and text, and why.
UNSEEN: dict[str, str] = {
    "after: event.synchronize()": "its one caller, `_Then`, waits for the same copy again",
    "OneStream._ended: calls.keep(tensor, current)": "no workload takes memory on the second stream while gradients are used",
}


@cache
def made_by(name: str) -> frozenset[Site]:
    """The calls that a workload makes, as the packages are: then nothing is found."""
    found: set[Site] = set()
    with counted(found):
        races = run(name)
    assert races.checked > 300, f"{name}: a check that saw nothing"
    assert not races.found, "\n".join([f"{name}:", *map(str, races.found)])
    return frozenset(found)


def judge(site: Site) -> Verdict:
    """Take the call out of each workload that makes it, until one shows it."""
    tried = 0
    for name in WORKLOADS:
        if site not in made_by(name):
            continue
        tried += 1
        try:
            with without(site):
                races = run(name)
        except BROKEN:
            raise
        except Exception as error:
            return Verdict(site, name, f"{type(error).__name__}: {str(error)[:80]}", tried)
        if races.found:
            first = races.found[0]
            return Verdict(site, name, f"{first.kind} ({len(races.found)} found)", tried)
    return Verdict(site, None, "", tried)
