"""The tables of README.md and docs/explanation/benchmarks.md, made from the kept results, so that none is typed by hand.

    python benchmarks/tables.py            # write them
    python benchmarks/tables.py --check    # say which differ; exit code 1

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. A test runs the check. It never measures.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results
from launch import HERE

PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "explanation" / "benchmarks.md")
MARKED = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

#: Drivers of `peers.py` as people call them, in the order of rows.
NAMES = {
    "ddp": "DDP",
    "zero1": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2-noreshard": "FSDP2, `reshard_after_forward=False`",
    "deepspeed-1": "DeepSpeed ZeRO-1",
    "deepspeed-2": "DeepSpeed ZeRO-2",
    "deepspeed-3": "DeepSpeed ZeRO-3",
    "zhooks-0": "zhooks stage 0",
    "zhooks-1": "zhooks stage 1",
    "zhooks-2": "zhooks stage 2",
    "zhooks-3": "zhooks stage 3",
    "zhooks-3-stock": "zhooks stage 3, Gloo's own collectives",
}
COLUMNS = (("step_ratio", "step"), ("rss_ratio", "memory"))


def peers(dtype: str) -> str:
    """Step time and memory of every driver as ratios to FSDP2's, a column a model."""
    groups = [group for group in results.load("peers")["summary"] if group["dtype"] == dtype]
    rows = {group["config"]: {row["driver"]: row for row in group["rows"]} for group in groups}
    heads = [f"{config}: {word}" for config in rows for _, word in COLUMNS]
    lines = [_row([f"{dtype}, x FSDP2", *heads]), _row(["---"] * (1 + len(heads)))]
    for driver, name in NAMES.items():
        cells = [_ratio(rows[config].get(driver), key) for config in rows for key, _ in COLUMNS]
        if any(cells):
            lines.append(_row([name, *cells]))
    return "\n".join(lines) + "\n\n" + source("peers")


def source(name: str) -> str:
    """Where a table comes from, in words."""
    about = results.load(name)["about"]
    machine, versions = about["machine"], about["versions"]
    software = ", ".join(f"{key} {value}" for key, value in versions.items() if key in ("torch", "deepspeed"))
    where = f"{machine['cores']} cores of {machine['processor']}, Python {about['python']}, {software}"
    return f"`{about['command']}` at commit {about['commit']}, {about['date']}, on {where}.\n"


def _ratio(row: dict[str, Any] | None, key: str) -> str:
    return f"{row[key]['median']:.2f}" if row is not None and row[key] is not None else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[], str]] = {"peers-fp32": lambda: peers("fp32"), "peers-bf16": lambda: peers("bf16")}


def with_tables(text: str) -> str:
    """A page's text with each marked table as the results make it."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}{found[3]}", text)


def main(pages: Sequence[Path], *, check: bool) -> int:
    """Write the tables of ``pages``, or say which are not as they would be written; the exit code."""
    stale = [page for page in pages if with_tables(page.read_text()) != page.read_text()]
    for page in stale:
        if check:
            print(f"{page.name}: a table differs from benchmarks/results; run python benchmarks/tables.py", file=sys.stderr)
        else:
            page.write_text(with_tables(page.read_text()))
            print(f"Wrote {page.name}.")
    return int(check and bool(stale))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the tables of the pages from the kept results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where a table differs")
    sys.exit(main(PAGES, check=parser.parse_args().check))
