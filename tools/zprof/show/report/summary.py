"""Owns what a report says first: a few findings in plain words, with the figure of each and what to do about it.

`findings` puts them into the report, `text` and the page of ``zprof timeline`` show them as they are. It reads no trace and
finds out nothing: every figure is one that the report has elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offload.text import as_duration, as_moment, as_size, counted
from zprof.show.report.next_commands import LARGE

__all__ = ["foremost", "slowest", "summary"]

Run = Mapping[str, Any]
#: {"about", "figure", "what", "remedy", "act"}: all texts that may be "", but for "act", whether somebody should do something.
Finding = dict[str, Any]

_MOST = 13
#: Of the time of a step, in percent: less is no reason to act.
_MUCH_WAITING = 5.0
#: From so many steps on a share of them says more than the slowest.
_MANY_STEPS = 20
_MOST_CATEGORIES = 3


def summary(report: Mapping[str, Any]) -> list[Finding]:
    """What ended the run; step, waits and memory of the rank that a report shows in full; then what stands out of any rank."""
    runs, ranks = report["runs"], report["ranks"]
    run = foremost(runs)
    of = f"rank {run['rank']}: " if len(runs) > 1 else ""
    found = [*_ended(run), *_step(run), *_waits(run), *_memory(run), *_startup(run)]
    found = [each | {"what": of + each["what"]} for each in found]
    # Of ranks alike the first one's is enough.
    found += [each for run in runs for each in _grew(run)][:1]
    found += _slow(ranks)
    found += _unexplained(run)
    return found[:_MOST]


def foremost(runs: Sequence[Run]) -> Run:
    """The rank shown in full: the one that failed, else the one whose device holds most."""
    held = {run["rank"]: run["tiers"].get("device", {}).get("peak_bytes", 0) for run in runs}
    return max(runs, key=lambda run: (run["oom"] is not None, held[run["rank"]], -run["rank"]))


def _finding(about: str, figure: str, what: str, remedy: str = "", *, act: bool = False) -> Finding:
    return {"about": about, "figure": figure, "what": what, "remedy": remedy, "act": act}


def _ended(run: Run) -> Iterator[Finding]:
    from zprof.oom.fit import Verdict

    lines = run["oom"]["lines"] if run["oom"] else []
    if lines:
        promises = {verdict.value for verdict in Verdict if verdict.good}
        at = next((number for number, line in enumerate(lines) if line in promises), len(lines))
        remedy = f"{lines[at]} {lines[at + 1].strip()}" if at + 1 < len(lines) else ""
        yield _finding("end", "out of memory", lines[0], remedy, act=True)
    elif run["damage"]:
        yield _finding("end", "not whole", run["damage"], act=True)


def slowest(run: Run) -> str:
    """How long steps take at most; of a few of them no share is worth telling."""
    figures = run["measures"]
    if run["steps"]["timed"] < _MANY_STEPS:
        return f"the slowest took {_took(figures['step.max_ms'])}"
    return f"95 % took at most {_took(figures['step.p95_ms'])}"


def _of_steps(steps: Mapping[str, Any]) -> str:
    """Which steps the figures of time are of."""
    count, timed = steps["count"], steps["timed"]
    if timed == count:
        return counted(count, "step")
    others = "the first" if timed == count - 1 else "the first and those that the recording itself slowed down"
    return f"{timed} of {count} steps, without {others}"


def _startup(run: Run) -> Iterator[Finding]:
    took = run["measures"]["startup.ms"]
    if took is not None:
        what = "from the start of the process to the first step: imports, attach, the first batch"
        yield _finding("start-up", _took(took), what)
    elif run["steps"]["count"] and not run["simulated"]:
        yield _finding("start-up", "not recorded", _why(run, "startup.ms"))


def _step(run: Run) -> Iterator[Finding]:
    figures = run["measures"]
    count = run["steps"]["count"]
    if figures["step.median_ms"] is None:
        yield _finding("step", "not seen" if count else "none", _why(run, "step.median_ms"))
        return
    what = f"the median of {_of_steps(run['steps'])}; {slowest(run)}"
    passes = {"forward": "forward", "backward": "backward", "update": "optimizer", "outside": "outside all three"}
    spent = {word: figures[f"{name}.ms_per_step"] for name, word in passes.items()}
    shares = ""
    if None not in spent.values() and sum(spent.values()):
        # Shares, for these are means, also of steps that the median leaves out because their operations were counted.
        shares = ", ".join(f"{ms / sum(spent.values()):.0%} {word}" for word, ms in spent.items())
    paces = ((name, figures[f"{name}.per_second"]) for name in ("tokens", "samples"))
    pace = [f"{rate:,.0f} {name}/s" if rate >= 100 else f"{rate:.3g} {name}/s" for name, rate in paces if rate][:1]
    pace += [f"{figures['mfu.percent']:.1f} % MFU"] if figures["mfu.percent"] is not None else []
    yield _finding("step", _took(figures["step.median_ms"]), "; ".join(filter(None, (what, shares, ", ".join(pace)))))


def _waits(run: Run) -> Iterator[Finding]:
    share, spent = run["measures"]["exposed.percent"], run["measures"]["exposed.ms_per_step"]
    if share is None or spent is None:
        name = "exposed.ms_per_step" if spent is None else "exposed.percent"
        yield _finding("waits", "not seen", _why(run, name))
        return
    if not run["waits"]:
        yield _finding("waits", "none", "no recorded thread waited for a transfer")
        return
    first = run["waits"][0]
    longest = f"{' '.join(filter(None, (first['what'], first['unit'])))}, {_took(first['ms_per_step'])} per step"
    what = f"of the step time was spent waiting, {_took(spent)} per step on average; mostly for {longest}"
    if share < _MUCH_WAITING:
        yield _finding("waits", f"{share:.1f} %", what)
        return
    settings = f"look at {', '.join(first['settings'][:2])}" if first["settings"] else ""
    advice = run["data"]["advice"] if first["what"] == "data" and run["data"] else run["remedies"]
    remedy = next(iter(advice), settings)
    yield _finding("waits", f"{share:.1f} %", what, remedy, act=True)


def _memory(run: Run) -> Iterator[Finding]:
    for tier, held in run["tiers"].items():
        if not held["peak_bytes"] and not held["not_recorded"]:
            continue
        step = "" if held["step"] is None else f", in step {held['step']}"
        at = f"{'recorded' if held['not_recorded'] else 'held'} at the peak, at {as_moment(held['at_s'] * 1e9)}{step}"
        parts = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in list(held["categories"].items())[:_MOST_CATEGORIES])
        holder = next(iter(held["holders"]), None)
        most = f"most in {holder['name']} ({as_size(holder['bytes'])})" if holder and len(held["holders"]) > 1 else ""
        headroom, over = _headroom(run, tier, held)
        yield _finding(tier, as_size(held["bytes"]), "; ".join(filter(None, (at, parts, most, headroom))), act=over)
    if not run["tiers"]:
        yield _finding("memory", "not seen", "nothing was held that the recording saw")
    if run["rss"]:
        rss = run["rss"]
        what = f"resident at most, at {as_moment(rss['at_s'] * 1e9)}, including Python and libraries"
        yield _finding("process", as_size(rss["peak_bytes"]), what)
    under = run["children"]
    if under and under["bytes"]:
        with_it = f"; {as_size(under['tree_bytes'])} at most with this process" if under["tree_bytes"] is not None else ""
        what = f"held by child processes at most, at {as_moment(under['at_s'] * 1e9)}, shared memory counted once"
        yield _finding("children", as_size(under["bytes"]), what + with_it)


def _headroom(run: Run, tier: str, held: Mapping[str, Any]) -> tuple[str, bool]:
    """How much more fits, and whether that is less than nothing; what can't be said is not said to be 0."""
    taken, budget = held["peak_bytes"], held["budget_bytes"]
    if held["bytes"] < taken:
        # Another moment than the peak: what is left there says little.
        return "", False
    if budget is not None:
        # The rings that ranks exchange messages through are in no budget.
        rings = held["categories"].get("communication", 0) if tier == "host" else 0
        left = budget - (taken - rings)
        word = f"{as_size(left)} left" if left >= 0 else f"{as_size(-left)} over it"
        part = ", by what was recorded" if held["not_recorded"] else ""
        return f"[budget] {as_size(budget)}: {word}{part}", left < 0
    if held["memory_bytes"] is not None:
        reserved = round(run["measures"]["cuda.reserved.peak"] or 0)
        left = held["memory_bytes"] - max(taken, reserved)
        beside = f" on top of the {as_size(reserved)} that the allocator reserved" if reserved > taken else ""
        word = f"{as_size(left)} left{beside}" if left >= 0 else f"{as_size(-left)} more than that"
        return f"the device has {as_size(held['memory_bytes'])}: {word}", left < 0
    gpu = " and no hardware profile of this GPU is known" if tier == "device" and run["device"] != "cpu" else ""
    return f"headroom not known: no [budget] was set{gpu}", False


