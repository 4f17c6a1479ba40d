"""The way back: sharded parameters, gradients and optimizer states become plain and full again.

``session/open.py`` calls it at detach, and when an attach that failed is undone.  One flat at a time is whole.  It never closes
anything, and takes no hook away but gives parameters theirs back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zhooks.checkpoint import plain_states
from zhooks.optim import marked, state_keys, whole_vectors
from zhooks.run import rehook
from zhooks.tensor import ParamShard, ShardedTensor
from zhooks.unit import Flat, Ranges, Unit, all_copies, loose_references

__all__ = ["restore_units", "swap", "swap_out"]


def restore_units(
    model: nn.Module, units: Sequence[Unit], optimizers: Sequence[torch.optim.Optimizer], *, narrow: bool
) -> None:
    """Make parameters, their gradients and optimizer states plain and full; nothing of units that are.  Collective.

    ``narrow``: states were kept wider than the parameters, which a plain optimizer could not use; they take their dtype.
    """
    for optimizer in optimizers:
        whole_vectors(optimizer)
    with loose_references(model):
        for unit in units:
            _restore_unit(unit, optimizers, narrow)


@torch.no_grad()
def _restore_unit(unit: Unit, optimizers: Sequence[torch.optim.Optimizer], narrow: bool) -> None:
    for flat in unit.flats:
        if not flat.holds:
            continue  # plain already, or attach raised before this one held anything
        for optimizer in optimizers:
            _plain_states(flat, optimizer, narrow)
            plain_states(optimizer, flat.params, flat.transport)
        grads = [param.grad for param in flat.params]
        held = [isinstance(grad, ShardedTensor) for grad in grads]
        full_grads = _as_before(flat, grads) if any(held) else []
        values = _as_before(flat, flat.shard)
        for index, param in enumerate(flat.params):
            if not isinstance(param, ShardedTensor):
                continue
            plain = nn.Parameter(values[index], param.requires_grad)
            swap_out(flat.specs[index], param, plain)
            if any(held) and held[index]:
                param.grad = full_grads[index]
        flat.detach()


def _as_before(flat: Flat, ranges: Ranges) -> list[Tensor]:
    """Full values as the model had them: what was a DTensor is one.  Collective."""
    return [spec.wrap(part) for spec, part in zip(flat.specs, all_copies(flat, ranges), strict=True)]


def swap_out(spec: ParamShard, param: nn.Parameter, plain: nn.Parameter) -> None:
    """Make ``param`` what ``plain`` is, keeping identity, hooks and the user's attributes."""
    marked(plain, param)
    param.grad = None
    swap(param, plain)
    rehook(param, spec)


def swap(param: nn.Parameter, made: nn.Parameter) -> None:
    """Exchange the tensors of two parameters, past what a sharded one answers itself.

    Of one that was frozen while a graph (an earlier loss) still refers to it, torch asks for the node of the graph that keeps
    it, which autograd gives of what requires grad alone.

    Raises:
        RuntimeError: something else refers to one of them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        kept = (
            param._use_count() > 1  # type: ignore[attr-defined]
            and not param.requires_grad
            and (param.is_floating_point() or param.is_complex())
        )
        if kept:
            param.requires_grad_(True)
        try:
            torch.utils.swap_tensors(param, made)
        except RuntimeError:
            if kept:
                param.requires_grad_(False)
            raise


def _plain_states(flat: Flat, optimizer: torch.optim.Optimizer, narrow: bool) -> None:
    for key in state_keys(flat, optimizer):
        states = [optimizer.state.get(param, {}).get(key) for param in flat.params]
        values = _as_before(flat, states)
        for param, state, value in zip(flat.params, states, values, strict=True):
            if isinstance(state, ShardedTensor):
                wide = narrow and value.is_floating_point()
                optimizer.state[param][key] = value.to(flat.kind.master) if wide else value
