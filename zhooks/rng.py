"""The random generators of this process: torch's on the CPU and on the devices in use, python's, and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import xxhash
from torch import Tensor

from offload.device import has_generator, random_state, set_random_state
from offload.errors import CheckpointError
from offload.text import counted
from offload.user_warnings import warn_user


def generators(devices: Iterable[torch.device]) -> dict[str, Any]:
    """The states as plain data and tensors; ``devices`` are those the model computes on."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["devices"] = {
        kind: [random_state(device) for device in those] for kind, those in _with_generators(devices).items()
    }
    if "numpy" in sys.modules:
        states["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
    return states


def _with_generators(devices: Iterable[torch.device]) -> dict[str, list[torch.device]]:
    """The devices that have generators of their own, by type."""
    found: dict[str, list[torch.device]] = {}
    for device in devices:
        if has_generator(device):
            found.setdefault(device.type, []).append(device)
    return found


def _of_devices(states: dict[str, Any]) -> Any:
    """The states by type of device; of older files, too, which have CUDA's alone."""
    return states["devices"] if "devices" in states else {"cuda": states["cuda"]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def check(states: Any, devices: Iterable[torch.device]) -> None:
    """Refuse what ``restore`` could not take: each state is tried on a generator of its kind that nobody uses.

    Raises:
        CheckpointError: states of other generators than this process has, or that no generator was in.
    """
    kinds = states.keys() - {"numpy"} if isinstance(states, dict) else set()
    if kinds not in ({"torch", "python", "devices"}, {"torch", "python", "cuda"}):
        raise _strange("torch, python and devices", str(list(states) if isinstance(states, dict) else states)[:80])
    saved, here = _of_devices(states), _with_generators(devices)
    if not isinstance(saved, dict) or not all(isinstance(kind, str) and isinstance(each, list) for kind, each in saved.items()):
        raise _strange("devices", str(saved)[:80])
    _try_torch(torch.device("cpu"), states["torch"])
    for kind in sorted({*saved, *here}):
        each, those = saved.get(kind, []), here.get(kind, [])
        if "devices" not in states and kind != "cuda":
            # From before their states were saved: `restore` says so.
            continue
        if len(each) != len(those):
            raise CheckpointError(
                f"load expected the random states of {counted(len(those), f'{kind} device')} on this rank, found {len(each)}. "
                "Load on the same kind and number of devices."
            )
        for device, state in zip(those, each, strict=True):
            _try_torch(device, state)
    python = random.Random()
    _try("python", states["python"], python.setstate, python.getstate)
    if "numpy" in sys.modules and "numpy" in states:
        generator: Any = sys.modules["numpy"].random
        name = generator.get_state(legacy=False)["bit_generator"]
        fresh = generator.RandomState(getattr(generator, name)())
        _try("numpy", states["numpy"], fresh.set_state, lambda: _plain(fresh.get_state(legacy=False)))
        # numpy takes any place in its row of numbers, and reads there.
        inner = states["numpy"]["state"]
        if "pos" in inner and not 0 <= inner["pos"] <= len(inner["key"]):
            raise _strange("numpy", f"one at position {inner['pos']}")


def _try_torch(device: torch.device, state: Any) -> None:
    fresh = torch.Generator(device)
    wanted = fresh.get_state()
    if not isinstance(state, Tensor) or (state.dtype, state.shape) != (wanted.dtype, wanted.shape):
        found = f"{list(state.shape)} of {state.dtype}" if isinstance(state, Tensor) else type(state).__name__
        raise CheckpointError(
            f"load expected a random state of {wanted.numel()} bytes for {device}, found {found}. Load with the torch "
            "version that saved it."
        )
    _try(str(device), state.cpu().tolist(), lambda _: fresh.set_state(state.cpu()), lambda: fresh.get_state().tolist())


def _try(name: str, state: Any, put: Callable[[Any], object], get: Callable[[], Any]) -> None:
    try:
        put(state)
        same = bool(get() == state)
    except Exception as error:
        raise _strange(name, f"one that it rejects ({type(error).__name__}: {error})") from error
    if not same:
        raise _strange(name, "one that it does not reproduce")


def derived(states: dict[str, Any], devices: Iterable[torch.device], place: str) -> dict[str, Any]:
    """States for a place that none were saved for: every generator seeded by a hash of these and of the place's name."""
    raw = states["torch"].cpu().contiguous().numpy().tobytes()
    seed = xxhash.xxh3_64_intdigest(raw + place.encode())
    made: dict[str, Any] = {"torch": torch.Generator().manual_seed(seed).get_state(), "python": random.Random(seed).getstate()}
    made["devices"] = {
        kind: [torch.Generator(device).manual_seed(seed).get_state() for device in those]
        for kind, those in _with_generators(devices).items()
    }
    if "numpy" in sys.modules and "numpy" in states:
        numpy: Any = sys.modules["numpy"].random
        made["numpy"] = _plain(numpy.RandomState(seed % 2**32).get_state(legacy=False))
    return made


def _strange(name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"load expected a state of the random generator of {name}, found {found}. Load another checkpoint."
    )


def restore(states: dict[str, Any], devices: Iterable[torch.device]) -> None:
    """Set every generator to its saved state; numpy's only if this process has loaded numpy."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    saved = _of_devices(states)
    for kind, those in _with_generators(devices).items():
        if kind not in saved:
            warn_user(
                f"load: the checkpoint has no random state of {', '.join(map(str, those))}, because an older zhooks saved it. "
                "That generator goes on from its present state, so that dropout differs from the run that saved."
            )
            continue
        for device, state in zip(those, saved[kind], strict=True):
            set_random_state(device, state)
    if "numpy" in sys.modules and "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
