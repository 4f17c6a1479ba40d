"""Where the loss scale enters and leaves the graph of a backward, and the proof that nothing goes round it.

``scaling.py`` puts a ``Boundary`` on what enters and leaves the model; ``prove`` reads the graph that is being run.  It
never changes a gradient by itself and knows no policy.

Note: [Inside and outside]
    Gradients are scaled *inside* the model and true outside.  A boundary stands on every output of an outermost forward
    (its backward multiplies), on every input that wants a gradient (its backward divides), and on a parameter that is
    used outside of any forward (its backward multiplies: a penalty in the loop).  So what reaches a unit's parameters is
    scaled by whatever way it came, losses, gradients of inputs, and gradients handed to another model are true, and the
    loop needs no change.  What a forward leaves behind in other ways (an attribute, a user's hook that keeps a hidden
    value) goes round the outputs' boundaries: its gradient would be added unscaled.  That cannot be seen where it
    happens, so the graph is walked, once a backward, from its roots; they are found in the frame of torch's own entry.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.errors import ScaleError, ShardedOpError
from zhooks.grad.node import Gather

if TYPE_CHECKING:
    from zhooks.grad.scaling import Scaling

__all__ = ["Boundary", "each", "prove"]

_ENTRY = "_engine_run_backward"


class Boundary(torch.autograd.Function):
    """The value as it is, in ``dtype`` where that is given; backward multiplies, in the wider of the two dtypes."""

    @staticmethod
    def forward(ctx: Any, scaler: Scaling, inward: bool, dtype: torch.dtype | None, value: Tensor) -> Tensor:
        ctx.scaler, ctx.inward, ctx.dtype = scaler, inward, value.dtype
        ctx.set_materialize_grads(False)
        # Not a view to autograd: the user may change an output in place.
        return value.detach() if dtype is None else value.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ShardedOpError(
                "backward with create_graph=True through a model whose policy has [precision] loss_scale expected first "
                "derivatives, found a request for a graph of them. Unset loss_scale and scale with torch.amp.GradScaler."
            )
        factor: float = ctx.scaler.crossed(ctx.inward)
        (grad,) = grads
        return None, None, None, None if grad is None else (grad * factor).to(ctx.dtype)


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with each floating tensor changed, in containers torch knows and in dataclasses.

    Itself where none is, and so is every container in it: a forward may write into what it is given.
    """
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    # By its identity: what torch flattens with is a cycle, which would keep the value's tensors until Python collects garbage.
    own = id(value)
    inner, structure = tree_flatten(value, is_leaf=lambda found: id(found) != own)
    if len(inner) == 1 and inner[0] is value:
        return _fields(value, change) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    changed = [each(found, change) for found in inner]
    if all(new is old for new, old in zip(changed, inner, strict=True)):
        return value
    return tree_unflatten(changed, structure)


def _fields(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a dataclass's instance whose fields are changed, or itself where nothing in it is."""
    fields = {field.name: getattr(found, field.name, None) for field in dataclasses.fields(found)}
    changed = {name: new for name, old in fields.items() if (new := each(old, change)) is not old}
    if not changed:
        return found
    made = object.__new__(type(found))
    for name, value in (getattr(found, "__dict__", None) or fields).items():
        object.__setattr__(made, name, changed.get(name, value))
    return made


def prove(scaler: Scaling) -> None:
    """Walk the graph of the backward that is running: every way to a parameter crosses a boundary inward, once.

    Raises:
        ScaleError: something goes round the scale; nothing has been updated.
    """
    frame = _entry()
    if frame is None:
        return
    held = frame.f_locals
    scaled = _walk([node for root in held.get("t_outputs", ()) if (node := _node(root)) is not None], scaler)
    rest = held.get("args", ())
    for wanted in rest[3] if len(rest) > 3 else ():
        node = _node(wanted)
        if node is not None and not hasattr(node, "variable") and scaled.get(node):
            raise _around(f"autograd.grad() of a value inside the model ({node.name()})")


def _node(place: Tensor | GradientEdge) -> Any:
    """The node of the graph that computed a value or, where a backward is given an edge, the one it leads to."""
    return place.node if isinstance(place, GradientEdge) else place.grad_fn


def _walk(roots: list[Any], scaler: Scaling) -> dict[Any, bool]:
    """Every node of the graph above the parameters -> whether the gradient that reaches it is scaled."""
    seen: dict[Any, bool] = {}
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:
        node, scaled = stack.pop()
        before = seen.get(node)
        if before is not None:
            if before is not scaled and _runs(node):
                raise _around(f"a value inside the model, computed by {node.name()}")
            continue
        seen[node] = scaled
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None:
            if kind is Gather and node.node.scaling is scaler:
                if not scaled and _runs(node):
                    raise _around(f"a value inside the model, computed with parameters of unit {node.flat.name}")
                continue
            if kind is Boundary and node.scaler is scaler:
                if scaled is node.inward and _runs(node):
                    raise _around("a value that did not enter the model through its arguments")
                scaled = node.inward
        elif scaled and hasattr(node, "variable") and _runs(node):
            shape = list(node.variable.shape)
            raise _around(f"a tensor of shape {shape} that requires grad and did not enter the model through its arguments")
        for following, _ in node.next_functions:
            if following is not None:
                stack.append((following, scaled))
    return seen


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch refuses to answer for a leaf that autograd.grad captures: it is wanted.
        return True


def _around(what: str) -> ScaleError:
    return ScaleError(
        f"backward under [precision] loss_scale expected a loss made of the model's outputs, inputs and parameters, found "
        f"{what}, whose gradient would bypass the scale. Return it from forward, or unset loss_scale and scale with "
        "torch.amp.GradScaler."
    )


def _entry() -> FrameType | None:
    """The frame that started the innermost backward: on this thread, or on another where a device has threads of its own."""
    # Not through a generator, whose frame has nobody behind it.
    for frame in (sys._getframe(), *sys._current_frames().values()):
        here: FrameType | None = frame
        while here is not None:
            if here.f_code.co_name == _ENTRY:
                return here
            here = here.f_back
    return None