def _grew(run: Run) -> Iterator[Finding]:
    for grown in run["growth"] or ():
        where = "" if run["level"] == "stack" else "; zprof run --level stack shows the lines"
        yield _finding(
            "growth",
            f"{as_size(round(grown['per_step']))} per step",
            f"{grown['name']} holds that much more on {grown['tier']} after each step, {as_size(grown['nbytes'])} by step "
            f"{grown['last']}",
            f"a leak, unless it is kept on purpose{where}",
            act=True,
        )


def _slow(ranks: Mapping[str, Any] | None) -> Iterator[Finding]:
    for slow in (ranks or {}).get("stragglers") or ():
        more = f"{slow['work_ns'] / slow['median_ns'] - 1:.0%} more than the median rank"
        what = f"is rank {slow['rank']}'s own work per step, {more}: the others wait for it"
        yield _finding("slow rank", as_duration(slow["work_ns"]), what, act=True)


def _unexplained(run: Run) -> Iterator[Finding]:
    for line in run["reconciliation"]:
        if line["name"].startswith("unexplained") and line["bytes"] > LARGE * line["said_bytes"] > 0:
            share = f"{line['bytes'] / line['said_bytes']:.0%} of {line['said']}"
            remedy = "zprof run --level alloc sees every storage" if run["level"] == "events" else ""
            yield _finding("unexplained", as_size(line["bytes"]), f"{share}; likely {line['likely']}", remedy)


def _why(run: Run, measure: str) -> str:
    why: str = run["unseen"][measure]
    return why.removeprefix("not seen: ").removeprefix("not recorded: ")


def _took(ms: float) -> str:
    return as_duration(ms * 1e6)
