"""Owns what `zprof report` finds out: plain values for programs, from which the text is drawn too, so that both say the same.

`zprof.commands.report` calls `report`, which reads each rank's trace once. It never prints, and it rounds nothing.

Note: [What a report is]
    ``{"version": 1, "by", "at", "runs": [one a rank, by rank], "unreadable": [traces that are left out, and why], "ranks":
    what only several ranks show, or null, "summary": [what to read first], "next": [what to do next]}``. Bytes are integers in
    keys that say "bytes"; "at_s" is seconds since the rank's recording began. New keys may be added; a key that is there keeps
    its meaning as long as the version is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zprof.analysis.analysis import Analysis
from zprof.analysis.compute import hardware_of
from zprof.analysis.coverage import Unseen
from zprof.analysis.curves import By, group_of, lines_recorded
from zprof.analysis.ledger import Ledger, Moment
from zprof.analysis.measures import measures
from zprof.analysis.operators import OperatorBy, operators_recorded
from zprof.analysis.outliers import Figure, deviations, distances, figures_of, spread
from zprof.analysis.prefetch import setting
from zprof.analysis.ranks import Lane, Lanes, clocks, lane_of, members_of, skews, stragglers
from zprof.analysis.remainder import Remainder, fullest_sample, peak_sample
from zprof.rows import TIERS, TraceError
from zprof.show.report.children import children_body, recorded_body
from zprof.show.report.compute import compute_body
from zprof.show.report.large_batch import large_batch
from zprof.show.report.loading import loading_body
from zprof.show.report.next_commands import following
from zprof.show.report.operators import operators_body
from zprof.show.report.residual import residual
from zprof.show.report.summary import summary
from zprof.trace.children import recorded_children
from zprof.trace.reader import Trace

if TYPE_CHECKING:
    from offload.hardware import Hardware

__all__ = ["Body", "report", "report_of"]

Body = dict[str, Any]

VERSION = 1
#: Modules, waits and skews listed unless more are asked for, the largest first; the measures hold the sums of all.
MOST = 20
#: Ranks looked for: a header may claim a million.
MOST_MISSING = 4096


def report(
    runs: Sequence[str | Path],
    *,
    by: By | OperatorBy = "category",
    step: int | None = None,
    most: int = MOST,
    hardware: Hardware | None = None,
) -> Body:
    """What there is to say of a run; see Note: [What a report is].

    Args:
        runs: files or folders of traces, one trace a rank.
        by: how the bytes of a tier are grouped, or where it is "op" or "kernel", operators; these are by module or unit where
            bytes are.
        step: the highest moment of this step, counted from 0 as pages do; of the whole run where it is None.
        most: how many modules, waits and skews are listed.
        hardware: the profile of the device; None takes the shipped one of just that device, if there is one.
    Raises:
        TraceError: no trace can be read, has rows or such a step, a rank is there twice, or they are of different runs.
    """
    bodies, lanes = [], Lanes()
    unreadable: dict[Path, str] = {}
    for member in members_of(runs, unreadable):
        try:
            body, lane = _read(member.path, by, step, most, hardware)
        except TraceError as error:
            unreadable[member.path] = str(error)
        else:
            bodies.append(body)
            lanes.add(lane)
    if not bodies:
        raise TraceError(next(iter(unreadable.values())))
    return _whole(bodies, lanes, _of_bytes(by), step, most, unreadable)


def report_of(analyses: Sequence[Analysis]) -> Body:
    """The report of ranks that are read already, by category, at the peak."""
    bodies, lanes = [], Lanes()
    for analysis in analyses:
        bodies.append(_run(analysis, "category", "op", None, MOST, None))
        lanes.add(lane_of(analysis))
    return _whole(bodies, lanes, "category", None, MOST, {})


def _whole(bodies: list[Body], lanes: Lanes, by: By, step: int | None, most: int, unreadable: Mapping[Path, str]) -> Body:
    report: Body = {"version": VERSION, "by": by, "at": "peak" if step is None else f"step:{step}", "runs": bodies}
    report["unreadable"] = [{"file": str(path), "why": why} for path, why in unreadable.items()]
    report["ranks"] = _ranks(lanes, most) if bodies[0]["world"] > 1 or len(bodies) > 1 else None
    report["summary"] = summary(report)
    report["next"] = following(report)
    return report


def _of_bytes(by: By | OperatorBy) -> By:
    return "category" if by == "op" or by == "kernel" else by


def _read(path: Path, by: By | OperatorBy, step: int | None, most: int, hardware: Hardware | None) -> tuple[Body, Lane]:
    """One rank; nothing of its trace stays open or in memory, for one at a time is what fits."""
    of_operators: OperatorBy = by if by == "kernel" or by == "module" or by == "unit" else "op"
    trace = Trace.open(path)
    try:
        if not trace.count:
            raise TraceError(
                f"{path}: holds a header and no rows, expected a recorded run; record it again with "
                f"`zprof run -f -o {path}` and let it run for longer"
            )
        if by == "line":
            lines_recorded(trace)
        analysis = Analysis.of(trace)
        if by in ("op", "kernel"):
            operators_recorded(trace, analysis.operators, by)
        return _run(analysis, _of_bytes(by), of_operators, step, most, hardware), lane_of(analysis)
    finally:
        trace.close()


def _run(
    analysis: Analysis, by: By, operators_by: OperatorBy, step: int | None, most: int, hardware: Hardware | None
) -> Body:
    from zprof.oom.explanation import explain

    trace, header, ledger = analysis.trace, analysis.header, analysis.ledger
    steps, covered, grown, did = analysis.steps, analysis.covered, analysis.grown, analysis.computed
    under, data, ran = analysis.children, analysis.loading, analysis.operators
    measured = measures(analysis, hardware=hardware)
    moments = analysis.moments(step)

    ends = [note.body for note in trace.notes("end")]
    ooms = [note.body for note in trace.notes("oom")]
    begin_ns, end_ns = (ledger.begin_ns, ledger.end_ns) if step is None else steps.issued[step].tolist()
    tiers = {
        tier: _tier(analysis, tier, moment, by, most)
        | {"step": steps.at(moment.time_ns) if step is None else step, "memory_bytes": _memory(analysis, tier, hardware)}
        for tier, moment in moments.items()
    }
    reconciled = [_line(line, ledger) for line in ledger.remainder(fullest_sample(ledger, begin_ns, end_ns))]
    return {
        "file": str(trace.path),
        "rank": header.rank,
        "world": header.world,
        "simulated": header.simulated or None,
        "host": header.host,
        "device": trace.device,
        "level": trace.level,
        "level_chosen": _chosen(trace),
        "argv": list(header.argv),
        "versions": dict(header.versions),
        "duration_s": (ledger.end_ns - ledger.begin_ns) / 1e9,
        "rows": ledger.count,
        "dropped_rows": trace.dropped,
        "damage": ledger.damage,
        "below_zero": int((ledger.at(ledger.end_ns) < 0).sum()),
        "end": {"exit": ends[-1].get("exit"), "reason": ends[-1].get("reason", "")} if ends else None,
        "steps": {
            "count": steps.count,
            "timed": analysis.usual.count,
            "marked_by": steps.source,
            "first_unseen": None if steps.unseen is None else steps.unseen.why,
        },
        "tiers": tiers,
        "residual": residual(ledger, covered, tiers, reconciled, begin_ns, end_ns),
        "reconciliation": reconciled,
        "growth": None if isinstance(grown, Unseen) else [asdict(each) | {"per_step": each.per_step} for each in grown[:most]],
        "compute": None if isinstance(did, Unseen) else compute_body(did, hardware, most),
        "operators": None if isinstance(ran, Unseen) else operators_body(ran.at(step), operators_by, did, most),
        "rss": _rss(ledger),
        "children": None if isinstance(under, Unseen) else children_body(under, ledger.begin_ns),
        "recorded_children": recorded_body(recorded_children(trace), header),
        "measures": {name: None if isinstance(value, Unseen) else value for name, value in measured.items()},
        "unseen": {name: value.why for name, value in measured.items() if isinstance(value, Unseen)},
        "not_recorded": [*covered.lines(), *([f"step 0: {steps.unseen}"] if steps.unseen is not None else [])],
        "waits": None if covered.waits() else list(_waits(analysis, most)),
        "data": None if isinstance(data, Unseen) else loading_body(data),
        "remedies": [] if covered.waits() else list(analysis.advice.lines),
        "rates": _rates(analysis),
        "bench_problem": analysis.bench_problem,
        "large_batch": large_batch(ledger),
        "oom": _plain(ooms[-1]) | {"lines": explain(analysis)} if ooms else None,
    }


def _chosen(trace: Trace) -> str | None:
    """Why the level is what it is, where nobody named one."""
    whys = [note.body.get("why") for note in trace.notes("level")]
    return str(whys[-1])[:200] if whys else None


def _tier(analysis: Analysis, tier: str, moment: Moment, by: By, most: int) -> Body:
    ledger = analysis.ledger
    groups: dict[str, int] = {}
    categories: dict[str, int] = {}
    holders: dict[str, dict[str, int]] = {}
    for series, nbytes in zip(ledger.series, ledger.at(moment).tolist(), strict=True):
        if series.tier != tier or not nbytes:
            continue
        group, module = (
            group_of(each, series.category, tier, series.key, ledger.trace.header.rank) for each in (by, "module")
        )
        groups[group] = groups.get(group, 0) + nbytes
        categories[series.category] = categories.get(series.category, 0) + nbytes
        holder = holders.setdefault(module, {})
        holder[series.category] = holder.get(series.category, 0) + nbytes
    largest = sorted(holders.items(), key=lambda item: (-sum(item[1].values()), item[0]))[:most]
    return {
        "bytes": moment.nbytes,
        "at_s": (moment.time_ns - ledger.begin_ns) / 1e9,
        "peak_bytes": ledger.peak(tier).nbytes,
        "budget_bytes": _budget(analysis, tier),
        "groups": _sorted(groups),
        "categories": _sorted(categories),
        "not_recorded": list(analysis.covered.missing(tier)) if analysis.covered.tier(tier) else [],
        "holders": [{"name": name, "bytes": sum(held.values()), "categories": _sorted(held)} for name, held in largest],
    }


def _budget(analysis: Analysis, tier: str) -> int | None:
    """What the policy of the run bounds the tier to, in bytes; None without a bound, or for a share of the machine."""
    found = setting(analysis.policy, "budget", tier)
    return found if type(found) is int else None


def _memory(analysis: Analysis, tier: str, hardware: Hardware | None) -> int | None:
    """Bytes that a GPU has by its hardware profile: the one named, else the shipped one of just that device or of the
    simulation; None where that is not known, and for other tiers."""
    if tier != "device" or analysis.trace.device == "cpu":
        return None
    known = hardware or _simulated(analysis.header.simulated)
    if known is None:
        did = analysis.computed
        found = did if isinstance(did, Unseen) else hardware_of(did)
        if isinstance(found, Unseen):
            return None
        known = found
    return known.device.memory if known.kind != "cpu" else None


def _simulated(name: str) -> Hardware | None:
    """The shipped profile of that name; what a trace says names no file."""
    if not name:
        return None
    from offload.hardware import Hardware, names

    return Hardware.of(name) if name in names() else None


def _sorted(sums: dict[str, int]) -> dict[str, int]:
    return dict(sorted(((name, nbytes) for name, nbytes in sums.items() if nbytes), key=lambda pair: (-pair[1], pair[0])))


def _rss(ledger: Ledger) -> Body | None:
    found = peak_sample(ledger, "rss")
    if found is None:
        return None
    return {
        "start_bytes": ledger.trace.header.rss_nbytes,
        "peak_bytes": found[1],
        "at_s": (found[0] - ledger.begin_ns) / 1e9,
    }


def _line(line: Remainder, ledger: Ledger) -> Body:
    return {
        "name": line.name,
        "bytes": line.nbytes,
        "said": line.said,
        "said_bytes": line.said_nbytes,
        "against": line.against,
        "against_bytes": line.ledger_nbytes,
        "likely": line.explanation,
        "at_s": (line.time_ns - ledger.begin_ns) / 1e9,
    }


def _waits(analysis: Analysis, most: int) -> Iterator[Body]:
    """What the training threads stood still for, over the steps counted."""
    counted = max(len(analysis.stalls.per_step_ns), 1)
    for stall in analysis.stalls.units[:most]:
        yield {
            "what": stall.what,
            "unit": stall.key,
            "ms_per_step": stall.exposed_ns / 1e6 / counted,
            "waits": stall.count,
            "longest_ms": stall.longest_ns / 1e6,
            "settings": list(stall.settings),
        }


def _rates(analysis: Analysis) -> list[Body] | None:
    """Of the transfers that were seen, without times where those are not known; None where none could be seen."""
    covered = analysis.covered
    if not covered.zhooks or covered.dropped:
        return None
    return [_rate(rate, covered.spans(rate.verb)) for rate in analysis.rates]


def _rate(rate: Any, unseen: Unseen | None) -> Body:
    known = unseen is None
    return {
        "verb": rate.verb,
        "count": rate.count,
        "bytes": rate.nbytes,
        "busy_s": rate.busy_ns / 1e9 if known else None,
        "bytes_per_s": rate.bytes_per_s if known else None,
        "reached_bytes_per_s": rate.reached_bytes_per_s if known else None,
        "bench_bytes_per_s": rate.bench.bytes_per_s if rate.bench else None,
        "share_of_bench": rate.share_of_bench if known else None,
        "why": str(unseen) if unseen is not None else None,
    }


def _plain(body: dict[str, Any]) -> Body:
    """A note's facts that JSON can hold; a note of another program may hold anything."""
    return {
        str(name): value
        for name, value in body.items()
        if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    }


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


