"""Owns what `zprof report` advises to do next: a few commands, each for a reason that the report shows.

`zprof.show.report.findings` calls it with what it found. It reads no trace and runs nothing.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.text import counted
from zprof.analysis.outliers import MANY
from zprof.recording.children import PYTHON
from zprof.trace.children import reported_together
from zprof.trace.families import family_of, newest

__all__ = ["following", "named"]

MOST = 4
#: So many files are named one by one.
_FEW = 4
#: A remainder above this share of what was said is worth a finer recording.
LARGE = 0.1


def following(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """At most `MOST` of {"do", "why"}, the most useful first."""
    return [{"do": do, "why": why} for do, why in _all(report)][:MOST]


def _all(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    run, files = report["runs"][0], named(report)
    ranks = report["ranks"]
    folder = Path(run["file"]).parent
    family = newest(folder) if ranks and ranks["missing"] else None
    if family is not None and {Path(each["file"]) for each in report["runs"]} < set(family.paths):
        yield f"zprof report {shlex.quote(str(folder))}", "more ranks are in this folder; together they show who is late"
    if run["recorded_children"]:
        children = [(child["file"], child["rank"], child["world"]) for child in run["recorded_children"]]
        why = f"child processes that trained and were recorded: {counted(len(children), 'process')}"
        yield f"zprof report {reported_together(children)}", why
    elif not run["steps"]["count"] and any(kind["name"] == PYTHON for kind in (run["children"] or {"kinds": ()})["kinds"]):
        script = " ".join(map(shlex.quote, run["argv"])) or "SCRIPT"
        why = "it took no optimizer step itself; this way its Python child processes that train get traces of their own"
        yield f"zprof run --children record {script}", why
    large = [line for line in run["reconciliation"] if line["said_bytes"] > 0 and line["bytes"] > LARGE * line["said_bytes"]]
    if run["simulated"]:
        why = "compares the prediction with a run by zprof run --level alloc"
        yield f"zprof diff {shlex.quote(run['file'])} run.zprof", why
    if run["level"] == "events" and any("unexplained" in line["name"] for line in large):
        yield _recorded_again(report), "much of the memory is not explained; this level sees every storage"
    if any(line["name"].startswith("reserved") for line in large):
        yield f"zprof frag {shlex.quote(run['file'])}", "much of what the allocator reserved is not in use"
    if len(report["runs"]) > MANY and ranks["outliers"]:
        pair = " ".join(f"--rank {rank}" for rank in _farthest_and_nearest(ranks))
        yield f"zprof timeline {files} {pair}", "draws the rank that stands out most next to the one nearest to the median"
    if run["waits"]:
        yield f"zprof timeline {files}", "shows each wait next to the compute it delays"
    if run["rates"] and not run["simulated"] and not any(rate["bench_bytes_per_s"] for rate in run["rates"]):
        yield "zprof bench", "measures what this machine can do, for the bandwidths to compare with"
    if run["tiers"]:
        yield f"zprof flamegraph {shlex.quote(run['file'])}", "shows the bytes at the peak by module tree"
    if not run["waits"]:
        yield f"zprof timeline {files}", "shows memory over time"


def _recorded_again(report: Mapping[str, Any]) -> str:
    """The same script, on as many ranks as it had on this host, into files beside the old ones."""
    run = report["runs"][0]
    command = "zprof run"
    if run["world"] > 1:
        hosts = {each["host"] for each in report["runs"]}
        ranks = report["ranks"]
        count = "..." if len(hosts) > 1 or (ranks and ranks["missing"]) else f"--nproc_per_node {run['world']}"
        command = f"torchrun {count} -m zprof run"
    script = " ".join(map(shlex.quote, run["argv"])) or "SCRIPT"
    return f"{command} -o alloc.{{rank}}.zprof --level alloc {script}"


def _farthest_and_nearest(ranks: Mapping[str, Any]) -> tuple[int, int]:
    scores = ranks["scores"]
    return ranks["outliers"][0]["rank"], int(min(scores, key=lambda rank: (scores[rank], int(rank))))


def named(report: Mapping[str, Any]) -> str:
    """What names just these files: where they are many their folder, if it has no newer run, or a pattern for a shell."""
    files = [run["file"] for run in report["runs"]]
    paths = {*map(Path, files), *(Path(each["file"]) for each in report["unreadable"])}
    folders = {path.parent for path in paths}
    if len(files) <= _FEW or len(folders) > 1:
        return shlex.join(files)
    (folder,) = folders
    family = newest(folder)
    if family is not None and set(family.paths) == paths:
        return shlex.quote(str(folder))
    name = family_of(Path(files[0]))
    if name and set(folder.glob(f"{glob.escape(name)}.*.zprof")) == paths:
        return f"{shlex.quote(str(folder / name))}.*.zprof"
    return shlex.join(files)
