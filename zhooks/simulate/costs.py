"""What operations, copies and collectives take on a hardware profile: a machine's `Costs` from ``offload.hardware``.

``run.py`` makes one for a simulation.  What an operation does is counted by ``offload.counting``; it keeps no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.counting import flops, moved, name_of
from offload.hardware import Collective, CostModel, Hardware
from offload.virtual import ACCELERATOR, HOST, Operation
from zhooks.simulate.slowdown import Pace, slowed

__all__ = ["HardwareCosts"]

_aten: Any = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm})
_COPIES = {(ACCELERATOR, ACCELERATOR): "d2d", (ACCELERATOR, HOST): "d2h", (HOST, ACCELERATOR): "h2d", (HOST, HOST): "h2h"}


class HardwareCosts:
    """Costs of one of ``world`` ranks, each with a device of its own; of the slowest where there is a ``pace``.

    Attributes:
        operations: how many of the device were asked for so far.
        flops: of all of them, and of the host's.
        link_nbytes: what this rank's collectives sent over its link.
        network_nbytes: what its node sent over the network for them, and for those of its other ranks' groups meanwhile.
    """

    def __init__(self, hardware: Hardware, world: int, pace: Pace | None = None) -> None:
        self.hardware, self.model = hardware, CostModel(hardware)
        self._compute = 1.0 if pace is None else pace.compute
        self._links = self.model if pace is None else CostModel(slowed(hardware, pace))
        self.accelerated = hardware.kind == "gpu"
        self.issue, self.call = self.model.dispatch, hardware.host.call or 0.0
        # What ranks of one node share.
        self._beside = min(world, hardware.device.count)
        self.spare_cores = self.accelerated or hardware.host.cores > self._beside
        disk = 0 if hardware.disk is None else hardware.disk.count * hardware.disk.capacity
        self.memory = (hardware.device.memory, hardware.host.memory // self._beside, disk // self._beside)
        self.operations, self.flops, self.link_nbytes, self.network_nbytes = 0, 0, 0.0, 0.0
        self._operations: dict[Any, tuple[float, int]] = {}
        self._collectives: dict[Any, tuple[Collective, int]] = {}

    def operation(self, operation: Operation, index: int) -> float:
        known = self._operations.get((operation.kind, index))
        if known is None:
            known = self._take(operation, index)
            if operation.kind is not None:
                self._operations[operation.kind, index] = known
        seconds, flops = known
        self.operations += index == ACCELERATOR
        self.flops += flops
        return seconds

    def _take(self, operation: Operation, index: int) -> tuple[float, int]:
        overload, made = operation.overload, operation.made if operation.made is not None else operation.writes[0]
        done = flops(overload, operation.args, operation.kwargs, made)
        nbytes = moved(overload, operation.reads, operation.writes)
        if index == HOST and self.accelerated:
            return self.model.host_update(nbytes, done, self._beside), 0
        dtype = next((str(tensor.dtype) for tensor in operation.reads if tensor.is_floating_point()), "float32")
        size = _smallest(operation) if overload.overloadpacket in _PRODUCTS else None
        return self._compute * self.model.compute(done, nbytes, dtype, size, name_of(overload)), done

    def copy(self, source: int | None, out: int, nbytes: int) -> float:
        if not self.accelerated:
            return self.model.copy("h2h", nbytes, self._beside)
        direction = _COPIES[HOST if source is None else source, out]
        if direction == "d2d":
            return self._compute * self.model.copy(direction, nbytes)
        return self.model.copy(direction, nbytes, self._beside)

    def disk(self, verb: str, nbytes: int) -> float:
        return self.model.disk(verb, nbytes, sharing=self._beside)

    def collective(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        key = (kind, tuple(ranks[:2]), len(ranks), nbytes)
        known = self._collectives.get(key)
        if known is None:
            group = self.model.group(ranks)
            sharing = group.alike(self.hardware.device.count)
            known = self._collectives[key] = (self._links.collective(kind, nbytes, group, sharing=sharing), sharing)
        done, groups = known
        self.link_nbytes += done.link_nbytes
        self.network_nbytes += groups * done.network_nbytes
        return done.seconds


def _smallest(operation: Operation) -> int:
    """The smallest dimension of a matrix product."""
    matrices = [tensor.shape[-2:] for tensor in operation.reads if tensor.dim() >= 2][-2:]
    return min((length for shape in matrices for length in shape), default=1)
