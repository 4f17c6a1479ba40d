"""Runs a list of steps against the NVML sampler, in a process whose loader finds the fake library.

Read from standard input as JSON, answered on standard output as JSON, one answer a step: ``set`` slots, ``open`` the
sampler, ``sample`` it (after ``wait`` seconds, or ``until`` slots or readings are at least so much), tell its ``state``,
``get`` slots, ``close`` it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.fake_nvml import PLACES, Slots
from tests.support.waiting import soon
from zprof.nvml.sampling import NvmlSampler, open_nvml


def reached(slots: Slots, sampler: NvmlSampler | None, name: str, least: int) -> bool:
    if name in PLACES:
        return slots[name] >= least
    return sampler is not None and any(f"{key} {what}" == name and value >= least for what, key, value in sampler.sample())


def main() -> None:
    slots = Slots(Path(os.environ["FAKE_NVML"]))
    sampler: NvmlSampler | None = None
    answers: list[Any] = []
    for step in json.load(sys.stdin):
        answer: Any = None
        if "set" in step:
            slots.set(step["set"])
        if "wait" in step:
            time.sleep(step["wait"])
        if "until" in step:
            for name, least in step["until"].items():
                assert soon(partial(reached, slots, sampler, name, least)), f"{name}: never {least}"
        if "open" in step:
            sampler = open_nvml(**step["open"])
            answer = sampler.state()
        if "sample" in step:
            assert sampler is not None
            begin = time.perf_counter()
            readings = sampler.sample()
            answer = {f"{key} {what}": value for what, key, value in readings}
            answer["seconds"] = time.perf_counter() - begin
        if "state" in step:
            assert sampler is not None
            answer = sampler.state()
        if "get" in step:
            answer = {name: slots[name] for name in step["get"]}
        if "close" in step:
            assert sampler is not None
            sampler.close()
            answer = [thread.name for thread in threading.enumerate()]
        answers.append(answer)
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
