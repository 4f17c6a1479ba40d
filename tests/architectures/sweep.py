"""Many subjects, one after the other: a pool of ranks that survives crashes, results kept line by line, a table.

``__main__.py`` and the slow test call it.  A run that was stopped goes on where it stopped: what the file of results has is
not trained again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.architectures.train import JOB, Verdict
from tests.support.ranks import End, Outcome, Pool

#: For what hangs: the search for a subject has bounds of its own.
LIMIT_S = 600.0
#: Jobs of one pool: each leaves the modules it imported.
_JOBS = 60


@dataclass(frozen=True, slots=True)
class Result:
    """One subject in one mode on so many ranks."""

    name: str
    world: int
    mode: str
    ended: str
    why: str
    built: str
    seconds: float
    units: int


def sweep(names: Sequence[str], world: int, modes: Sequence[str], kept: Path, again: bool = False) -> list[Result]:
    """Results of all ``names`` in all ``modes``, those in the file ``kept`` included; new ones are written there as they come.

    Args:
        again: train those once more whose result is not "equal" or "skipped".
    """
    known = {(one.name, one.mode): one for one in read(kept) if one.world == world}
    if again:
        known = {key: one for key, one in known.items() if one.ended in ("equal", "skipped")}
    pool, jobs = Pool(world), 0
    try:
        for name in names:
            missing = [mode for mode in modes if (name, mode) not in known]
            if not missing:
                continue
            for result in _one(pool, name, world, missing):
                known[name, result.mode] = result
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            jobs += 1
            if jobs % _JOBS == 0:
                pool.close()
    finally:
        pool.close()
    return [known[name, mode] for name in names for mode in modes]


def _one(pool: Pool, name: str, world: int, modes: Sequence[str]) -> list[Result]:
    began = time.monotonic()
    outcomes = pool.attempt(JOB, limit_s=LIMIT_S, name=name, modes=list(modes))
    if all(outcome.end is End.RETURNED for outcome in outcomes):
        built, verdicts = outcomes[0].value
        return [_result(name, world, built, verdict) for verdict in verdicts]
    if len(modes) > 1:
        # Which of them it was.
        return [result for mode in modes for result in _one(pool, name, world, [mode])]
    return [_result(name, world, "", Verdict(modes[0], "raised", _why(outcomes), time.monotonic() - began))]


def _why(outcomes: Sequence[Outcome]) -> str:
    """The last line of the first traceback; else how each rank ended."""
    for outcome in outcomes:
        if outcome.end is End.RAISED:
            lines = [line for line in outcome.text.strip().splitlines() if line and not line.startswith(" ")]
            return f"rank {outcome.rank}: {' '.join(lines[1:])[:600]}"
    return ", ".join(f"rank {outcome.rank} {outcome.end.value}: {outcome.text[-300:]}" for outcome in outcomes)


def _result(name: str, world: int, built: str, verdict: Verdict) -> Result:
    why, seconds = verdict.why, round(verdict.seconds, 2)
    return Result(name, world, verdict.mode, verdict.ended, why, built, seconds, verdict.units)


def read(kept: Path) -> list[Result]:
    """What a file of results has; of what is there twice the later one."""
    if not kept.exists():
        return []
    found = [Result(**json.loads(line)) for line in kept.read_text(encoding="utf-8").splitlines()]
    return list({(one.name, one.world, one.mode): one for one in found}.values())


def table(results: Iterable[Result]) -> str:
    """How many ended how, by world and mode; then each that is not equal, with the reason."""
    results = sorted(results, key=lambda one: (one.world, one.mode, one.name))
    ends = ("equal", "rounded", "differs", "raised", "not reproducible", "skipped")
    lines = [f"{'world':>5}  {'mode':<16}" + "".join(f"{end:>18}" for end in ends)]
    for world, mode in sorted({(one.world, one.mode) for one in results}):
        counts = Counter(one.ended for one in results if (one.world, one.mode) == (world, mode))
        lines.append(f"{world:>5}  {mode:<16}" + "".join(f"{counts[end]:>18}" for end in ends))
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for one in results:
        if one.ended != "equal":
            reasons.setdefault((one.name, one.ended, one.why), []).append(f"{one.mode} on {one.world}")
    for (name, ended, why), where in sorted(reasons.items()):
        lines.append(f"{name}: {ended} ({', '.join(where)}): {' '.join(why.split())}")
    return "\n".join(lines)
