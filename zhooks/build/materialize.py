"""Models built under ``torch.device("meta")``: memory and values for each unit just before it is sharded.

What has no initialiser was refused before (``plan/checks.py``), what an initialiser leaves out is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from offload.errors import AttachError
from offload.virtual import NAME
from zhooks import tree
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, Transport
from zhooks.layout import Division, Group, Ignored, part_of
from zhooks.plan import initialiser_of, is_meta

#: A byte of memory that no initialiser has written yet; no float or integer of it is a usual initial value.
_UNWRITTEN = 0xA5


class Materializer:
    """Fills meta parameters and buffers by ``init``, ``reset_parameters`` or the root's ``_init_weights``."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        init: Callable[[nn.Module], None] | None,
        sync: bool,
        ignored: Ignored,
        gives: bool,
    ) -> None:
        """``gives``: other ranks are made equal to this one, or none is to another; it alone must write every value."""
        self._ignored, self._gives = ignored, gives
        self.model, self.device, self.sync = model, device, sync
        self._init = init
        self._done: set[int] = set()
        # Judged before anything has memory; a module's parameters may be placed before it is filled.
        self._meta = [module for module in tree.modules(model) if is_meta(module)]
        #: Names and places of tensors on meta, by module; each is marked once, whichever of its modules is filled first.
        self._unmarked: dict[int, list[tuple[str, dict[str, Any], str]]] = {}
        for prefix, module in tree.named_modules(model):
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and tensor.device.type == "meta" and device.type != NAME:
                        name = f"{prefix}.{key}" if prefix else key
                        self._unmarked.setdefault(id(module), []).append((name, cast("dict[str, Any]", table), key))
        self._marked: list[tuple[str, dict[str, Any], str, Tensor]] = []
        self._seen: set[int] = set()
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
        self._check()

    def buffers(self, comm: Comm) -> None:
        """Fill modules that own only buffers, then make all buffers equal to rank 0's, tp included where it has them whole."""
        with ControlPlane(comm.stage, "attach").all_or_none():
            for module in self._meta:
                if id(module) not in self._done:
                    self._fill(module)
            self._check()
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
            for name, table, key in self._unmarked.get(id(module), ()):
                if self._gives and id(table[key]) not in self._seen and part_of(table[key]).numel():
                    self._seen.add(id(table[key]))
                    memory = _bytes_of(part_of(table[key])).fill_(_UNWRITTEN)
                    self._marked.append((name, table, key, memory))
            initialise(module)

    def _check(self) -> None:
        """What has been filled since the last time has values.

        Raises:
            AttachError: an initialiser wrote nothing to a tensor.
        """
        marked, self._marked = self._marked, []
        left = [
            name
            for name, table, key, memory in marked
            if part_of(table[key]).data_ptr() == memory.data_ptr() and _unwritten(memory, table[key].element_size())
        ]
        if left:
            by = "init" if self._init is not None else "reset_parameters and _init_weights"
            raise AttachError(
                f"attach needs {by} to fill every parameter and buffer of a model on meta, found nothing written to "
                f"{', '.join(left[:5])}{' ...' if len(left) > 5 else ''}. A value computed in __init__ is lost on meta: pass "
                "init=function(module) that computes it."
            )


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor that has none; what is a DTensor stays one."""
    division, memory = Division.of(tensor), torch.empty_like(part_of(tensor), device=device)
    return memory if division is None else division.wrap(memory)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _unwritten(memory: Tensor, size: int) -> bool:
    """All of it is as it was marked; the elements at its ends say so of most tensors, without a comparison of the whole."""
    ends = all(bool((end == _UNWRITTEN).all()) for end in (memory[:size], memory[-size:]))
    return ends and bool((memory == _UNWRITTEN).all())


def swap_memory(param: nn.Parameter, memory: Tensor) -> None:
    """Real memory behind the same Parameter object."""
    made = nn.Parameter(memory, param.requires_grad)
    for key, value in param.__dict__.items():
        setattr(made, key, value)
    torch.utils.swap_tensors(param, made)
