"""The table of all calls that order streams, and what shows that one is missing: ``python -m tests.mutants``.

A developer calls it, with parts of paths or functions to look at those alone.  It exits with 1 where one is not shown and no
reason is known.
"""

from __future__ import annotations

import sys

from tests.mutants.run import UNSEEN, judge
from tests.mutants.sites import sites


def main() -> int:
    chosen = [site for site in sites() if not sys.argv[1:] or any(part in str(site) for part in sys.argv[1:])]
    shown, unknown = 0, False
    for verdict in map(judge, chosen):
        shown += verdict.shown_by is not None
        unknown |= verdict.shown_by is None and verdict.site.key not in UNSEEN
        why = UNSEEN.get(verdict.site.key, "?")
        how = f"{verdict.how} in {verdict.shown_by!r}" if verdict.shown_by else f"NOT SHOWN by {verdict.tried} workloads: {why}"
        print(f"{verdict.site}\n    {how}", flush=True)
    print(f"{shown} of {len(chosen)} shown ({shown / len(chosen):.1%})")
    return int(unknown)


if __name__ == "__main__":
    sys.exit(main())
