"""Owns what a report says of data loaders: plain values for programs, and the lines drawn from them.

`findings` and `text` call it. It finds out nothing; `zprof.analysis.loading` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.text import as_duration
from zprof.analysis.loading import Loading

__all__ = ["loading_body", "loading_line", "loading_rows"]

Body = dict[str, Any]


def loading_body(found: Loading) -> Body:
    """The values."""
    return {
        "ms_per_step": found.wait_ns / 1e6,
        "percent": 100 * found.share,
        "cores": found.cores,
        "busy": found.busy,
        "queued": found.queued,
        "loaders": [
            {
                "name": loader.name,
                "workers": loader.workers,
                "batch": loader.batch,
                "prefetch": loader.prefetch,
                "persistent": loader.persistent,
                "pinned": loader.pinned,
                "ms_per_step": loader.wait_ns / 1e6,
                "first_ms_per_step": loader.first_ns / 1e6,
                "starting_ms_per_step": loader.starting_ns / 1e6,
                "epochs": loader.epochs,
            }
            for loader in found.loaders
        ],
        "advice": list(found.advice),
    }


def loading_line(found: Mapping[str, Any]) -> str:
    """How long in all."""
    return f"waited for data {as_duration(found['ms_per_step'] * 1e6)} per step, {found['percent']:.0f}% of it"


def loading_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each loader: name, workers, a step, and of that for the first batch of an epoch and for starting workers."""
    for loader in found["loaders"]:
        workers = "-" if loader["workers"] is None else str(loader["workers"])
        parts = ("ms_per_step", "first_ms_per_step", "starting_ms_per_step")
        yield loader["name"], workers, *(as_duration(loader[part] * 1e6) if loader[part] else "-" for part in parts)
