"""Models built under ``torch.device("meta")``: give each unit memory and values just before it is sharded.

``shard.py`` hands it every group in turn, then the buffers.  No more than one unit is whole at a time.  It never guesses
a value: what no initialiser fills was refused by name (``plan/initialisers.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from zhooks import tree
from zhooks.comm import CONTROL, Call, Comm, Transport, all_or_none
from zhooks.layout import Division, Group, Ignored, part_of
from zhooks.plan import initialiser_of, is_meta


class Materializer:
    """Fills meta parameters and buffers by ``init``, ``reset_parameters`` or the root's ``_init_weights``."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        init: Callable[[nn.Module], None] | None,
        sync: bool,
        ignored: Ignored,
    ) -> None:
        self._ignored = ignored
        self.model, self.device, self.sync = model, device, sync
        self._init = init
        self._done: set[int] = set()
        # Judged before anything has memory; a module's parameters may be placed before it is filled.
        self._meta = [module for module in tree.modules(model) if is_meta(module)]
        self._owners: dict[int, list[int]] = {}
        for place, module in enumerate(self._meta):
            for param in tree.own_parameters(module):
                self._owners.setdefault(id(param), []).append(place)

    def unit(self, group: Group) -> None:
        """Give the modules that own the group's parameters memory and values."""
        places = {place for param in group.params.values() for place in self._owners.get(id(param), ())}
        for module in [self._meta[place] for place in sorted(places)]:
            if id(module) not in self._done:
                self._fill(module)

    def buffers(self, comm: Comm) -> None:
        """Fill modules that own only buffers, then make all buffers equal to rank 0's, tp included where it has them whole."""
        with all_or_none(comm.stage, "attach"):
            for module in self._meta:
                if id(module) not in self._done:
                    self._fill(module)
        if self.sync:
            for name, buffer in self._ignored.named_buffers(self.model):
                division = Division.of(buffer)
                apart = division is not None and division.place is not None
                self._equal(name, part_of(buffer), comm.world if apart else comm.stage)

    @torch.no_grad()
    def _equal(self, name: str, buffer: Tensor, world: Transport) -> None:
        if buffer.is_contiguous() and not buffer.is_conj() and not buffer.is_neg():
            world.broadcast(Call(CONTROL, "broadcast buffer", name), buffer)
            return
        whole = buffer.resolve_conj().resolve_neg().contiguous()
        world.broadcast(Call(CONTROL, "broadcast buffer", name), whole)
        if not torch.equal(whole, buffer):
            owner, _, key = name.rpartition(".")
            table = self.model.get_submodule(owner)._buffers
            division = Division.of(cast(Tensor, table[key]))
            table[key] = whole if division is None else division.wrap(whole)

    def _fill(self, module: nn.Module) -> None:
        self._done.add(id(module))
        for param in module._parameters.values():
            if param is not None and param.device.type == "meta":
                swap_memory(param, _real(param, self.device))
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[key] = _real(buffer, self.device)
        initialise = self._init or initialiser_of(self.model, module)
        assert initialise is not None
        with torch.no_grad():
            initialise(module)


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor that has none; what is a DTensor stays one."""
    division, memory = Division.of(tensor), torch.empty_like(part_of(tensor), device=device)
    return memory if division is None else division.wrap(memory)


def swap_memory(param: nn.Parameter, memory: Tensor) -> None:
    """Real memory behind the same Parameter object."""
    made = nn.Parameter(memory, param.requires_grad)
    for key, value in param.__dict__.items():
        setattr(made, key, value)
    torch.utils.swap_tensors(param, made)
