"""Owns the export to Chrome's trace event format, which Perfetto opens: levels and samples as counters, spans as slices.

`commands.export` calls `write`. It keeps the file to what a browser loads: curves are thinned with their peaks kept, and the
shortest spans of each verb are left out, which it says.

Note: [What Perfetto makes of it]
    Complete events ("X") of one thread must nest, in the order of time, or they are moved and marked as errors; so each track
    is a thread of its own number. Process and thread 0 are the idle ones of Linux: numbers begin at 1. Asynchronous events
    share a track by their name, so that is the verb alone. A counter is named by its event and its argument. Escapes such as
    \\u00e9 are shown as they are, so text is UTF-8. Microseconds have three decimals, which are whole nanoseconds.

Source: the "Trace Event Format" document of the Chromium project; src/trace_processor/importers/json of Perfetto.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from offload.text import as_duration, counted
from zprof.show.exports.exported import Read, Written, afford, full, lost, read, shifts, text, tracks, unit_of
from zprof.show.exports.perfetto_operators import OperatorLines
from zprof.trace.reader import Trace
from zprof.writing import committing

__all__ = ["write"]

#: Of all spans, of those that share no track, and of all counters: below 40 MB together.
_SPANS_NBYTES, _ASIDE_NBYTES, _COUNTERS_NBYTES = 24_000_000, 2_000_000, 10_000_000
#: Of operators and kernels, where they were recorded.
_OPERATORS_NBYTES = 48_000_000
#: Of a span, beside its names.
_SPAN_NBYTES = 135
_POINTS = 4_000
_MOST_FAILURES = 1_000
#: Thread numbers of one process, and the first of them that is of operators.
_THREADS, _FIRST_OPERATORS = 1_000, 500


def write(traces: Sequence[Trace], path: Path) -> Written:
    """Write JSON with one process a rank; times in microseconds since the first thing known of any rank."""
    reads = [read(trace, points=_POINTS) for trace in traces]
    kept = afford(reads, [_costs(one) for one in reads], _SPANS_NBYTES)
    aside = _ASIDE_NBYTES // len(reads)
    points = _points(reads)
    written, longest_ns, drawn, undrawn = 0, 0, 0, 0
    with committing(path) as file:
        file.write(b'{"displayTimeUnit":"ns","otherData":%s,"traceEvents":[\n' % _json(_about(traces[0])).encode())
        between = b""
        for one, mine, shift in zip(reads, kept, shifts(reads), strict=True):
            spans = _Spans(one, mine, shift, aside)
            parts = [_named(one, spans), spans.lines(), _failures(one, shift), _counters(one, shift, points)]
            if one.operators is not None:
                pid, most = _pid(one), _OPERATORS_NBYTES // len(reads)
                ran = OperatorLines(one.operators, pid, pid * _THREADS + _FIRST_OPERATORS, shift, most)
                parts += [_named_operators(one, ran), ran.lines()]
                drawn, undrawn = drawn + ran.written, undrawn + ran.left_out
            for lines in parts:
                for line in lines:
                    file.write(between + line.encode())
                    between = b",\n"
            written += int(spans.written.sum())
            longest_ns = max(longest_ns, one.unlisted_ns, int(one.table.duration_ns[~spans.written].max(initial=0)))
        file.write(b"\n]}\n")
    left = sum(one.count for one in reads) - written
    left_out = f" ({left:,} more, of at most {as_duration(longest_ns)} each, left out)" if left else ""
    beside = f", {counted(drawn, 'event')} of operators" if drawn else ""
    beside += f" ({undrawn:,} of the shortest left out)" if undrawn else ""
    said = f"{counted(written, 'span')}{left_out}{beside}; open it at https://ui.perfetto.dev"
    return Written(said, [line for one in reads for line in lost(one.trace, one.ledger.damage)])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _us(time_ns: int) -> str:
    """Microseconds to the nanosecond, which a float would round."""
    return f"{time_ns // 1000}.{time_ns % 1000:03}"


def _about(trace: Trace) -> dict[str, Any]:
    versions = {text(name[:80]): text(version[:80]) for name, version in list(trace.header.versions.items())[:50]}
    command = text(" ".join(trace.header.argv)[:1000])
    return {"exporter": f"zprof {metadata.version('zhooks')}", "command": command, "versions": versions}


def _costs(one: Read) -> Any:
    """Bytes that each span's line takes at most."""
    strings, table = one.trace.strings, one.table
    lengths = np.zeros(len(strings), np.int64)
    for used in np.union1d(table.what, table.key).tolist():
        lengths[used] = len(_json(text(strings[used])).encode())
    return _SPAN_NBYTES + 2 * lengths[table.what] + lengths[table.key]


