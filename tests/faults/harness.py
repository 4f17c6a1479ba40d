"""Runs the program with one fault, and checks the one invariant: it goes on bit for bit, or stops with one named error.

``test_faults.py`` runs a sample, ``python -m tests.faults`` as many as are asked for.  It waits for processes and files alone.

Note: [The invariant]
    Every rank that lives comes to its end, and either has the losses and parameters of the run that was not disturbed, or says
    an error of the project's own tree; ranks that say one is gone or late all name the same.  Where some rank stopped, a
    checkpoint that was committed loads in new processes, and what is trained from there is what is trained from the
    undisturbed run's.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zhooks
from tests.faults.program import FIRST, SECOND, TIMEOUT_S, Fault, Setting, main, resume
from tests.support.ranks import LIMIT_S, forks

SETTINGS = [
    Setting(2, "shm", 3), Setting(2, "p2p", 3), Setting(2, "stock", 3), Setting(2, "shm", 0), Setting(2, "shm", 1),
    Setting(2, "p2p", 2), Setting(2, "stock", 1), Setting(2, "shm", 3, "disk"), Setting(2, "p2p", 2, "disk"),
    Setting(4, "shm", 3), Setting(4, "p2p", 3), Setting(4, "stock", 2), Setting(4, "p2p", 0), Setting(3, "shm", 2),
    Setting(1, "shm", 3, "disk"),
]  # fmt: skip
KINDS = ("kill", "kill", "stop", "delay", "corrupt")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ranks wrote, by rank; when the fault happened, by the clock of the machine; who had to be killed at the end."""

    results: dict[int, dict[str, Any]]
    happened: float | None
    seconds: float = 0.0
    silent: list[int] = field(default_factory=list)


def launch(folder: Path, target: Any, world: int, *rest: Any) -> Outcome:
    """Start the ranks and wait until those that live have ended; a stopped one goes on once the others have given it up."""
    started = time.monotonic()
    children = [forks().Process(target=target, args=(rank, str(folder), *rest)) for rank in range(world)]
    for child in children:
        child.start()
    stopped, since, deadline = 0, float("inf"), started + LIMIT_S
    try:
        while any(child.is_alive() for child in children) and time.monotonic() < deadline:
            for child in children:
                child.join(0.01)
            if not stopped and (folder / "stopped").exists():
                stopped, since = int((folder / "stopped").read_text()), time.monotonic()
            if time.monotonic() - since > TIMEOUT_S + 1.0:
                os.kill(stopped, signal.SIGCONT)
                since = float("inf")
    finally:
        silent = [rank for rank, child in enumerate(children) if child.is_alive()]
        for child in children:
            child.kill()
            child.join()
    found = {rank: folder / f"result-{rank}" for rank in range(world)}
    results = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    happened = float((folder / "happened").read_text()) if (folder / "happened").exists() else None
    return Outcome(results, happened, time.monotonic() - started, silent)


def resumed(folder: Path, setting: Setting, name: str) -> Outcome:
    """A new start of all ranks, from a checkpoint in the folder of a run that stopped."""
    for path in [*folder.glob("store*"), *folder.glob("result-*"), folder / "stopped"]:
        path.unlink(missing_ok=True)
    return launch(folder, resume, setting.world, name, setting)


