"""The axes ranks are arranged on: ``shard`` over which state is partitioned, ``replicate`` over which it is copied, and
``tp`` and ``pp`` over which the model itself is divided.

Note: [Slices]
    Ranks with the same places on ``tp`` and ``pp`` hold the same part of the model: they are the *data* ranks of one slice.
    Plans, gathers and reductions are agreed among those alone.  Slices side by side on ``tp`` are parts of one model;
    those on ``pp`` are different models here, each attached by its own ranks.

Note: [Experts]
    Experts of one layer that lie on different ranks are different models, too, and what is attached over an ``ep`` axis is
    treated as over ``pp``.  But their tokens come from all ranks of both axes, each of which has a loss of its own: the mean
    is over all of those, where a stage's is over its data ranks.

Note: [Division]
    A parameter that ``parallelize_module`` has made a DTensor is divided over ``tp`` by its own placements.  The *part* is this
    tp rank's plain tensor, of which the data ranks own ranges.  A wrapper is made by the constructor, not by ``from_local``:
    that would lay a view between the wrapper and the part, and the view's base would keep a released buffer alive.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import AttachError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARD, REPLICATE, TP, PP = "shard", "replicate", "tp", "pp"
EP = "ep"
DATA, STAGE = "data", "stage"
#: Other people's names; for ``ep`` see Note [Experts].
_ALIASES = {"dp": SHARD, "fsdp": SHARD, "dp_shard": SHARD, "dp_replicate": REPLICATE, EP: PP}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh as seen by this rank: the global ranks on it, in order, and this rank's place.

    Attributes:
        siblings: the ranks on each axis beside this one, its own among them, in an order that all ranks share.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    siblings: tuple[tuple[int, ...], ...] = ()

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def name_among(self) -> str:
        """Its name among those that an attachment may have at once: after a move an axis of all ranks may be named as one of
        some of them is."""
        return f"axis {self.name} of {self.world} ranks"

    def place(self, rank: int) -> int:
        """Where any rank of the mesh is on its own axis of this name."""
        return next((row.index(rank) for row in (*self.siblings, self.ranks) if rank in row), 0)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes this rank takes part in.

    Attributes:
        data: shard and replicate together: the ranks that hold this part of the model.
        stage: data and tp together: the ranks of one attached model.
        names: the axes that were given, by the names used here.
        arrangement: the whole mesh as text, the same on every rank that was given the same.
        averaged: the ranks whose losses reach the parameters: the mean of gradients is over so many.
    """

    shard: Axis
    replicate: Axis
    tp: Axis
    pp: Axis
    data: Axis
    stage: Axis
    names: tuple[str, ...] = (SHARD,)
    arrangement: str = ""
    averaged: int = 1


def resolve(mesh: DeviceMesh | None) -> Mesh:
    """The axes to use: those of ``mesh``, else one shard axis over the default group, else a world of one.

    A slice of a larger mesh (``mesh["dp"]``) stands for the mesh it was cut from.

    Raises:
        AttachError: the mesh names other axes than these, or does not cover the process group.
    """
    if mesh is None:
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        every, alone = tuple(range(world)), (rank,)
        replicate, tp, pp = (Axis(name, alone, 0) for name in (REPLICATE, TP, PP))
        shard, data, stage = (Axis(name, every, rank, (every,)) for name in (SHARD, DATA, STAGE))
        arranged = _arranged((SHARD,), torch.arange(world, device="cpu"))
        return Mesh(shard, replicate, tp, pp, data, stage, arrangement=arranged, averaged=world)
    whole = mesh
    if hasattr(mesh, "_get_root_mesh"):
        whole = mesh._get_root_mesh()
    elif known := getattr(device_mesh, "_mesh_resources", None):  # torch 2.8
        whole = known.get_root_mesh(mesh)
    given = whole.mesh_dim_names or ((SHARD,) if whole.ndim == 1 else ())
    names = axis_names(given)
    members = sorted(whole.mesh.flatten().tolist())
    if members != list(range(dist.get_world_size())):
        raise AttachError(
            f"The mesh needs every rank of the process group (0 to {dist.get_world_size() - 1}), found ranks {members}. "
            "Build the mesh over the whole group."
        )

    def axis(name: str, *along: str) -> Axis:
        dims = [dim for dim, which in enumerate(names) if which in along]
        rows = whole.mesh.permute([dim for dim in range(whole.ndim) if dim not in dims] + dims)
        rows = rows.reshape(-1, math.prod(whole.mesh.shape[dim] for dim in dims))
        siblings = tuple(tuple(row) for row in rows.tolist())
        (ranks,) = (row for row in siblings if dist.get_rank() in row)
        return Axis(name, ranks, ranks.index(dist.get_rank()), siblings)

    shard, replicate, tp, pp = (axis(name, name) for name in (SHARD, REPLICATE, TP, PP))
    data, stage = axis(DATA, SHARD, REPLICATE), axis(STAGE, SHARD, REPLICATE, TP)
    averaged = data.world * (pp.world if EP in given else 1)
    return Mesh(shard, replicate, tp, pp, data, stage, names, _arranged(given, whole.mesh), averaged)


def axis_names(given: Sequence[str]) -> tuple[str, ...]:
    """The names that axes have here, of those that a mesh gives them, in any order.

    Raises:
        AttachError: there are none, others than these, or two of one axis.
    """
    names = tuple(_ALIASES.get(name, name) for name in given)
    if not names or len(set(names)) != len(names) or not set(names) <= {SHARD, REPLICATE, TP, PP}:
        raise AttachError(
            f"The mesh needs axes named {accepted_names()}, each axis at most once, found {tuple(given) or 'no names'}. "
            'Build it with mesh_dim_names=("replicate", "shard") or ("pp", "dp", "tp").'
        )
    return names


def accepted_names(*without: str) -> str:
    """Every name of an axis but these, in a sentence."""
    axes = {axis: [axis, *(alias for alias, of in _ALIASES.items() if of == axis)] for axis in (SHARD, REPLICATE, TP, PP)}
    return ", ".join(" or ".join(repr(name) for name in names if name not in without) for names in axes.values())


def _arranged(names: tuple[str, ...], ranks: Tensor) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in zip(names, ranks.shape, strict=True))
    flat = ranks.flatten().tolist()
    return sizes if flat == sorted(flat) else f"{sizes} with ranks {flat}"


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
    """A DTensor of the given DTensorSpec around ``part``; see Note [Division]."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor(part, spec, requires_grad=part.requires_grad)
    return made


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """The version and the address of what is in it: who writes to it changes the one, who replaces its data the other."""
    if type(tensor) is Tensor:
        return tensor._version, tensor.data_ptr()
    part = part_of(tensor)
    # Writes through a wrapper are counted by the wrapper alone, those to its part by the part.
    return tensor._version if part is tensor else tensor._version + part._version, part.data_ptr()


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