def _ranks(kept: Lanes, most: int) -> Body:
    lanes = kept.all
    here = {lane.header.rank for lane in lanes}
    tiers = [tier for tier in TIERS if any(lane.peaks.get(tier) for lane in lanes)]
    simulated = bool(lanes[0].header.simulated)
    # One rank that ended early must not hide how the others compare.
    timed = _enough([lane.work_ns is not None for lane in lanes])
    met = _enough([lane.collectives for lane in lanes])
    return {
        "world": lanes[0].header.world,
        "missing": [rank for rank in range(min(lanes[0].header.world, MOST_MISSING)) if rank not in here and not simulated],
        "clocks": [asdict(clock) for clock in clocks(lanes)],
        "skew": [asdict(skew) for skew in skews([lane for lane in lanes if lane.collectives], most)] if met else None,
        "skew_every": kept.every,
        "stragglers": [asdict(straggler) for straggler in stragglers(lanes)] if timed else None,
        "peak_bytes": {tier: {str(lane.header.rank): lane.peaks.get(tier) for lane in lanes} for tier in tiers},
        "work_ms": {str(lane.header.rank): _ms(lane.work_ns) for lane in lanes},
        "step_ms": {str(lane.header.rank): _ms(lane.step_ns) for lane in lanes},
        "wait_ms": {str(lane.header.rank): _ms(lane.wait_ns) for lane in lanes},
        **_apart(lanes),
    }


