"""The share of small changes to a package that its tests find: ``python -m tests.mutation [PACKAGE ...]``.

A developer calls it, or ``make mutation``; it takes many minutes.  It exits with 1 where a change is not found and is not
known to change nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.mutation.changes import Change, sample, sites
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.packages import PACKAGES
from tests.mutation.run import Copy, Verdict

_copies: dict[str, Copy] = {}


def _judge(name: str, change: Change) -> Verdict:
    """In a worker, which has one copy of the checkout for a package."""
    tests = PACKAGES[name].tests
    if name not in _copies:
        copy = Copy(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root)))
        copy.measure(tests)
        _copies[name] = copy
    return _copies[name].judge(change, tests)


def _begin(root: str) -> None:
    global _root
    _root = root


_root = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("package", nargs="*", choices=[*PACKAGES, []], help="all where none is named")
    parser.add_argument("--sample", type=int, help="as many changes of each package, by chance; otherwise all")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--jobs", type=int, default=2, help="changes tried at a time (2)")
    parser.add_argument("--only", default="", help="changes of the sample whose text holds this")
    given = parser.parse_args()
    unknown = False
    with tempfile.TemporaryDirectory(prefix="mutation-") as root:
        for name in given.package or PACKAGES:
            places = sites(PACKAGES[name].paths)
            chosen = [change for change in sample(places, given.sample, given.seed) if given.only in str(change)]
            print(f"{name}: {len(chosen)} changes at {len(places)} places, seed {given.seed}", flush=True)
            missed, same = 0, 0
            with ProcessPoolExecutor(given.jobs, get_context("fork"), _begin, (root,)) as workers:
                for verdict in workers.map(_judge, [name] * len(chosen), chosen):
                    known = EQUIVALENT.get(verdict.change.key)
                    same += known is not None
                    missed += verdict.found_by is None and known is None
                    why = verdict.found_by or ("NOT FOUND" if known is None else f"not found: {known}")
                    print(f"{verdict.change}\n    {why}", flush=True)
            counted = len(chosen) - same
            found = counted - missed
            print(f"{name}: {found} of {counted} found ({found / max(1, counted):.1%}), {same} change nothing", flush=True)
            unknown |= missed > 0
    return int(unknown)


if __name__ == "__main__":
    sys.exit(main())
