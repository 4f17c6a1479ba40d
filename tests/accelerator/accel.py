"""The device type "accel": a PrivateUse1 backend whose streams are really asynchronous, computed on the CPU.

`load()` builds it if need be, registers it with torch as `torch.accel`, and returns that module. One process has one
PrivateUse1 backend: a process that has zhooks' virtual device cannot have this one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.build import NAME, CannotBuild, built

DEVICE_TYPE = "accel"


def load() -> Any:
    """`torch.accel`; raises `CannotBuild` with one line that says what is missing."""
    if hasattr(torch, DEVICE_TYPE):
        return getattr(torch, DEVICE_TYPE)
    other = torch._C._get_privateuse1_backend_name()
    if other != "privateuseone":
        raise CannotBuild(f'this process has another PrivateUse1 backend, "{other}": give the accelerator a process of its own')
    # Gloo's flight recorder takes Python's lock in the middle of a collective, which runs on any thread here.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    # Several threads of OpenMP beside autograd's thread, which runs kernels too, would change the order of sums.
    torch.set_num_threads(1)
    native = _imported(built())
    atexit.register(native.close)
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(DEVICE_TYPE, _group_maker(native), devices=[DEVICE_TYPE])
    return getattr(torch, DEVICE_TYPE)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def _group_maker(native: Any) -> Any:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("accel", store), rank, size, timeout=timeout)
        return native.Group(gloo, rank, size, timeout.total_seconds())

    return make


def _index(device: Any) -> int:
    if device is None:
        return int(torch.accelerator.current_device_index())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else index


def new_stream(device: Any = None, priority: int = 0) -> torch.Stream:
    """A stream of the accelerator, made as `torch.cuda.Stream` is."""
    return torch.Stream(torch.device(DEVICE_TYPE, _index(device)), priority=priority)


def new_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """An event of the accelerator, made as `torch.cuda.Event` is; torch takes no subclass for the times between two."""
    return torch.Event(torch.device(DEVICE_TYPE), enable_timing=enable_timing, blocking=blocking)


def _module(native: Any) -> types.ModuleType:
    """What torch and libraries expect of `torch.<device type>`, and the accelerator's own controls."""
    module = types.ModuleType(f"torch.{DEVICE_TYPE}")
    generators = [native.default_generator(index) for index in range(native.device_count())]

    def is_available() -> bool:
        return True

    def set_device(device: Any) -> None:
        native.set_device(_index(device))

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before = native.exchange_device(_index(index))
        try:
            yield
        finally:
            native.exchange_device(before)

    def current_stream(device: Any = None) -> Any:
        return torch.accelerator.current_stream(torch.device(DEVICE_TYPE, _index(device)))

    def default_stream(device: Any = None) -> Any:
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        with chosen:
            yield

    def synchronize(device: Any = None) -> None:
        native.synchronize(_index(device))

    def manual_seed(seed: int) -> None:
        generators[native.current_device()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generators[_index(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generators[_index(device)].set_state(state)

    def memory_stats(device: Any = None) -> Any:
        return torch.accelerator.memory_stats(_index(device))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(_index(device))

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_snapshot() -> Any:
        return {
            "segments": native.segments(),
            "device_traces": [native.history(index) for index in range(native.device_count())],
            "allocator_settings": {},
        }

    def record_memory_history(enabled: str | None = "all", *_: Any, max_entries: int = 1 << 20, **__: Any) -> None:
        native.record_history(enabled is not None, max_entries)

    for given in (
        is_available, set_device, device, current_stream, default_stream, stream, synchronize, manual_seed, manual_seed_all,
        get_rng_state, set_rng_state, memory_stats, mem_get_info, get_amp_supported_dtype, memory_snapshot,
    ):  # fmt: skip
        setattr(module, given.__name__, given)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache"):
        setattr(module, name, getattr(torch.accelerator, name))
    module.memory = types.ModuleType(f"torch.{DEVICE_TYPE}.memory")  # type: ignore[attr-defined]
    module.memory._snapshot, module.memory._record_memory_history = memory_snapshot, record_memory_history
    module.reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats  # type: ignore[attr-defined]
    module.device_count = native.device_count  # type: ignore[attr-defined]
    module.current_device = native.current_device  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.is_initialized = is_available  # type: ignore[attr-defined]
    module._initialized = True  # type: ignore[attr-defined]
    module.default_generators = generators  # type: ignore[attr-defined]
    module.Stream, module.Event = new_stream, new_event  # type: ignore[attr-defined]
    #: The scheduler, faults and counts.
    module.native = native  # type: ignore[attr-defined]
    return module