def culprits(text: str) -> frozenset[str]:
    """The ranks that an error says are gone or late."""
    found = re.search(r"(Ranks? [\d, and]*?\d+) (is|are) (gone|late)", text)
    return frozenset(re.findall(r"\d+", found[1])) if found else frozenset()


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The run without a fault: its events by rank, what it came to, and what its checkpoints come to."""

    setting: Setting
    events: dict[int, list[tuple[str, int]]]
    digests: dict[int, str]
    resumed: dict[str, dict[int, str]]

    @staticmethod
    def of(setting: Setting) -> Undisturbed:
        with folder() as place:
            ran = launch(place, main, setting.world, setting, Fault())
            assert all("digest" in ran.results.get(rank, {}) for rank in range(setting.world)), ran
            after = {name: digests(resumed(place, setting, name)) for name in (FIRST, SECOND)}
        events = {rank: [(name, number) for name, number in one["events"]] for rank, one in ran.results.items()}
        return Undisturbed(setting, events, digests(ran), after)


def digests(outcome: Outcome) -> dict[int, str]:
    return {rank: one.get("digest", "") for rank, one in outcome.results.items()}


@contextmanager
def folder() -> Iterator[Path]:
    """A folder of its own, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a fault: "" as ``problem`` where the invariant held, and the longest that a rank took to say so."""

    how: str
    problem: str
    heard_s: float = 0.0


def check(base: Undisturbed, fault: Fault) -> Checked:
    """One run with the fault; see Note [The invariant]."""
    setting = base.setting
    with folder() as place:
        ran = launch(place, main, setting.world, setting, fault)
        if ran.silent:
            return Checked("hangs", f"ranks {ran.silent} did not end; the others said {_said(ran)}")
        living = [rank for rank in range(setting.world) if not (fault.kind == "kill" and rank == fault.rank)]
        if ran.happened is None:
            # Some events (a fetch that is waited for) come in some runs alone.
            return Checked("did not happen", "" if digests(ran) == base.digests else f"without a fault: {_said(ran)}")
        missing = [rank for rank in living if rank not in ran.results]
        if missing:
            return Checked("ends", f"ranks {missing} ended without a word")
        others = [rank for rank in living if rank != fault.rank]
        heard = max((said[2] - ran.happened for rank in others for said in _errors(ran, rank)[:1]), default=0.0)
        named = {culprits(said[1]) for rank in living for said in _errors(ran, rank)[:1]} - {frozenset()}
        if len(named) > 1:
            return Checked("names", f"ranks name others: {_said(ran)}", heard)
        strange = [rank for rank in living if "error" in ran.results[rank] and not _ours(ran.results[rank]["error"][0])]
        if strange:
            return Checked("errors", f"rank {strange[0]}: {ran.results[strange[0]]['trace']}", heard)
        other = [rank for rank in living if "digest" in ran.results[rank] and ran.results[rank]["digest"] != base.digests[rank]]
        if other:
            return Checked("differs", f"ranks {other} went on with other values; {_said(ran)}", heard)
        stopped = [rank for rank in living if "error" in ran.results[rank]]
        if fault.kind == "delay" and stopped:
            return Checked("stops", f"a delay stopped the run: {_said(ran)}", heard)
        if not stopped:
            return Checked("went on" if not any(_errors(ran, rank) for rank in living) else "recovered", "", heard)
        return replace(_loads(base, place, fault), heard_s=heard)


def _loads(base: Undisturbed, place: Path, fault: Fault) -> Checked:
    """A committed checkpoint of the folder loads, and is trained on as it is from the undisturbed run's."""
    there = [name for name in (SECOND, FIRST) if (place / name / "manifest.json").exists()]
    for name in there:
        after = resumed(place, base.setting, name)
        if digests(after) == base.resumed[name]:
            return Checked(f"stopped; {name} loads", "")
        refused = [one.get("error", ["", ""]) for one in after.results.values()]
        if fault.kind != "corrupt" or not all(kind == "CheckpointError" for kind, *_ in refused):
            return Checked("loads", f"{name} does not load: {_said(after)}")
    return Checked("stopped before a checkpoint", "") if not there else Checked("loads", "no checkpoint loads")


def _ours(kind: str) -> bool:
    return issubclass(getattr(zhooks, kind, object), zhooks.ZhooksError)


def _errors(ran: Outcome, rank: int) -> list[Any]:
    result = ran.results[rank]
    return [*result.get("said", []), *([result["error"]] if "error" in result else [])]


def _said(ran: Outcome) -> str:
    return "; ".join(f"rank {rank} {said[0]}: {said[1]}" for rank in ran.results for said in _errors(ran, rank)) or "nothing"


def faults(base: Undisturbed, rng: random.Random) -> Iterator[Fault]:
    """Faults by chance: each kind of event as likely as every other, at any of its times."""
    while True:
        rank, seed = rng.randrange(base.setting.world), rng.randrange(1 << 20)
        kinds = KINDS if base.setting.world > 1 else ("delay", "corrupt")
        by_kind: dict[str, list[tuple[str, int]]] = {}
        for name, number in base.events[rank]:
            if name.startswith("instant policy"):
                continue  # it says the folder, which is another in every run
            by_kind.setdefault(" ".join(name.split(" ")[:-1]), []).append((name, number))
        event, nth = rng.choice(by_kind[rng.choice(sorted(by_kind))])
        yield Fault(rng.choice(kinds), rank, event, nth, seed)
