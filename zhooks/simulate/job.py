"""What ``find_policy`` plans: a job's two functions, what they can be asked for, and the model as it is divided.

Which axes are searched follows from the parameters that the functions have; what is left out for want of one, or because the
model cannot be divided so, is kept as notes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from offload.errors import SimulationError
from offload.hardware import Hardware
from offload.policy import Policy
from offload.virtual import NAME, Machine
from zhooks import tree
from zhooks.layout import Ignored
from zhooks.plan import check_module
from zhooks.simulate.axes import MOST_DIVIDED, Batch, Dtype, batches
from zhooks.simulate.bounds import Built, Needs
from zhooks.simulate.costs import HardwareCosts
from zhooks.simulate.virtual_group import ranks_on_paper
from zhooks.tensor import ShardedTensor

__all__ = ["Build", "Job", "said"]

Build = Callable[..., nn.Module | tuple[nn.Module, torch.optim.Optimizer]]

_BATCH = ("micro_batch", "accumulation")
_DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")


@dataclass(slots=True)
class Job:
    """One job on so many ranks of a profile.

    Attributes:
        notes: what was left out of the search, and why.
    """

    build: Build
    step: Callable[..., object]
    world: int
    hardware: Hardware
    notes: list[str] = field(default_factory=list)

    def batched(self) -> tuple[Batch | None, ...]:
        """The batch of a rank and how it may be divided; None where the step does not say how large it is."""
        named = inspect.signature(self.step).parameters
        if not named.keys() >= {*_BATCH}:
            return (None,)
        given = [named[name].default for name in _BATCH]
        if not all(isinstance(each, int) and each > 0 for each in given):
            raise SimulationError(
                "find_policy expected defaults of at least 1 for the step's micro_batch and accumulation, the number of "
                f"samples of a step, found {given[0]!r} and {given[1]!r}. Write step(model, optimizer, *, micro_batch=8, "
                "accumulation=1)."
            )
        found = batches(given[0], given[1])
        if found[-1].micro_batch % 2 == 0:
            note = (
                f"micro-batches below {found[-1].micro_batch}: a step is divided into {MOST_DIVIDED} at the most; give step a "
                "smaller micro_batch and more accumulation"
            )
            self.notes += [note] if note not in self.notes else []
        return found

    def replicas(self) -> tuple[int, ...]:
        """Shards over all ranks, or over those of a node with a replica on each."""
        devices = self.hardware.device.count
        return (1, self.world // devices) if self.world > devices > 1 and self.world % devices == 0 else (1,)

    def dtypes(self, allowed: Sequence[str] | None) -> tuple[Dtype | None, ...]:
        """Of those that are allowed, the ones that may be quicker or smaller here than one before them; None: as the policy.

        Raises:
            SimulationError: a name that is no dtype, or none that the hardware computes in.
        """
        if allowed is None:
            return (None,)
        if isinstance(allowed, str) or not allowed or not {*allowed} <= {*_DTYPES}:
            names = ", ".join(_DTYPES)
            raise SimulationError(f"find_policy expected precision as a list of some of {names}, found {allowed!r}.")
        listed = [dtype for dtype in _DTYPES if dtype in allowed]
        listed.sort(key=list(allowed).index)
        peak = self.hardware.peak
        here = [dtype for dtype in listed if getattr(peak, dtype)]
        if not here:
            raise SimulationError(
                f"find_policy expected a precision that {self.hardware.name} computes in, found {', '.join(listed)}, for "
                "which its profile has no peak. Allow another one."
            )
        self.notes += [f"{dtype}: {self.hardware.name} has no peak for it" for dtype in listed if dtype not in here]
        if {"bf16", "fp16"} <= {*here} and (peak.fp16 or 0) <= (peak.bf16 or 0):
            here.remove("fp16")
            self.notes.append("fp16: as large as bf16, no faster, and it needs a loss scale")
        return tuple(here)

    def needs(self, base: Policy) -> Needs:
        """The model's layouts, whole and over each size of ``tp`` that it can be divided by; let go with the search."""
        mesh = inspect.signature(self.build).parameters.get("mesh")
        if mesh is not None and mesh.default is inspect.Parameter.empty:
            raise SimulationError(
                "find_policy expected a default for the build's parameter mesh, which is passed only if the mesh has a tp "
                "axis, found none. Write build(mesh=None)."
            )
        whole = self._built(1, base)
        place = next((param.device for param in tree.parameters(whole.model)), torch.device(NAME, 0))
        divided = {}
        for tp in self._sizes():
            try:
                split = self._built(tp, base)
            except Exception as error:
                self.notes.append(f"tp {tp}: build raised {said(error)}")
                continue
            if any(isinstance(param, DTensor) for param in tree.parameters(split.model)):
                divided[tp] = split
            else:
                self.notes.append(f'tp {tp}: build returned a model with no parameter divided over mesh["tp"]')
        return Needs(whole.model, whole.optimizer, base, self.world, whole.ignored, place, divided=divided)

    def _built(self, tp: int, base: Policy) -> Built:
        with Machine(HardwareCosts(self.hardware, self.world)).on(), ranks_on_paper(self.world):
            sizes = (self.world // tp, tp)
            mesh = [] if tp == 1 else [init_device_mesh(NAME, sizes, mesh_dim_names=("shard", "tp"))]
            with torch.device(NAME):
                found: Any = self.build(*mesh)
        model, *optimizers = found if isinstance(found, tuple) else (found,)
        check_module(model)
        return Built(model, next(iter(optimizers), None), Ignored.of(model, base.units.ignore, ShardedTensor))

    def _sizes(self) -> list[int]:
        """Divisors of a node, for links between nodes are too slow to wait for in every layer."""
        most = math.gcd(self.world, self.hardware.device.count)
        sizes = [size for size in range(2, most + 1) if most % size == 0]
        mesh = inspect.signature(self.build).parameters.get("mesh")
        if mesh is None or not sizes:
            return []
        if self.batched() == (None,):
            self.notes.append("tp: ranks that share samples need a larger batch, and step has no micro_batch and accumulation")
            return []
        return sizes


def said(error: BaseException) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
