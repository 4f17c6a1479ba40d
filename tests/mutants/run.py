"""Each call that orders streams is taken out in turn, and what runs without it looked at for races.

test_mutants.py and ``python -m tests.mutants`` call it, in a process in which torch knows of the virtual device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from offload.virtual import Races
from tests.mutants.programs import PROGRAMS, run_program
from tests.mutants.sites import Site, counted, sites, without
from tests.mutants.workloads import WORKLOADS, train

#: What a missing call must not lead to: then this package has changed the sources wrongly.
BROKEN = (AttributeError, NameError, TypeError, SyntaxError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one missing call.

    Attributes:
        shown_by: the workload that showed it; None where all did without it.
        how: by what it was shown.
        tried: the workloads that it was missing in.
        control: what was found where streams run at once, and nothing may be; "" where that was nothing.
        made: some workload makes the call; where none was tried, it orders no stream in any of them.
        repeated: all that it waited for was waited for again on the same stream.
    """

    site: Site
    shown_by: str | None
    how: str
    tried: int
    control: str = ""
    made: bool = False
    repeated: bool = False


#: Calls that nothing here shows to be missing, by function and text, and why.
UNSEEN: dict[str, str] = {
    "StreamCalls.keep: tensor.record_stream(stream)": "the virtual device has its own",
    "Away.wait: self._gradients.wait()": "for errors, before ranks meet: whoever uses the values waits again",
    "Away.wait: self._values.wait()": "for errors, before ranks meet: whoever uses the values waits again",
    "Partition._land: gather.work.wait()": "no workload divides a model over tp",
    "Update.wait: self.over.join()": "on the virtual device the thread has run when it is asked for",
}


def run(name: str) -> Races:
    """A program, or a workload: what was found in it; an error of the packages' is raised."""
    return run_program(name) if name in PROGRAMS else train(name)


@cache
def made_by(name: str) -> frozenset[Site]:
    """The calls that a workload makes, as the packages are: then nothing is found."""
    found: set[Site] = set()
    with counted(found, sites()):
        races = run(name)
    assert name in PROGRAMS or races.checked > 300, f"{name}: a check that saw nothing"
    assert not races.found, "\n".join([f"{name}:", *map(str, races.found)])
    return frozenset(found)


def judge(site: Site) -> Verdict:
    """Take the call out of each workload that makes it, until one shows it."""
    tried = 0
    for name in (*PROGRAMS, *WORKLOADS):
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
    return Verdict(site, None, "", tried, made=tried > 0)