def _enough(seen: Sequence[bool]) -> bool:
    return all(seen) or sum(seen) > 2


def _apart(lanes: Sequence[Lane]) -> Body:
    """Who stands out, and what the others are like."""
    figures = figures_of(lanes)
    hosts = {lane.header.rank: lane.header.host for lane in lanes}
    by_name = {figure.name: figure for figure in figures}
    found = distances(figures, list(hosts))
    odd = [each for each in found if each.odds]
    spreads = [(figure, spread(figure, [each.rank for each in odd])) for figure in figures]
    return {
        "scores": {str(each.rank): each.score for each in found},
        "deviations": {
            figure.name: {str(rank): apart for rank, apart in deviations(figure).items()} for figure in figures
        },
        "outliers": [
            {
                "rank": each.rank,
                "host": hosts[each.rank],
                "score": each.score,
                "odd": [
                    {"score": odd.score} | _in_units(by_name[odd.figure], value=odd.value, median=odd.median)
                    for odd in each.odds
                ],
            }
            for each in odd
        ],
        "others": {
            "count": len(lanes) - len(odd),
            "figures": [
                {"count": over.count} | _in_units(figure, median=over.median, low=over.low, high=over.high)
                for figure, over in spreads
                if over is not None
            ],
        },
    }


def _in_units(figure: Figure, **values: int) -> Body:
    """Values of a figure under keys that say their unit."""
    if figure.tier:
        return {"figure": figure.name} | {f"{name}_bytes": value for name, value in values.items()}
    return {"figure": figure.name} | {f"{name}_ms": _ms(value) for name, value in values.items()}
