"""Asks the NVML sampler for as many mutated answers as it is told: ``python -m tests.support.fake_nvml.fuzz COUNT SEED``.

Each case changes some return codes and values at random, opens, samples and closes. What is sampled must be what the library
answered, in its bounds, or be missing for a reason of one line; anything else ends with an error that names the case.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import threading
from pathlib import Path

from tests.support.fake_nvml import COUNTS, DEFAULTS, Slots
from zprof.gpu.sampling import GpuSampler, open_gpus

CODES = [*range(31), 999, -1, 77, 2**31 - 1, -(2**31)]
VALUES = [0, 1, 2, 3, 7, 50, 100, 101, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**50, 2**62, 2**63 - 1]
SMALL = {"block_us": 200, "stamp_step": 2**62, "text": 5, "lost": 3, "unreachable": 3, "mig": 2, "mig_gpu": 3, "nan": 1}
STEERED = [name for name in DEFAULTS if name not in COUNTS]
STATES = {"ok", "absent", "no driver", "no permission", "mismatch", "no devices", "lost", "failed"}
VISIBLE = [None, "", "0", "1,0", "3", "-1", "GPU-0", "GPU-00000001", "MIG-0000", "MIG-GPU-00000000/7/0", "0,,1"]
VISIBLE += ["x\n\x1b[0m", "9" * 40]
#: What a reading may be, from what the library held: slots, each in 32 or 64 bits without a sign.
SOURCES = {
    "nvml utilisation": (("utilisation", 32),),
    "nvml power": (("power_now", 32), ("power", 32)),
    "nvml temperature": (("temperature", 32),),
    "nvml sm clock": (("sm_clock", 32),),
    "nvml memory clock": (("memory_clock", 32),),
    "nvml throttle": (("reasons", 64),),
}


def mutate(slots: Slots, chance: random.Random) -> None:
    for name in chance.sample(STEERED, chance.choice([1, 1, 2, 3, 6])):
        if name.startswith("ret_"):
            slots[name] = chance.choice(CODES)
        elif name in SMALL:
            slots[name] = chance.randrange(SMALL[name] + 1)
        elif name.endswith("_type"):
            slots[name] = chance.choice([*range(8), 2**31])
        else:
            value = chance.choice([chance.choice(VALUES), chance.randrange(2**32), chance.randrange(2**63)])
            slots[name] = chance.choice([value, value, -value])


def one_line(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and len(text) < 1000


def check_state(sampler: GpuSampler) -> str:
    state = sampler.state()
    json.dumps(state)
    assert state["state"] in STATES, state
    assert one_line(state["why"]) and bool(state["why"]) == (state["state"] != "ok"), state
    assert one_line(state["driver"]), state
    for told in ("notes", "dropped", "sources"):
        lines = state[told]
        assert isinstance(lines, (list, dict))
        assert all(one_line(line) and line for line in (lines.values() if isinstance(lines, dict) else lines)), state
    devices = state["devices"]
    assert isinstance(devices, list) and len(devices) <= 64 * 17
    assert all(one_line(device["name"]) and one_line(device["uuid"]) for device in devices), state
    return str(state["state"])


def check_sample(sampler: GpuSampler, slots: Slots, last: dict[tuple[str, str], int]) -> int:
    readings = sampler.sample()
    for what, key, value in readings:
        assert type(value) is int and -50 <= value < 2**63, (what, key, value)
        if what in SOURCES:
            held = {slots[name] % 2**bits for name, bits in SOURCES[what]}
            signed = {number - 2**32 for number in held} if what == "nvml temperature" else set()
            assert value in held | signed, (what, key, value, held)
        elif what == "nvml memory used":
            assert value <= slots["memory_total"] % 2**64 < 2**51, (key, value)
        else:
            assert value >= last.get((what, key), 0), (what, key, value)
            last[what, key] = value
    assert len({(what, key) for what, key, _ in readings}) == len(readings)
    return len(readings)


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    slots = Slots(Path(os.environ["FAKE_NVML"]))
    states: collections.Counter[str] = collections.Counter()
    readings = 0
    for case in range(count):
        chance = random.Random(f"{seed}:{case}")
        slots.reset()
        slots.set({"count": chance.choice([1, 1, 2]), "block_us": 50})
        if chance.random() < 0.8:
            mutate(slots, chance)
        visible = chance.choice(VISIBLE)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        try:
            sampler = open_gpus(everything=chance.random() < 0.6)
            states[check_state(sampler)] += 1
            last: dict[tuple[str, str], int] = {}
            for _ in range(chance.choice([1, 2, 5])):
                readings += check_sample(sampler, slots, last)
                mutate(slots, chance)
            check_state(sampler)
            sampler.close()
            assert sampler.sample() == () and threading.active_count() == 1
        except BaseException:
            sys.stderr.write(f"case {case} of seed {seed}, CUDA_VISIBLE_DEVICES={visible!r}\n")
            raise
    assert slots["inits"] >= slots["shutdowns"] and slots["gpm_held"] == 0, (slots["inits"], slots["gpm_held"])
    sys.stdout.write(json.dumps({"cases": count, "readings": readings, "states": states}))


if __name__ == "__main__":
    main()
