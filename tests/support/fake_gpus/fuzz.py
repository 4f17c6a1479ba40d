"""Asks the sampler for as many mutated answers as it is told: ``python -m tests.support.fake_gpus.fuzz COUNT SEED``.

Each case changes some return codes and values of the fake library that the environment names, opens, samples and closes. What
is sampled must be in its bounds, or be missing for a reason of one line; anything else ends with an error that names the case.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import threading
from pathlib import Path

from tests.support.fake_gpus import KINDS
from tests.support.fake_nvml import Slots
from tests.support.fake_nvml.fuzz import STATES, VALUES, one_line
from zprof.gpu import library
from zprof.gpu.sampling import GpuSampler, open_gpus
from zprof.gpu.vendors import BOUNDS, quantity_of

CODES = [*range(60), 0x10, 0x70000001, 0x70000006, 0x70010000, 0x70020000, 0x78000001, 0x78000003, 0x7FFFFFFE, -1, 2**31 - 1]
SMALL = {"count": 4, "text": 5, "tiles": 4, "npu": 2, "only_tiles": 2, "no_levels": 2, "bandwidth": 2, "nan": 2}
#: Bounds of waiting and of pointers the library itself follows.
LEFT = ("block_us",)


def mutate(slots: Slots, chance: random.Random) -> None:
    names = [name for name in slots.defaults if name not in (*slots.counts, *LEFT)]
    for name in chance.sample(names, chance.choice([1, 1, 2, 3, 6])):
        if name.startswith("ret_"):
            slots[name] = chance.choice(CODES)
        elif name in SMALL:
            slots[name] = chance.randrange(SMALL[name])
        else:
            value = chance.choice([chance.choice(VALUES), chance.randrange(2**32), chance.randrange(2**62)])
            slots[name] = chance.choice([value, value, -value])


def check(sampler: GpuSampler, last: dict[tuple[str, str], int]) -> int:
    readings = sampler.sample()
    for what, key, value in readings:
        bounds = BOUNDS.get(quantity_of(what))
        least, most = (0, 2**63 - 1) if bounds is None else (bounds.least, bounds.most)
        assert type(value) is int and least <= value <= most, (what, key, value)
        if what.endswith((" energy", " tx", " rx")):
            assert value >= last.get((what, key), 0), (what, key, value)
            last[what, key] = value
    assert len({(what, key) for what, key, _ in readings}) == len(readings)
    state = sampler.state()
    json.dumps(state)
    assert state["state"] in STATES and one_line(state["why"]) and bool(state["why"]) == (state["state"] != "ok"), state
    for told in ("notes", "dropped", "sources"):
        lines = state[told]
        assert isinstance(lines, (list, dict))
        assert all(one_line(line) and line for line in (lines.values() if isinstance(lines, dict) else lines)), state
    devices = state["devices"]
    assert isinstance(devices, list) and all(one_line(device["name"]) for device in devices), state
    return len(readings)


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    library.DRM = Path(os.environ["FAKE_DRM"])
    # A first rate waits this long for the counter to move; the fake's moves at each reading.
    library._MOMENT_S = 0.0
    kind = next(kind for kind in KINDS if kind.variable in os.environ)
    slots = kind(Path(os.environ[kind.variable]))
    states: collections.Counter[str] = collections.Counter()
    readings = 0
    for case in range(count):
        chance = random.Random(f"{seed}:{case}")
        slots.reset()
        slots["count"] = chance.choice([1, 1, 2])
        if chance.random() < 0.8:
            mutate(slots, chance)
        try:
            sampler = open_gpus(everything=True)
            states[str(sampler.state()["state"])] += 1
            last: dict[tuple[str, str], int] = {}
            for _ in range(chance.choice([1, 2, 5])):
                readings += check(sampler, last)
                mutate(slots, chance)
            sampler.close()
            assert sampler.sample() == () and threading.active_count() == 1
        except BaseException:
            sys.stderr.write(f"case {case} of seed {seed}\n")
            raise
    sys.stdout.write(json.dumps({"cases": count, "readings": readings, "states": states}))


if __name__ == "__main__":
    main()
