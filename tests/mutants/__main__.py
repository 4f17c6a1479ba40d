"""The table of all calls that order streams, and what shows that one is missing: ``python -m tests.mutants [--accelerator]``.

A developer calls it, with parts of paths or functions to look at those alone.  It exits with 1 where one is not shown and no
reason is known, and where the control shows one.  With ``--accelerator`` values are compared there; else races are looked for
on the virtual device.
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
        return table(chosen, run.judge, run.UNSEEN)
    pools = {world: Pool(world, accelerator=True) for world in accelerated.RUN}
    try:
        return table(chosen, accelerated.Judge(pools.__getitem__).judge, accelerated.UNSEEN)
    finally:
        for pool in pools.values():
            pool.close()


def table(chosen: list[Site], judge: Callable[[Site], run.Verdict], known: dict[str, str]) -> int:
    """Print each verdict as it comes, and at the end those that none has shown."""
    shown, unknown = 0, False
    unseen, not_of_streams, repeated = list[str](), list[str](), list[str]()
    for verdict in map(judge, chosen):
        reason = known.get(verdict.site.key, "?")
        if verdict.control:
            unknown, how = True, f"SHOWN BY THE CONTROL: {verdict.control}"
        elif verdict.shown_by is not None:
            shown, how = shown + 1, f"{verdict.how} in {verdict.shown_by!r}"
        elif verdict.made and not verdict.tried:
            how = "waits for no stream"
            not_of_streams.append(f"{verdict.site}")
        elif verdict.tried and verdict.repeated:
            how = f"repeated: in {verdict.tried} workloads all of it is waited for again on the same stream"
            repeated.append(f"{verdict.site}")
        else:
            unknown |= verdict.site.key not in known
            how = f"NOT SHOWN by {verdict.tried} workloads: {reason}"
            unseen.append(f"{verdict.site}: {reason}")
        print(f"{verdict.site}\n    {how}", flush=True)
    of_streams = len(chosen) - len(not_of_streams) - len(repeated)
    print(f"\n{shown} of {of_streams} calls that order streams are shown ({shown / max(1, of_streams):.1%})")
    for title, lines in (
        ("not shown", unseen),
        ("not of streams: no workload has it wait for one", not_of_streams),
        ("repeated: who uses the values waits for the same again", repeated),
    ):
        print("\n    ".join([f"{len(lines)} {title}", *lines]))
    return int(unknown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
