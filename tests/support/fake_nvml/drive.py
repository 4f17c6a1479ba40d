"""Runs a list of steps against the sampler of GPUs, in a process whose loader finds a fake library.

Read from standard input as JSON, answered on standard output as JSON, one answer a step: ``set`` slots, ``open`` the
sampler (those opened before stay, ``use`` goes back to one by its number), ``environ`` variables (null unsets one), ``cuda`` or
``xpu`` begins to run in a torch whose devices have these UUIDs, or these properties, ``sample`` it (after ``wait`` seconds, or
``until`` slots or readings are at least so much), tell its ``state``, ``get`` slots, ``close`` it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support import fake_gpus, fake_nvml
from tests.support.waiting import soon
from zprof.gpu import library
from zprof.gpu.sampling import GpuSampler, open_gpus


def reached(slots: fake_nvml.Slots, sampler: GpuSampler | None, name: str, least: int) -> bool:
    if name in slots.places:
        return slots[name] >= least
    return sampler is not None and any(f"{key} {what}" == name and value >= least for what, key, value in sampler.sample())


def running(kind: str, about: list[Any]) -> Any:
    """A torch whose CUDA, or XPU, runs."""
    devices = [SimpleNamespace(**({"uuid": each} if isinstance(each, str) else each)) for each in about]
    module = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: len(devices), get_device_properties=lambda index: devices[index]
    )
    return SimpleNamespace(**{kind: module})


def steered() -> fake_nvml.Slots:
    """The slots of the fake library that the environment names."""
    if path := os.environ.get("FAKE_NVML"):
        return fake_nvml.Slots(Path(path))
    library.DRM = Path(os.environ["FAKE_DRM"])
    return next(kind(Path(os.environ[kind.variable])) for kind in fake_gpus.KINDS if kind.variable in os.environ)


def main() -> None:
    slots = steered()
    sampler: GpuSampler | None = None
    opened: list[GpuSampler] = []
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
            sampler = open_gpus(**step["open"])
            opened.append(sampler)
            answer = sampler.state()
        if "use" in step:
            sampler = opened[step["use"]]
        if "environ" in step:
            for name, value in step["environ"].items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for kind in {"cuda", "xpu"} & set(step):
            sys.modules["torch"] = running(kind, step[kind])
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
    for left in opened:
        left.close()
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