class _Spans:
    """The spans of one rank, on their tracks.

    Attributes:
        tracks: those that hold anything.
        written: of each span of the table, whether `lines` has given it.
    """

    def __init__(self, one: Read, kept: Any, shift: int, aside_nbytes: int) -> None:
        self.written = np.zeros(len(kept), np.bool_)
        self._one, self._shift, self._aside_nbytes = one, shift, aside_nbytes
        self._names: dict[tuple[int, int], str] = {}
        self.tracks, self._aside = tracks(one.table, np.flatnonzero(kept), one.lanes)

    def lines(self) -> Iterator[str]:
        """Each span's event; two for those that found no track."""
        pid = _pid(self._one)
        for number, track in enumerate(self.tracks, 1):
            place = f'"pid":{pid},"tid":{pid * _THREADS + number}'
            for span in track.places:
                begin, end = self._bounds(span)
                self.written[span] = True
                times = f'"ts":{_us(begin + self._shift)},"dur":{_us(end - begin)}'
                yield f'{{"ph":"X",{self._name(span)},{place},{times},{self._args(span)}}}'
        left = self._aside_nbytes
        for span in self._aside:
            begin, end = self._bounds(span)
            verb = self._one.table.strings[int(self._one.table.what[span])]
            name = f'"name":{_json(text(verb))},"cat":{_json(text(verb))},"pid":{pid},"tid":{pid * _THREADS + 1}'
            events = f'{name},"id":"{pid}.{span}","ts":'
            args = self._args(span, key=True)
            left -= 2 * len(events.encode()) + len(args.encode()) + 40
            if left < 0:
                return
            self.written[span] = True
            yield f'{{"ph":"b",{events}{_us(begin + self._shift)},{args}}}'
            yield f'{{"ph":"e",{events}{_us(end + self._shift)}}}'

    def _bounds(self, span: int) -> tuple[int, int]:
        return int(self._one.table.begin_ns[span]), int(self._one.table.end_ns[span])

    def _name(self, span: int) -> str:
        table = self._one.table
        pair = int(table.what[span]), int(table.key[span])
        if pair not in self._names:
            verb, key = (table.strings[number] for number in pair)
            self._names[pair] = f'"name":{_json(full(verb, key))},"cat":{_json(text(verb))}'
        return self._names[pair]

    def _args(self, span: int, *, key: bool = False) -> str:
        table = self._one.table
        args: dict[str, object] = {"bytes": int(table.nbytes[span])} if table.nbytes[span] else {}
        if key:
            args["key"] = text(table.strings[int(table.key[span])])
        if self._one.unfinished[span]:
            args["unfinished"] = True
        return f'"args":{_json(args)}'


def _pid(one: Read) -> int:
    return one.trace.header.rank + 1


def _event(one: Read, phase: str, name: str, args: dict[str, Any], **more: Any) -> str:
    pid = _pid(one)
    return _json({"ph": phase, "name": text(name), "pid": pid, "tid": pid * _THREADS + 1, **more, "args": args})


def _named(one: Read, spans: _Spans) -> Iterator[str]:
    pid, header = _pid(one), one.trace.header
    yield _event(one, "M", "process_name", {"name": text(f"rank {header.rank} ({header.host}, {header.device})")})
    yield _event(one, "M", "process_sort_index", {"sort_index": header.rank})
    for number, track in enumerate(spans.tracks, 1):
        yield _event(one, "M", "thread_name", {"name": text(track.name)}, tid=pid * _THREADS + number)
        yield _event(one, "M", "thread_sort_index", {"sort_index": number}, tid=pid * _THREADS + number)


def _named_operators(one: Read, ran: OperatorLines) -> Iterator[str]:
    for tid, name in ran.tracks:
        yield _event(one, "M", "thread_name", {"name": text(name)}, tid=tid)
        yield _event(one, "M", "thread_sort_index", {"sort_index": tid % _THREADS}, tid=tid)


def _failures(one: Read, shift: int) -> Iterator[str]:
    columns = (one.failures.key, one.failures.time_ns, one.failures.nbytes)
    for key, at, nbytes in list(zip(*(column.tolist() for column in columns), strict=True))[:_MOST_FAILURES]:
        args = {"bytes": nbytes, "key": text(one.trace.strings[key])}
        yield _event(one, "i", "out of memory", args, s="p", ts=(at + shift) / 1e3)


def _sampled(one: Read) -> list[tuple[str, str]]:
    """What was sampled, and of what: ("nvml power", "gpu0")."""
    return [(what, key) for what in one.ledger.sampled() for key in one.ledger.samples(what, 1)]


def _points(reads: Sequence[Read]) -> tuple[int, int]:
    """How many points every curve gets, and how many sampled quantities of a rank are written, so that all fit."""
    most = _COUNTERS_NBYTES // len(reads)
    costs = [sum(500 for _ in one.ledger.tiers) + 1 for one in reads]
    names = [[120 + len(_json(text(f"{what} {key}")).encode()) for what, key in _sampled(one)] for one in reads]
    series = max(map(len, names))
    while series and 2 * max(cost + sum(mine[:series]) for cost, mine in zip(costs, names, strict=True)) > most:
        series //= 2
    worst = max(cost + sum(mine[:series]) for cost, mine in zip(costs, names, strict=True))
    return min(_POINTS, most // worst), series


def _counters(one: Read, shift: int, points: tuple[int, int]) -> Iterator[str]:
    covered = one.covered
    for tier in one.ledger.tiers:
        curves = one.ledger.curves("category", tier, points[0])
        names = list(curves.levels)
        whole = "recorded" if covered.tier(tier) else "total"
        for at, *values in zip(curves.time_ns.tolist(), *(curves.levels[name].tolist() for name in names), strict=True):
            yield _event(one, "C", f"{tier} bytes", dict(zip(names, values, strict=True)), ts=(at + shift) / 1e3)
            # Perfetto draws each category by itself and adds nothing up.
            yield _event(one, "C", f"{tier} {whole}", {"bytes": sum(values)}, ts=(at + shift) / 1e3)
    for what, key in _sampled(one)[: points[1]]:
        times, sampled = one.ledger.samples(what, points[0])[key]
        for at, value in zip(times.tolist(), sampled.tolist(), strict=True):
            yield _event(one, "C", full(what, key), {unit_of(what): value}, ts=(at + shift) / 1e3)
