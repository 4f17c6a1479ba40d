"""How ranks that are not there are arranged, and what is built on them: the mesh of a simulation, the model of a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from offload.errors import AttachError, SimulationError
from offload.virtual import NAME
from zhooks import tree
from zhooks.layout import EP, PP, TP, accepted_names, axis_names

__all__ = ["Arrangement", "BuiltJob", "built", "is_count"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The axes that ranks are arranged on, the outermost first; none is one shard axis over all of them."""

    world: int
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, mesh: Mapping[str, int] | None, world: int) -> Arrangement:
        """Those that ``attach`` takes, in any order.

        Raises:
            SimulationError: they are others, or not of so many ranks.
        """
        if mesh is None:
            return cls(world, ())
        if not isinstance(mesh, Mapping) or not mesh or not all(map(is_count, mesh.values())):
            raise SimulationError(f"simulate expected a mesh as sizes of axes, such as {{'shard': {world}}}, found {mesh!r}.")
        try:
            names = axis_names([str(name) for name in mesh])
        except AttachError as error:
            raise SimulationError(
                f"simulate expected a mesh of axes {accepted_names(EP)}, each axis at most once, in any order, found "
                f"{dict(mesh)}."
            ) from error
        if EP in mesh:
            raise SimulationError(
                "simulate expected a mesh without 'ep', because the experts of other ranks are different models with "
                "different tokens; found one. Simulate the experts of one rank as a separate model, over the ranks that "
                "share it."
            )
        if math.prod(mesh.values()) != world:
            raise SimulationError(
                f"simulate expected a mesh of axes 'replicate', 'shard', 'tp' and 'pp' over {world} ranks, found {dict(mesh)} "
                f"over {math.prod(mesh.values())}."
            )
        assert len(names) == len(mesh)
        return cls(world, tuple(mesh.items()))

    @property
    def stages(self) -> int:
        """Places on the pp axis."""
        return dict(self.sizes).get(PP, 1)

    def first_of(self, stage: int) -> int:
        """The rank that stands for all of a stage."""
        return stage * self._apart

    def stage_of(self, rank: int) -> int:
        return rank // self._apart % self.stages

    @property
    def _apart(self) -> int:
        """Ranks from one place on the pp axis to the next."""
        names = [name for name, _ in self.sizes]
        after = self.sizes[names.index(PP) + 1 :] if PP in names else ()
        return math.prod(size for _, size in after)

    @property
    def divides(self) -> bool:
        """The model is divided over ranks, which ``build`` does."""
        return any(name in (TP, PP) for name, _ in self.sizes)

    def mesh(self) -> DeviceMesh | None:
        """Torch's; made by every rank."""
        if not self.sizes:
            return None
        names, sizes = zip(*self.sizes, strict=True)
        return init_device_mesh(NAME, sizes, mesh_dim_names=names)


@dataclass(frozen=True, slots=True)
class BuiltJob:
    """What ``build`` returned.

    Attributes:
        given: all of it, for ``step``.
        models: that are attached: one, or those of all stages that a rank has.
    """

    given: tuple[Any, ...]
    models: tuple[Any, ...]

    @property
    def optimizers(self) -> tuple[Any, ...]:
        return self.given[1:2]


def built(build: Callable[..., Any], arrangement: Arrangement, mesh: DeviceMesh | None) -> BuiltJob:
    """The job's model on the virtual device; ``build`` is given the mesh where it is to divide the model over it."""
    with torch.device(NAME):
        found = build(mesh) if arrangement.divides else build()
    given = found if isinstance(found, tuple) else (found,)
    staged = PP in dict(arrangement.sizes)
    several = staged and given and isinstance(given[0], list | tuple)
    models = tuple(given[0]) if several else given[:1]
    if not models or not all(isinstance(model, nn.Module) for model in models):
        kinds = f"({', '.join(type(each).__name__ for each in given)})" if isinstance(found, tuple) else type(found).__name__
        more = " (or a list of the models of this rank's stages)" if staged else ""
        raise SimulationError(
            f"simulate expected that build returns a model{more}, or a model and its optimizer, found {kinds}."
        )
    for model in models:
        _move(model)
    return BuiltJob(given, models)


@torch.no_grad()
def _move(model: nn.Module) -> None:
    """What legacy constructors (``torch.Tensor(n)``) and real data made on the CPU; optimizers know parameters by identity."""
    for tensor in (*tree.parameters(model), *tree.buffers(model)):
        if tensor.device.type == "cpu":
            moved = tensor.to(NAME)
            made = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
            torch.utils.swap_tensors(tensor, made)


def is_count(value: object) -> bool:
    """A number of something that there is at least one of."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
