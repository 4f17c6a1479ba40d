"""Faults by hand: ``python -m tests.faults --seed 1 --count 50`` runs so many, and says of each what became of it.

``--only WORDS`` runs those whose setting or fault says so.  It exits with 1 where the invariant did not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from tests.faults.harness import SETTINGS, Undisturbed, check, faults
from tests.faults.program import Setting


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rng, bases, how = random.Random(given.seed), dict[Setting, Undisturbed](), Counter[str]()
    bad, slowest = 0, {"kill": 0.0, "stop": 0.0}
    for number in range(given.count):
        setting = rng.choice(SETTINGS)
        base = bases[setting] = bases.get(setting) or Undisturbed.of(setting)
        fault = next(faults(base, rng))
        if given.only not in f"{setting} {fault}":
            continue
        checked = check(base, fault)
        how[f"{fault.kind}: {checked.how}"] += 1
        if fault.kind in slowest:
            slowest[fault.kind] = max(slowest[fault.kind], checked.heard_s)
        bad += bool(checked.problem)
        place = f"{setting.world} ranks, {setting.transport}, stage {setting.stage}, {setting.tier}"
        print(f"{number:4} {place}: {fault.kind} rank {fault.rank} at {fault.event} ({fault.nth}): {checked.how}", flush=True)
        if checked.problem:
            print(f"     BAD {fault}: {checked.problem}", flush=True)
    print("\n".join(f"{count:5}  {what}" for what, count in sorted(how.items())))
    print(f"{sum(how.values())} faults, {bad} against the invariant; heard after at most {slowest['kill']:.1f} s (kill), "
          f"{slowest['stop']:.1f} s (stop)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
