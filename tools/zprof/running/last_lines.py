"""Owns the last lines of ``zprof run``: where the trace is, what it held at most, and why the script ended if memory ran out.

`zprof.commands.run` prints them. It reads the trace once, unless that takes long and the script ended well, and adds to it what
the script could not say any more.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.text import as_size, one_line
from zprof.analysis.analysis import Analysis
from zprof.analysis.remainder import peak_sample
from zprof.oom.case import computes_on_gpu
from zprof.oom.deaths import recorded_death
from zprof.oom.explanation import explain, under_it
from zprof.oom.facts import Failure
from zprof.rows import TIERS
from zprof.trace.children import recorded_children, reported_together
from zprof.trace.families import family_of
from zprof.trace.frames import FrameKind, packed, sealed
from zprof.trace.reader import Trace

if TYPE_CHECKING:
    from zprof.oom.deaths import Death
    from zprof.running.child import Ending
    from zprof.trace.children import Recorded

__all__ = ["last_lines"]

#: To read more rows than this takes seconds, which a run that ended well need not wait for.
_MOST_ROWS = 2_000_000
#: Of children that ran out of memory, beside the first.
_MOST_NAMED = 8


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
        return [f"trace {path} ({as_size(path.stat().st_size)})", *_next(trace, path, world, recorded_children(trace))]
    analysis = Analysis.of(trace)
    died = recorded_death(trace) if ending.failed else None
    killed = _kill(ending, kill, analysis, died)
    if killed is not None:
        _write_down(path, "oom", asdict(killed))
    elif ending.signal and not trace.notes("end"):
        _write_down(path, "killed", {"signal": ending.signal})
    children = recorded_children(trace)
    lines = _explained(analysis, killed, children, died) if ending.failed else []
    if died is not None and killed is None and died.signal == 9:
        lines.append(f"{one_line(died.who)} was killed by SIGKILL; the kernel killed no process for lack of memory meanwhile")
    if ending.signal == 9 and killed is None:
        had = f"it had {_rss(ending, analysis)}"
        lines.append(f"killed by SIGKILL; the kernel killed no process for lack of memory meanwhile; {had}")
    elif ending.signal and killed is None:
        lines.append(f"ended by signal {ending.signal}")
    ledger, covered = analysis.ledger, analysis.covered
    parts = {tier: " of what zhooks placed" if covered.tier(tier) else "" for tier in TIERS}
    peaks = [f"{tier} {as_size(nbytes)}{parts[tier]}" for tier in TIERS if (nbytes := ledger.peak(tier).nbytes)]
    resident = peak_sample(ledger, "rss")
    peaks += [f"rss {as_size(resident[1])}"] if resident is not None and resident[1] else []
    lines.append(f"trace {path} ({as_size(path.stat().st_size)}); peak {', '.join(peaks) or 'unknown'}")
    return lines + _next(trace, path, world, children)


def _explained(analysis: Analysis, killed: Failure | None, children: Sequence[Recorded], died: Death | None) -> list[str]:
    """Why memory ran out: of a recorded process under this one where it was that, for the script itself held little then."""
    victim = next((child for child in children if killed is not None and died is not None and child.pid == died.pid), None)
    if victim is not None and killed is not None:
        theirs = Analysis.of(Trace.open(victim.path, ended=True))
        failure = replace(killed, tier=_host_tier(theirs), message=_ended_for_memory(victim.who, _sampled(theirs)))
        _write_down(victim.path, "oom", asdict(failure))
        around = under_it(analysis, failure)
        script = [f"{one_line(analysis.trace.path.name)}, which started it:", *around] if around else []
        return [_named(victim), *explain(theirs, failure), *script]
    lines = explain(analysis, killed)
    ran_out = [child for child in children if child.ran_out]
    for child in ran_out[:1]:
        lines += [_named(child), *explain(Analysis.of(Trace.open(child.path, ended=True)))]
    if len(ran_out) > 1:
        others = ", ".join(one_line(child.path.name) for child in ran_out[1:_MOST_NAMED])
        more = f" and {len(ran_out) - _MOST_NAMED} more" if len(ran_out) > _MOST_NAMED else ""
        lines.append(f"out of memory, too: {others}{more}")
    return lines


def _named(child: Recorded) -> str:
    return f"{one_line(child.path.name)}, {child.who}:"


def _next(trace: Trace, path: Path, world: int, children: Sequence[Recorded]) -> list[str]:
    """The command to go on with; of several ranks for all of their files, which the shell finds where nothing is quoted.

    Where ranks were started again, or hosts share a folder, that is the folder, whose newest run is read.
    """
    rank = f".{trace.header.rank}."
    theirs = [(str(child.path), child.header.rank, child.header.world) for child in children]
    lines = [f"children recorded: {len(theirs)}", f"next: zprof report {reported_together(theirs)}"] if theirs else []
    if world > 1 and family_of(path) and (".restart" in path.name or path.parent != Path()):
        return [*lines, f"next: zprof report {shlex.quote(str(path.parent))}"]
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
    who = "the process" if ending.signal == 9 or died is None else died.who
    itself = "it" if ending.signal == 9 else "the process itself"
    message = _ended_for_memory(who, _rss(ending, analysis), itself)
    return Failure("kill", _host_tier(analysis), message, limit=limit, bound=bound)


def _ended_for_memory(who: str, had: str, itself: str = "it") -> str:
    return f"the kernel killed {who} for lack of memory{f': {itself} had {had}' if had else ''}"


def _host_tier(analysis: Analysis) -> str:
    """The tier that host memory is: of a process that computes on it, the device."""
    return "host" if computes_on_gpu(analysis) else "device"


def _rss(ending: Ending, analysis: Analysis) -> str:
    """The kernel's figure is the most of it and of those under it, each alone: where there were any, what was sampled of it."""
    count = peak_sample(analysis.ledger, "children count")
    sampled = _sampled(analysis) if count is not None and count[1] else ""
    return sampled or f"at most {as_size(ending.most_nbytes)} resident"


def _sampled(analysis: Analysis) -> str:
    found = peak_sample(analysis.ledger, "rss")
    return "" if found is None else f"at most {as_size(found[1])} resident when it was sampled"
