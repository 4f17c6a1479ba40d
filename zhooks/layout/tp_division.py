"""How a parameter is divided over the ``tp`` axis: the mesh and placements of its DTensor, and the way from whole to part.

``tensor/sharded.py`` keeps one for each parameter that ``parallelize_module`` has made a DTensor; what wraps and unwraps goes
through here.  The *part* is this tp rank's plain tensor, of which the data ranks own ranges.  It never chooses a placement, and
whole values come by the DTensor's own collectives, over the group its owner made.

Note: [One wrapper]
    A wrapper is made by the constructor, not by ``from_local``: that would lay a view between the wrapper and the part, and
    the view's base would keep a released buffer alive.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_divided(tensor: object) -> bool:
    """``tensor`` is a DTensor; who never imported them has none."""
    if type(tensor) is Tensor:
        return False
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def part_of(tensor: Tensor) -> Tensor:
    """This rank's plain tensor behind a DTensor, itself and not a view; any other tensor as it is."""
    return cast(Tensor, cast(Any, tensor)._local_tensor) if is_divided(tensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """The global plain value of a DTensor, part of the graph where grad is on; any other tensor as it is.  Collective."""
    return cast("DTensor", tensor).full_tensor() if is_divided(tensor) else tensor


def rewrap(part: Tensor, spec: Any) -> Tensor:
    """A DTensor of the given DTensorSpec around ``part``; see Note [One wrapper]."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor(part, spec, requires_grad=part.requires_grad)
    return made


def version_of(tensor: Tensor) -> int:
    """Counts writes: of a DTensor those through the wrapper, which its part's counter does not see, and those to the part."""
    part = part_of(tensor)
    return tensor._version if part is tensor else tensor._version + part._version


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """The version and the address of what is in it: who writes to it changes the one, who replaces its data the other."""
    if type(tensor) is Tensor:
        return tensor._version, tensor.data_ptr()
    return version_of(tensor), part_of(tensor).data_ptr()


def hollow(tensor: Tensor) -> Tensor:
    """A DTensor without values that shares the version counter of ``tensor``."""
    made: Any = tensor.detach()
    made._local_tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return cast(Tensor, made)


class Division:
    """What a DTensor over one mesh axis is beside its values.

    Attributes:
        shape, stride: global.
        dim: the tensor dim that is cut, None where every rank has the whole.
        count, index: the ranks of the axis, and this rank's place.
    """

    __slots__ = ("count", "dim", "index", "mesh", "placements", "shape", "stride")

    def __init__(self, mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.mesh, self.placements, self.shape, self.stride = mesh, placements, shape, stride
        self.dim: int | None = placements[0].dim % len(shape) if placements[0].is_shard() else None
        self.count, self.index = mesh.size(), mesh.get_local_rank()

    @classmethod
    def of(cls, tensor: Tensor) -> Division | None:
        """That of a DTensor, None of any other tensor."""
        if not is_divided(tensor):
            return None
        given = cast("DTensor", tensor)
        return cls(given.device_mesh, tuple(given.placements), given.shape, given.stride())

    @property
    def place(self) -> tuple[int, int, int] | None:
        """Which part this is: dim, index and count; None where it is the whole."""
        return None if self.dim is None or self.count == 1 else (self.dim, self.index, self.count)

    def wrap(self, part: Tensor) -> Tensor:
        """The DTensor whose part this is."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(self.shape, self.stride, part.dtype)
        return rewrap(part, DTensorSpec(self.mesh, self.placements, tensor_meta=meta))

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's part of a global tensor, plain or DTensor; of the latter, collective where it is placed otherwise."""
        if is_divided(tensor):
            given = cast("DTensor", tensor)
            placed = tuple(given.placements) == self.placements
            return part_of(given if placed else given.redistribute(placements=self.placements))
        if self.place is None:
            return tensor
        dim, index, count = self.place
        length = tensor.shape[dim] // count
        return tensor.narrow(dim, index * length, length)

    def whole(self, part: Tensor) -> Tensor:
        """The global plain value, a new tensor or ``part`` itself.  Collective."""
        return part if self.place is None else whole_of(self.wrap(part))
