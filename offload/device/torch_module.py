"""What torch answers for a type of device: by its own module (``torch.xpu``), or by ``torch.accelerator``.

The module comes first: it answers also where another type is the accelerator of the process, as it is once a type has been
registered under ``PrivateUse1``.  Backends differ in what they have, so each question has a fallback.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from offload.errors import CapabilityError
from offload.virtual import NAME

__all__ = [
    "checkpoint_keeps_generator",
    "default_device",
    "device_guard",
    "device_name",
    "function_of",
    "has_generator",
    "has_streams",
    "memory_of",
    "memory_statistics",
    "module_of",
    "random_state",
    "set_random_state",
    "started_device",
    "unavailable",
    "used_of",
]

#: Their tensors lie in the host's memory, or nowhere.
_HOST_TYPES = ("cpu", NAME)
#: Types of device that torch itself comes with.
_BUILT_IN = ("cuda", "xpu", "mtia", "mps")


def module_of(device: torch.device) -> Any:
    """torch's module of the device's type; None where there is none."""
    return getattr(torch, device.type, None)


def function_of(device: torch.device, name: str, generic: str = "") -> Callable[..., Any] | None:
    """A function of the module, or the one of ``torch.accelerator`` that does the same.

    Args:
        generic: what it is called there, where that is another name.
    """
    accelerator = torch.accelerator
    return getattr(module_of(device), name, None) or getattr(accelerator, generic or name, None)


def unavailable(device: torch.device) -> str:
    """Why nothing can be computed on a device of this type here, and what to do; "" where it can."""
    if device.type == "cpu":
        return ""
    module = module_of(device)
    available = getattr(module, "is_available", None)
    if available is None:
        return (
            f"Expected a type of device that computes, found that torch has no module torch.{device.type} for it; import the "
            "package that registers it, or move the model to another device"
        )
    if not available():
        return "Expected one that is available, found none; install its driver and a build of torch for it"
    return ""


def _accelerator() -> torch.device | None:
    """The accelerator of this process that is available; None where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != NAME:
        return None if unavailable(accelerator) else accelerator
    # Once the virtual device is registered torch names no other.
    others = (torch.device(kind) for kind in _BUILT_IN)
    return next((device for device in others if not unavailable(device)), None)


def default_device() -> torch.device:
    """Where a program that names no device computes: the accelerator's current device, or the CPU."""
    accelerator = _accelerator()
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, current_index(accelerator))


def started_device() -> torch.device | None:
    """The accelerator's current device, where the process has used it; None elsewhere: to ask would start it."""
    accelerator = _accelerator()
    started = getattr(module_of(accelerator), "is_initialized", None) if accelerator is not None else None
    if accelerator is None or (started is not None and not started()):
        return None
    return torch.device(accelerator.type, current_index(accelerator))


def current_index(device: torch.device) -> int:
    """The index of the device of this type that the thread computes on."""
    # torch's types say that it always has one.
    index: int | None = device.index
    if index is not None:
        return index
    current = function_of(device, "current_device", "current_device_index")
    return 0 if current is None else int(current())


def has_streams(device: torch.device) -> bool:
    """Work on the device can be queued on several streams."""
    current = function_of(device, "current_stream")
    try:
        return current is not None and torch.Stream(device).stream_id != current(device).stream_id
    except (RuntimeError, ValueError):
        return False


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, ``device`` is the one that this thread computes on; nothing where the host is."""
    if device.type in _HOST_TYPES:
        return nullcontext()
    guard = getattr(module_of(device), "device", None)
    made: AbstractContextManager[Any] = torch.accelerator.device_index(device.index) if guard is None else guard(device)
    return made


def device_name(device: torch.device) -> str:
    """What the hardware is called; the device's own name where torch does not say."""
    named = getattr(module_of(device), "get_device_name", None)
    return str(device) if named is None else str(named(device))


def has_generator(device: torch.device) -> bool:
    """The device has a random generator beside the CPU's."""
    return device.type not in _HOST_TYPES


def checkpoint_keeps_generator(device: torch.device, given: Iterable[Tensor]) -> bool:
    """``torch.utils.checkpoint`` of a function of ``given`` runs it again with the device's random numbers of the first run.

    It asks the module for ``_initialized``, which not every type's has, and keeps the generators of the inputs' devices alone.
    """
    if not has_generator(device):
        return True
    return bool(getattr(module_of(device), "_initialized", False)) and any(tensor.device == device for tensor in given)


def random_state(device: torch.device) -> Tensor:
    """The state of the device's default generator.

    Raises:
        CapabilityError: torch's module of that type does not say it.
    """
    get = _of_generators(device, "get_rng_state")
    state: Tensor = get(device) if inspect.signature(get).parameters else get()
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set it to what `random_state` gave.

    Raises:
        CapabilityError: torch's module of that type does not take it.
    """
    put = _of_generators(device, "set_rng_state")
    if len(inspect.signature(put).parameters) > 1:
        put(state, device)
    else:
        put(state)


def _of_generators(device: torch.device, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module_of(device), name, None)
    if found is None:
        raise CapabilityError(
            f"Cannot use {device}. Expected torch.{device.type}.{name}, found none; its random state can be neither saved nor "
            "restored. Use a version of the package that registers the device which has it."
        )
    return found


def memory_statistics(device: torch.device) -> Mapping[str, int]:
    """The allocator's numbers by torch's names ("allocated_bytes.all.current"); empty where it keeps none."""
    asked = None if device.type in _HOST_TYPES else function_of(device, "memory_stats")
    try:
        return {} if asked is None else asked(device)
    except (RuntimeError, ValueError):
        # An allocator that keeps no statistics, or not the accelerator's.
        return {}


def used_of(device: torch.device) -> tuple[int, int]:
    """Bytes that this process uses: now, and at most; the same where only one is known, and 0 where neither is."""
    stats = memory_statistics(device)
    now, most = stats.get("allocated_bytes.all.current"), stats.get("allocated_bytes.all.peak")
    if now is None:
        now, most = _number(device, "memory_allocated", "current_allocated_memory"), _number(device, "max_memory_allocated")
    return now or 0, max(now or 0, most or 0)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes (free, total) of the device; what its allocator caches but does not use counts as free.

    Raises:
        CapabilityError: torch does not say it.
    """
    reserved = memory_statistics(device).get("reserved_bytes.all.current")
    if reserved is None:
        reserved = _number(device, "memory_reserved", "driver_allocated_memory") or 0
    cached = max(0, reserved - used_of(device)[0])
    asked = function_of(device, "mem_get_info", "get_memory_info")
    if asked is not None:
        # So says an allocator that does not know.
        with suppress(RuntimeError, ValueError):
            free, total = asked(device)
            return free + cached, total
    total = _number(device, "recommended_max_memory") or _total(device)
    if not total:
        raise CapabilityError(
            f"Cannot use {device}. Expected torch to say how much memory it has (torch.{device.type}.mem_get_info), found that "
            "it does not; use torch 2.10 or later, or another version of the package that registers the device"
        )
    return total - reserved + cached, total


def _total(device: torch.device) -> int:
    properties = getattr(module_of(device), "get_device_properties", None)
    return 0 if properties is None else int(getattr(properties(device), "total_memory", 0))


def _number(device: torch.device, *names: str) -> int | None:
    """What the first of these functions that there is says."""
    module = module_of(device)
    for name in names:
        asked = getattr(module, name, None)
        if asked is not None:
            return int(asked(device) if inspect.signature(asked).parameters else asked())
    return None
