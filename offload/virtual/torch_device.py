"""The device "virtual" as torch knows it: real tensors with shapes, strides, storages and addresses, and no data.

``register`` tells torch of it, once a process, by torch's own Python way in for new backends; from then on each operation on
such tensors comes here, finds out by its meta kernel what it makes, and is handed to the machine that is on, which keeps
clocks and a ledger.

Note: [Shapes without data]
    A tensor on this device is a plain ``torch.Tensor`` over a storage whose address nobody can read.  Views are made by the
    CPU's kernels, which touch numbers alone; anything else runs on twins of its arguments on meta, and its results get
    storages of their own.  So autograd, modules, optimizers and all code of ours take the ways they take on a GPU.  What asks
    for a value (``item()``, ``cpu()``, a mask's indices) cannot be answered, and is refused with the line that asked.

Note: [Errors in backward]
    Autograd asks our device guard for its device while an error of a saved tensor's hook is on its way, with that error still
    pending in Python, which ends the process.  So the guard takes the error, and torch, which finds none then, raises a
    SystemError; ``errors_of_backward`` puts the first one back in its place.

Note: [Two places]
    Index 0 is the accelerator's memory, index 1 page-locked memory of its host: what is computed there is the host's work.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.errors import CapabilityError, SimulationError
from offload.virtual.autocast import autocast_kernels
from offload.virtual.choices import register_choices
from offload.virtual.memory import ACCELERATOR, NAME
from offload.virtual.operations import COMPOSITES, KERNELS, run

__all__ = ["errors_of_backward", "register"]


class _Backend:
    """What ``torch.virtual`` is."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return ACCELERATOR

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        return None

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """There is nothing random without values."""
        return torch.zeros(0, dtype=torch.uint8, device="cpu")

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        return None

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_kept: list[Any] = []
#: Errors that the guard took.
_pending: list[BaseException] = []


def _guard() -> Any:
    guard: Any = torch._C._acc
    kind: Any = torch._C._autograd
    occurred = ctypes.pythonapi.PyErr_Occurred

    class Guard(guard.DeviceGuard):  # type: ignore[misc]
        def type_(self, pending: Any = occurred, take: Any = _pending.append, kind: Any = kind.DeviceType.PrivateUse1) -> Any:
            # With an error pending, Python can do little but this: ctypes raises it here.
            try:
                pending()
            except BaseException as error:
                take(error)
            return kind

    return Guard()


@contextmanager
def errors_of_backward() -> Iterator[None]:
    """See Note [Errors in backward]; also names the one cause of an assertion of torch's that its users meet here."""
    _pending.clear()
    try:
        yield
    except SystemError as error:
        if not _pending:
            raise
        raise _pending[0] from error
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise SimulationError(
            "simulate expected a process in which no backward has run yet, because torch counts devices at the first; found "
            "one in which some have run. Simulate before training, or in another process."
        ) from error
    finally:
        _pending.clear()


def register() -> None:
    """Tell torch of the device; once a process, and for the rest of it.

    Raises:
        CapabilityError: this torch has no way in for devices written in Python, or another one is registered.
    """
    if _kept:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
    except ImportError as error:
        raise CapabilityError(
            f"The virtual device needs a torch that takes devices written in Python (2.10 and later), found "
            f"{torch.__version__}. Install a newer torch."
        ) from error
    known = torch._C._get_privateuse1_backend_name()
    if known not in ("privateuseone", NAME):
        raise CapabilityError(
            f'The virtual device expected that no other backend of its kind is loaded, found "{known}". Simulate in a process '
            "that does not import it."
        )
    setup(rename=NAME, backend_module=_Backend(), device_guard=_guard())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    with warnings.catch_warnings():
        # That a kernel takes the place of torch's own for this device is what is wanted.
        warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
        for name, kernel in KERNELS.items():
            aten.impl(name, kernel, "PrivateUse1")
        for name, kernel in COMPOSITES.items():
            for key in ("PrivateUse1", "AutogradPrivateUse1"):
                aten.impl(name, kernel, key)
        for name, kernel in autocast_kernels().items():
            aten.impl(name, kernel, "AutocastPrivateUse1")
        register_choices(aten)
    _kept.extend((every, aten))
