"""Owns the rules of the formats that ``zprof export`` writes, as their documents state them: tests need none of the tools.

`tests/zprof/test_export.py` calls them. They read a file's bytes and assert; they know nothing of zprof.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from typing import Any

__all__ = ["check_exposition", "check_speedscope", "check_trace_events", "strict_json"]


def strict_json(body: bytes) -> Any:
    """The value of JSON as every reader takes it: UTF-8, no NaN, no key twice, no half of a surrogate pair."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in found}) == len(found), f"a key twice in {found[:5]}"
        return dict(found)

    value = json.loads(body.decode("utf-8"), parse_constant=refuse, object_pairs_hook=pairs)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def check_trace_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a trace of Chrome's "Trace Event Format" that Perfetto reads without an error."""
    whole = strict_json(body)
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    open_async: dict[tuple[Any, ...], float] = {}
    used: set[Any] = set()
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    series: dict[tuple[int, str], tuple[set[str], float]] = {}
    for event in events:
        kind, pid, tid = event["ph"], event["pid"], event["tid"]
        # Process and thread 0 are Linux's idle ones.
        assert kind in "MXCbei" and pid > 0 and tid > 0 and isinstance(event["name"], str)
        if kind == "M":
            (value,) = event["args"].values()
            assert value != "" and event["name"] in (
                "process_name", "thread_name", "process_sort_index", "thread_sort_index"
            )  # fmt: skip
            continue
        assert math.isfinite(event["ts"]) and event["ts"] >= 0
        if kind == "X":
            assert event["dur"] >= 0 and event["cat"]
            threads[pid, tid].append((round(event["ts"] * 1000), round((event["ts"]) * 1000) + round(event["dur"] * 1000)))
        elif kind == "C":
            names, last = series.setdefault((pid, event["name"]), (set(event["args"]), 0.0))
            assert names == set(event["args"]) and names and event["ts"] >= last
            assert all(type(value) in (int, float) and math.isfinite(value) for value in event["args"].values())
            series[pid, event["name"]] = (names, event["ts"])
        elif kind == "b":
            key = (pid, event["cat"], event["name"], event["id"])
            assert key not in used
            used.add(key)
            open_async[key] = event["ts"]
        elif kind == "e":
            assert open_async.pop((pid, event["cat"], event["name"], event["id"])) <= event["ts"]
        else:
            assert event["s"] in ("g", "p", "t")
    assert not open_async
    for spans in threads.values():
        check_nesting(spans)
    return list(events)


def check_nesting(spans: list[tuple[int, int]]) -> None:
    """Spans are in the order of begin, and each lies within those that are open when it begins."""
    stack: list[int] = []
    last = 0
    for begin, end in spans:
        assert begin >= last
        last = begin
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"{begin} to {end} crosses one that ends at {stack[-1]}"
        stack.append(end)


def check_speedscope(body: bytes) -> dict[str, Any]:
    """A file of speedscope's format, its frames closed in the order they opened."""
    whole = strict_json(body)
    assert whole["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert set(whole) <= {"$schema", "name", "exporter", "activeProfileIndex", "shared", "profiles"}
    frames = whole["shared"]["frames"]
    assert all(set(frame) == {"name"} and isinstance(frame["name"], str) for frame in frames)
    assert 0 <= whole["activeProfileIndex"] < len(whole["profiles"])
    for profile in whole["profiles"]:
        assert isinstance(profile["name"], str) and profile["unit"] in ("bytes", "nanoseconds")
        assert profile["endValue"] >= profile["startValue"]
        if profile["type"] == "sampled":
            samples, weights = profile["samples"], profile["weights"]
            assert len(samples) == len(weights) and all(weight >= 0 for weight in weights)
            assert sum(weights) == profile["endValue"] - profile["startValue"]
            assert all(0 <= frame < len(frames) for stack in samples for frame in stack)
            continue
        assert profile["type"] == "evented"
        stack: list[int] = []
        at = profile["startValue"]
        for event in profile["events"]:
            assert event["at"] >= at and 0 <= event["frame"] < len(frames)
            at = event["at"]
            if event["type"] == "O":
                stack.append(event["frame"])
            else:
                assert event["type"] == "C" and stack.pop() == event["frame"]
        assert not stack and at <= profile["endValue"]
    assert isinstance(whole, dict)
    return whole


#: Of client_golang's promlint, which promtool runs: units that are not base units, and abbreviations.
_NO_BASE = (
    r"(milli|micro|nano|kilo|kibi|mega|mebi|giga|gibi|tera|tebi)(seconds?|bytes?|joules?)|minutes?|hours?|days?|percents?|bits?"
)
_SHORT = "s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d"


def check_exposition(body: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples of Prometheus' text format as prometheus_client parses it, under the rules of ``promtool check metrics``."""
    from prometheus_client.parser import text_string_to_metric_families

    written = body.decode("utf-8")
    assert not written or written.endswith("\n")
    families = list(text_string_to_metric_families(written))
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in families:
        assert family.documentation and family.type in ("gauge", "counter") and family.samples, family
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            labels = tuple(sample.labels.items())
            assert sample.name == name and labels not in found.setdefault(name, {}) and math.isfinite(sample.value)
            assert sample.timestamp is None
            found[name][labels] = sample.value
        assert family.type == "counter" or not re.search(r"_(total|count|sum|bucket)$", name), name
        assert name == name.lower() and ":" not in name
        assert not re.search(rf"(^|_)({_NO_BASE})(_|$)|_({_SHORT})(_|$)|gauge|counter|histogram|summary", name), name
    assert len({family.name for family in families}) == len(families)
    return found
