"""The random generators of this process: torch's on the CPU and on the CUDA devices in use, python's, and numpy's.

The checkpoint rooms save what ``generators`` gives and hand it back to ``restore``.  It never touches a generator object
that the user made.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from offload.errors import CheckpointError

_CPU_STATE = torch.get_rng_state().numel()


def generators(devices: Iterable[torch.device]) -> dict[str, Any]:
    """The states as plain data and tensors; ``devices`` are those the model computes on."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    cuda = [device for device in devices if device.type == "cuda"]
    states["cuda"] = [torch.cuda.get_rng_state(device) for device in cuda]
    if "numpy" in sys.modules:
        states["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
    return states


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def check(states: dict[str, Any], devices: Iterable[torch.device]) -> None:
    """Refuse what ``restore`` could not take, before anything is changed.

    Raises:
        CheckpointError: states of other generators than this process has.
    """
    cuda = [device for device in devices if device.type == "cuda"]
    if len(states["cuda"]) != len(cuda):
        raise CheckpointError(
            f"load: expected the random states of {len(cuda)} CUDA device(s) on this rank, found {len(states['cuda'])}. "
            "Load on the kind of device that saved."
        )
    if states["torch"].numel() != _CPU_STATE or states["torch"].dtype != torch.uint8:
        raise CheckpointError(
            f"load: expected a random state of {_CPU_STATE} bytes, found {states['torch'].numel()}. Load with the torch that "
            "saved."
        )
    random.Random().setstate(states["python"])


def restore(states: dict[str, Any], devices: Iterable[torch.device]) -> None:
    """Set every generator to its saved state; numpy's only if this process has loaded numpy."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    cuda = [device for device in devices if device.type == "cuda"]
    for device, state in zip(cuda, states["cuda"], strict=True):
        torch.cuda.set_rng_state(state, device)
    if "numpy" in sys.modules and "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
