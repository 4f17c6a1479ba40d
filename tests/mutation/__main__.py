"""The share of small changes to a package that its tests find: ``python -m tests.mutation [PACKAGE ...]``.

A developer calls it, or ``make mutation``; it takes many minutes.  It exits with 1 where a change that it tries is not
found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.mutation.changes import Change, sample, sites
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.packages import PACKAGES
from tests.mutation.reach import Reach
from tests.mutation.run import Copy, Verdict

_copies: dict[Path, Copy] = {}


def _judge(change: Change, measured: Path, reach: Reach) -> Verdict:
    """In a worker, which has a copy of its own for a package."""
    if measured not in _copies:
        _copies[measured] = Copy(Path(tempfile.mkdtemp(dir=measured.parent)), measured)
    return _copies[measured].judge(change, reach)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("package", nargs="*", choices=[*PACKAGES, []], help="all where none is named")
    parser.add_argument("--sample", type=int, help="as many changes of each package, by chance; otherwise all")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--jobs", type=int, default=2, help="changes tried at a time (2)")
    parser.add_argument("--only", default="", help="changes of the sample whose text holds this")
    parser.add_argument("--known", action="store_true", help="try changes that are known to change nothing, too")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests in place of the package's")
    given = parser.parse_args()
    escaped = False
    with tempfile.TemporaryDirectory(prefix="mutation-") as root:
        for name in given.package or PACKAGES:
            places = sites(PACKAGES[name].paths)
            chosen = [change for change in sample(places, given.sample, given.seed) if given.only in str(change)]
            print(f"{name}: {len(chosen)} changes at {len(places)} places, seed {given.seed}", flush=True)
            measured = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
            reach = Copy(measured).measure(PACKAGES[name].paths, given.tests or PACKAGES[name].tests)
            seconds = sum(ran.seconds for ran in reach.ran)
            print(f"{name}: {len(reach.ran)} tests, {seconds:.0f} s where nothing is changed", flush=True)
            same = [] if given.known else [change for change in chosen if change.key in EQUIVALENT]
            for change in same:
                print(f"{change}\n    not tried: {EQUIVALENT[change.key]}", flush=True)
            tried = [change for change in chosen if change not in same]
            missed = 0
            with ProcessPoolExecutor(given.jobs, get_context("fork")) as workers:
                for verdict in workers.map(partial(_judge, measured=measured, reach=reach), tried):
                    missed += verdict.found_by is None
                    print(f"{verdict.change}\n    {verdict.found_by or f'NOT FOUND by {verdict.tried} tests'}", flush=True)
            found = len(tried) - missed
            share = found / max(1, len(tried))
            print(f"{name}: {found} of {len(tried)} found ({share:.1%}), {len(same)} change nothing", flush=True)
            escaped |= missed > 0
    return int(escaped)


if __name__ == "__main__":
    sys.exit(main())
