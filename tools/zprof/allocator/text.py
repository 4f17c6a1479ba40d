"""Owns how ``zprof frag`` shows a study: tables and lines for people, plain values for JSON.

`commands.frag` calls it once it has a `Study`. It never works anything out, and imports rich only to draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from offload.allocator import Level, Replayed, environment_line
from offload.text import as_moment, as_size
from zprof.allocator.fragmentation import Answer, Part, total
from zprof.allocator.study import Study

__all__ = ["as_json", "as_text"]


def as_text(found: Study, answer: Answer | None) -> str:
    """All of it for a terminal; plain where it is piped."""
    # Imported late: drawing a table costs as much as everything else of a start.
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if Console().is_terminal else 128)
    with console.capture() as captured:
        for line in _heading(found):
            console.print(Text(line), soft_wrap=True)
        if found.parts:
            console.print(_pools(found))
        for line in (*_answered(answer), *_history(found)):
            console.print(Text(line), soft_wrap=True)
        if len(found.replays) > 1:
            console.print(_settings(found))
            for line in _advice(found):
                console.print(Text(line), soft_wrap=True)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def printable(text: str) -> str:
    """A name from a file, with nothing a terminal would act on."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _heading(found: Study) -> Iterator[str]:
    kind = "what-if by replay" if found.what_if else "allocator snapshot"
    yield f"{printable(found.source)}: {kind}, device {found.device}, {found.moment}, under {printable(found.settings.name)}"
    yield from (f"note: {printable(note)}" for note in found.notes)
    if not found.parts:
        yield "nothing is reserved"


def _pools(found: Study) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("pool")
    for heading in ("segments", "reserved", "allocated", "rounding", "pending", "releasable", "stuck", "largest free", "index"):
        table.add_column(heading, justify="right")
    for part in (*found.parts, *([total(found.parts)] if len(found.parts) > 1 else [])):
        sizes = (part.reserved, part.allocated, part.rounding, part.pending, part.releasable, part.stuck, part.largest)
        table.add_row(_name(part), str(part.segments), *map(as_size, sizes), f"{part.index:.2f}")
    return table


def _name(part: Part) -> str:
    if part.large is None:
        return "all"
    kind = "large" if part.large else "small"
    own = "" if part.pool == (0, 0) else f" of pool {part.pool[0]}.{part.pool[1]}"
    return f"{kind}{own}, stream {part.stream}" + (", expandable" if part.expandable else "")


def _answered(answer: Answer | None) -> Iterator[str]:
    if answer is None:
        return
    verdict = {True: "would succeed", False: "would fail", None: "cannot be known"}[answer.succeeds]
    yield f"{as_size(answer.nbytes)}: {verdict}"
    yield from (f"  {reason}" for reason in answer.reasons)


def _history(found: Study) -> Iterator[str]:
    worst = found.worst
    if worst is None:
        yield "no history: torch.cuda.memory._record_memory_history() before the snapshot would record one"
        return
    yield (
        f"worst moment: entry {worst.event}, {_after(found, worst)} after the first: {as_size(worst.stuck)} of "
        f"{as_size(worst.reserved)} reserved are stuck, largest free block {as_size(worst.largest)}, index {worst.index:.2f}"
    )
    score = found.score
    if score:
        yield (
            f"replay against the recording: reserved peak {as_size(score.peak_predicted)} predicted, "
            f"{as_size(score.peak_recorded)} recorded ({score.peak_error:+.1%}), mean error {as_size(round(score.mean_error))} "
            f"over {score.count} moments"
        )
    elif found.replays:
        yield "the recording has no reserved bytes: the replay cannot be compared with it"


def _after(found: Study, level: Level) -> str:
    return as_moment(level.time_ns - found.history[0].time_ns)


def _settings(found: Study) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("settings")
    for heading in ("reserved peak", "allocated peak", "most stuck", "failures", "retries"):
        table.add_column(heading, justify="right")
    for replayed in found.replays:
        sizes = (replayed.peak_reserved, replayed.peak_allocated, replayed.worst_stuck)
        table.add_row(_shown_settings(found, replayed), *map(as_size, sizes), str(replayed.failed), str(replayed.retries))
    return table


def _shown_settings(found: Study, replayed: Replayed) -> str:
    from rich.markup import escape

    recorded = " (recorded)" if replayed is found.replays[0] and not found.what_if else ""
    return escape(printable(replayed.settings.name)) + recorded


def _advice(found: Study) -> Iterator[str]:
    base = found.replays[0]
    for failure in base.failures[:1]:
        level = failure.level
        share = f" ({level.free / base.limit:.0%} of the limit)" if base.limit else ""
        yield (
            f"under {printable(base.settings.name)}: fails at event {level.event} for {as_size(failure.nbytes)} with "
            f"{as_size(level.free)} free{share}, largest free block {as_size(level.largest)}"
        )
    for replayed in sorted(found.replays[1:], key=lambda each: (each.failed, each.peak_reserved)):
        if (replayed.failed, replayed.peak_reserved) < (base.failed, base.peak_reserved):
            fails = f"; failures {base.failed} -> {replayed.failed}" if base.failed else ""
            yield (
                f"under {printable(replayed.settings.name)}: reserved peak {as_size(base.peak_reserved)} -> "
                f"{as_size(replayed.peak_reserved)}{fails}; set {printable(environment_line(replayed.settings))} "
                "(PYTORCH_CUDA_ALLOC_CONF where torch is older than 2.9)"
            )


# --- for programs -----------------------------------------------------------------------------------------------------------


def as_json(found: Study, answer: Answer | None) -> dict[str, Any]:
    """The same as plain values; sizes in bytes, times in nanoseconds."""
    worst = found.worst
    return {
        "source": found.source,
        "device": found.device,
        "what_if": found.what_if,
        "moment": found.moment,
        "settings": found.settings.text,
        "notes": list(found.notes),
        "device_free": found.device_free,
        "pools": [_part_json(part) for part in found.parts],
        "total": _part_json(total(found.parts)) if found.parts else None,
        "need": None if answer is None else asdict(answer),
        "worst": None if worst is None else _level_json(worst),
        "history": [_level_json(level) for level in found.history],
        "score": None if found.score is None else {**asdict(found.score), "peak_error": found.score.peak_error},
        "replays": [_replay_json(replayed) for replayed in found.replays],
    }


def _part_json(part: Part) -> dict[str, Any]:
    body = asdict(part)
    if part.large is None:
        for name in ("device", "pool", "large", "stream"):
            del body[name]
    return {**body, "free": part.free, "index": part.index}


def _level_json(level: Level) -> dict[str, Any]:
    return {**asdict(level), "stuck": level.stuck, "index": level.index}


def _replay_json(replayed: Replayed) -> dict[str, Any]:
    return {
        "settings": replayed.settings.text,
        "environment": environment_line(replayed.settings),
        "limit": replayed.limit,
        "reserved_peak": replayed.peak_reserved,
        "allocated_peak": replayed.peak_allocated,
        "stuck_peak": replayed.worst_stuck,
        "failed": replayed.failed,
        "retries": replayed.retries,
        "failures": [{"nbytes": failure.nbytes, **_level_json(failure.level)} for failure in replayed.failures],
    }
