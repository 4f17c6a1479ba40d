"""Owns the last lines of ``zprof run``: where the trace is, what it held at most, and why the script ended if memory ran out.

`zprof.commands.run` prints them. It reads the trace once, unless that takes long and the script ended well, and adds to it what
the script could not say any more.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from offload.text import as_size, one_line
from zprof.analysis.analysis import Analysis
from zprof.analysis.remainder import peak_sample
from zprof.oom.case import computes_on_gpu
from zprof.oom.deaths import recorded_death
from zprof.oom.explanation import explain
from zprof.oom.facts import Failure
from zprof.rows import TIERS
from zprof.trace.children import recorded_children, reported_together
from zprof.trace.frames import FrameKind, packed, sealed
from zprof.trace.reader import Trace

if TYPE_CHECKING:
    from zprof.oom.deaths import Death
    from zprof.running.child import Ending

__all__ = ["last_lines"]

#: To read more rows than this takes seconds, which a run that ended well need not wait for.
_MOST_ROWS = 2_000_000


def last_lines(path: Path, ending: Ending, kill: tuple[str, int | None] | None, world: int) -> list[str]:
    """The last lines of ``zprof run``.

    Args:
        kill: whose want of memory the kernel ended a process for meanwhile, and the limit, if it did.
        world: how many ranks ran.
    Raises:
        TraceError: the trace cannot be read.
    """
    trace = Trace.open(path, ended=True)
    if not ending.failed and trace.count > _MOST_ROWS:
        return [f"trace {path} ({as_size(path.stat().st_size)})", *_next(trace, path, world)]
    analysis = Analysis.of(trace)
    died = recorded_death(trace) if ending.failed else None
    killed = _kill(ending, kill, analysis, died)
    if killed is not None:
        _write_down(path, "oom", asdict(killed))
    elif ending.signal and not trace.notes("end"):
        _write_down(path, "killed", {"signal": ending.signal})
    lines = explain(analysis, killed) if ending.failed else []
    if died is not None and killed is None and died.signal == 9:
        lines.append(f"{one_line(died.who)} was ended by SIGKILL; no process was ended for want of memory meanwhile")
    if ending.signal == 9 and killed is None:
        had = f"it had {_rss(ending, analysis)}"
        lines.append(f"killed by SIGKILL; no process was ended for want of memory meanwhile; {had}")
    elif ending.signal and killed is None:
        lines.append(f"ended by signal {ending.signal}")
    ledger, covered = analysis.ledger, analysis.covered
    parts = {tier: " of what zhooks placed" if covered.tier(tier) else "" for tier in TIERS}
    peaks = [f"{tier} {as_size(nbytes)}{parts[tier]}" for tier in TIERS if (nbytes := ledger.peak(tier).nbytes)]
    resident = peak_sample(ledger, "rss")
    peaks += [f"rss {as_size(resident[1])}"] if resident is not None and resident[1] else []
    lines.append(f"trace {path} ({as_size(path.stat().st_size)}); peak {', '.join(peaks) or 'unknown'}")
    return lines + _next(trace, path, world)


def _next(trace: Trace, path: Path, world: int) -> list[str]:
    """The command to go on with; of several ranks for all of their files, which the shell finds where nothing is quoted."""
    rank = f".{trace.header.rank}."
    children = [(str(child.path), child.header.rank, child.header.world) for child in recorded_children(trace)]
    lines = [f"children recorded: {len(children)}", f"next: zprof report {reported_together(children)}"] if children else []
    if world > 1 and rank in path.name:
        return [*lines, f"next: zprof report {path.with_name(path.name.replace(rank, '.*.', 1))}"]
    return [*lines, f"next: zprof report {shlex.quote(str(path))}"]


def _write_down(path: Path, name: str, body: Mapping[str, object]) -> None:
    """The process could not say why it ended: its trace says it from now on. A torn chunk before this is passed over."""
    with suppress(OSError), path.open("ab") as file:
        file.write(sealed(FrameKind.NOTE, packed([name, dict(body)])))


def _kill(ending: Ending, kill: tuple[str, int | None] | None, analysis: Analysis, died: Death | None) -> Failure | None:
    """The kernel ended the process, or one under it, for want of memory; it does not say what was asked for."""
    if kill is None or not (ending.signal == 9 or (died is not None and died.signal == 9)):
        return None
    whose, limit = kill
    bound = f"{whose} (limit {as_size(limit)})" if limit is not None else whose
    tier = "host" if computes_on_gpu(analysis) else "device"
    who = "the process" if ending.signal == 9 or died is None else died.who
    itself = "it" if ending.signal == 9 else "the process itself"
    had = f"{itself} had {_rss(ending, analysis)}"
    return Failure("kill", tier, f"the kernel ended {who} for want of memory: {had}", limit=limit, bound=bound)


def _rss(ending: Ending, analysis: Analysis) -> str:
    """The kernel's figure is the most of it and of those under it, each alone: where there were any, what was sampled of it."""
    sampled, count = peak_sample(analysis.ledger, "rss"), peak_sample(analysis.ledger, "children count")
    if sampled is not None and count is not None and count[1]:
        return f"at most {as_size(sampled[1])} resident when it was sampled"
    return f"at most {as_size(ending.most_nbytes)} resident"
