"""Inputs of recomputed units: whole on every rank, unless a package that divides them is plugged in and a policy asks for it.

``saved.py`` and ``recompute.py`` say when a unit's inputs pass; what divides them derives from ``Undivided``, and is made by
one of ``DIVIDERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from offload.errors import AttachError, CapabilityError
from offload.events import Bus
from offload.policy import Policy
from offload.stash import Stash
from zhooks.activation.residual import Residual
from zhooks.comm import Comm

__all__ = ["DIVIDERS", "DividedInput", "Division", "Undivided", "check_axis", "open_division"]


@dataclass(frozen=True, slots=True, eq=False)
class DividedInput:
    """What autograd keeps of an input that ranks have divided; ``probe`` is an empty tensor that shares its version counter."""

    key: str
    shape: tuple[int, ...]
    open: Callable[[], Tensor]
    probe: Tensor
    version: int


class Undivided:
    """Every input stays as the model made it."""

    divides = False
    #: Ours are the hooks that see what a unit is given; set around a forward.
    active = False

    def begin(self, path: str) -> None:
        """A forward begins, on every rank."""

    def end(self) -> None:
        """It is over.

        Raises:
            DivergenceError: what ranks should hold alike they do not.
        """

    def abandon(self) -> None:
        """It raised."""

    @contextmanager
    def inputs(self, unit: str, where: str, given: Sequence[Tensor], name: Callable[[int], str]) -> Iterator[None]:
        """What a unit is given is about to be saved."""
        yield

    def take(self, tensor: Tensor, count: Residual | None) -> DividedInput | None:
        """Divide what autograd is about to save; None where it is no input of a unit, or is left alone."""
        return None

    def drop_unasked(self) -> None:
        """Backward is over: what was gathered ahead of it and never asked for goes."""

    def state_held(self) -> None:
        """State what is held on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes of them that are on the device by its doing."""
        return 0

    @property
    def payload(self) -> int:
        """Bytes that backward gathers of the last forward's inputs."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """What inputs are divided by; ``holds``: whether a storage, by its address, is that of gathered parameters."""

    policy: Policy
    comm: Comm
    stash: Stash | None
    bus: Bus
    model: nn.Module
    holds: Callable[[int], bool]


#: What divides inputs, by the axis that ``[activation] partition`` names.
DIVIDERS: dict[str, Callable[[Division], Undivided]] = {}


def open_division(division: Division) -> Undivided:
    """What divides the inputs of units as the policy says.

    Raises:
        CapabilityError: nothing is plugged in that does.
    """
    axis = division.policy.activation.partition
    if axis == "none":
        return Undivided()
    if axis not in DIVIDERS:
        raise CapabilityError(f'[activation] partition = "{axis}" needs the package zhooks.parallel. Import zhooks.')
    return DIVIDERS[axis](division)


def check_axis(policy: Policy, names: Sequence[str]) -> None:
    """What [activation] partition names is an axis of the mesh, one of ``names``.

    Raises:
        AttachError: it is not.
    """
    wanted = policy.activation.partition
    if wanted != "none" and wanted not in names:
        raise AttachError(
            f'[activation] partition needs an axis named "{wanted}" in the mesh, found {", ".join(names)}. Attach '
            f'with mesh = init_device_mesh(..., mesh_dim_names=("dp", "{wanted}")), or set partition = "none".'
        )
