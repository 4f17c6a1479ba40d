"""The table of all calls that order streams, and what shows that one is missing: ``python -m tests.mutants [--accelerator]``.

A developer calls it, with parts of paths or functions to look at those alone.  It exits with 1 where one is not shown and no
reason is known.  With ``--accelerator`` values are compared on it; else races are looked for on the virtual device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.mutants import accelerated, run
from tests.mutants.sites import Site, sites
from tests.support.ranks import Pool


def main(words: list[str]) -> int:
    on_accelerator = "--accelerator" in words
    parts = [word for word in words if word != "--accelerator"]
    chosen = [site for site in sites(on_accelerator=on_accelerator) if not parts or any(part in str(site) for part in parts)]
    if not on_accelerator:
        return table(chosen, run.judge, run.UNSEEN, {})
    pools = {world: Pool(world, accelerator=True) for world in accelerated.RUN}
    try:
        return table(chosen, accelerated.Judge(pools.__getitem__).judge, accelerated.UNSEEN, accelerated.NOT_OF_STREAMS)
    finally:
        for pool in pools.values():
            pool.close()


def table(
    chosen: list[Site], judge: Callable[[Site], run.Verdict], known: dict[str, str], not_of_streams: dict[str, str]
) -> int:
    shown, unknown = 0, False
    for verdict in map(judge, chosen):
        shown += verdict.shown_by is not None
        unknown |= verdict.control != "" and verdict.site.key not in not_of_streams
        unknown |= verdict.shown_by is None and verdict.site.key not in known
        why = known.get(verdict.site.key, "?")
        how = f"{verdict.how} in {verdict.shown_by!r}" if verdict.shown_by else f"NOT SHOWN by {verdict.tried} workloads: {why}"
        print(f"{verdict.site}\n    {how}{verdict.control and f'; eager, too: {verdict.control}'}", flush=True)
    print(f"{shown} of {len(chosen)} shown ({shown / len(chosen):.1%})")
    return int(unknown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
