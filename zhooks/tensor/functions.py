"""What happens when a sharded tensor meets a torch function: the safety net of law 2, above autograd.

With grad enabled, a bound parameter that requires grad is replaced by its gathered value, a node of the graph whose backward
reduces; everything else falls through to ``aten.py``.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError, ShardedOpError
from zhooks.layout import is_divided, whole_of
from zhooks.refusals import captured
from zhooks.tensor.elementwise import change, new_like, readable_whole, stepping, whole_value
from zhooks.tensor.group import Owner
from zhooks.tensor.shard import RealShard, VectorShard, not_in_a_vector
from zhooks.tensor.sharded import (
    FUNCTIONS,
    OTHERS,
    RangeTensor,
    ShardedTensor,
    ShardedVector,
    range_alone,
    refuse_gradients,
    swapped,
)
from zhooks.tensor.stored import Args, Kwargs

Function = Callable[..., Any]

# Asking a parameter about itself gathers nothing.
_ABOUT = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr", "untyped_storage", "type", "is_shared",
        "__len__", "__hash__", "detach", "detach_", "requires_grad_", "retain_grad", "__reduce_ex__", "__deepcopy__",
        "__repr__",
        "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "is_same_size", "backward", "grad",
        "to_local", "full_tensor", "_is_view", "is_inference", "is_pinned", "__format__", "__dir__", "is_nonzero", "is_tensor",
        "is_set_to", "pin_memory", "__setstate__", "has_names", "result_type", "is_conj", "is_neg", "dim_order", "is_leaf",
    }
)  # fmt: skip
_PROPERTIES: Any = Tensor
_GATHERED_GETTERS = frozenset(getattr(_PROPERTIES, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
#: What copies a state dict to the host before ``torch.distributed.checkpoint.async_save`` writes it.
_STAGER = "torch.distributed.checkpoint._state_dict_stager"


def with_values(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Carry out ``func``, one of whose arguments is a sharded tensor."""
    if torch.is_grad_enabled() and _uses_values(func):
        args, kwargs, found = _gathered(args, kwargs)
        if found:
            return func(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        constant = any(isinstance(value, RangeTensor) and not value.requires_grad for value in tensors)
        if constant and any(value.requires_grad and not isinstance(value, RangeTensor) for value in tensors):
            # A weight of a penalty (EWC's Fisher information) meets a graph, whose gradients are whole: so is what it computes.
            with torch.no_grad():
                args, kwargs = tree_map_only(RangeTensor, _constant, (args, kwargs))
            return func(*args, **kwargs)
    out = kwargs.get("out") if kwargs else None
    if out is not None and not _is_or_has_sharded(out) and not torch.is_grad_enabled():
        # Some functions write to no ``out=`` where an argument is of a class that torch does not know.
        args, kwargs, _ = _gathered(args, kwargs, frozen=True)
    if isinstance(out, RangeTensor) and not torch.is_grad_enabled() and not any(map(_is_or_has_sharded, args)):
        # Made of nothing sharded (torch.randn): some such functions resize what they are given, which no parameter bears.
        fresh = new_like(out)
        func(*args, **{**kwargs, "out": fresh})
        if fresh.shape == out.shape:
            return out.copy_(fresh)
    with torch._C.DisableTorchFunctionSubclass():
        if out is None and not torch.is_grad_enabled() and _uses_values(func):
            # What is read of a gathered value is no view of the parameter: autograd would keep that, and detach needs it back.
            with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _constant(tensor: RangeTensor) -> Tensor:
    """All of what gets no gradient; a copy of a parameter that trains by itself as it is."""
    return tensor if tensor.requires_grad else whole_value(tensor)


def _is_or_has_sharded(value: Any) -> bool:
    return isinstance(value, RangeTensor) or (isinstance(value, (list, tuple)) and any(map(_is_or_has_sharded, value)))


def _uses_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func in _GATHERED_GETTERS
    # An in-place function on a leaf that requires grad is autograd's own error, raised below.
    return name not in _ABOUT and not (name.endswith("_") and not name.endswith("__"))


def _gathered(args: Args, kwargs: Kwargs, *, frozen: bool = False) -> tuple[Args, Kwargs, bool]:
    """Replace bound parameters that require grad, or all, by their gathered values, one level of lists deep."""
    found = False
    # Among DTensors a parameter that was one is one; anything else meets its whole value.
    among = any(is_divided(value) for value in (*args, *kwargs.values()))

    def swap(value: Any) -> Any:
        nonlocal found
        if isinstance(value, RangeTensor):
            if owner := value.local_shard.owner:
                owner.engine.before_use()
            # Which may have bound it to another flat.
            shard = value.local_shard
            if shard.owner and (frozen or value.requires_grad):
                found = True
                view = shard.owner.view(shard.spec.index)
                return view if among else whole_of(view)
        elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(swap(item) for item in value)
        return value

    # What is written to stays what it is: of a leaf that requires grad autograd refuses the write itself.
    named = {key: value if key == "out" else swap(value) for key, value in kwargs.items()}
    return tuple(swap(arg) for arg in args), named, found


def _owner(value: Any) -> Owner | None:
    """The flat buffer of a bound tensor."""
    return value.local_shard.owner if isinstance(value, RangeTensor) else None


def _plain(func: Function, args: Args, kwargs: Kwargs) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _like(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``p.view_as(p)`` asks for the node that accumulates a parameter's gradient: torch's zero-bubble schedules do."""
    if len(args) != 2 or args[0] is not args[1]:
        return with_values(func, args, kwargs)
    if owner := _owner(args[0]):
        owner.node_asked = True
    return _plain(func, args, kwargs)


def _to(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """What is there already stays the object it is; ``cpu:0``, which libraries pass on, is not ``cpu`` to torch."""
    tensor, where = args[0], ("cpu", *args[1:]) if func is Tensor.cpu else args[1:]
    if not isinstance(tensor, RangeTensor) or kwargs.get("copy"):
        return with_values(func, args, kwargs)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            named = {key: value for key, value in kwargs.items() if key != "copy"}
            device, dtype, _, order = torch._C._nn._parse_to(*where, **named)
    except (TypeError, RuntimeError):  # a copy by position, or what torch itself will refuse
        return with_values(func, args, kwargs)
    here = device is None or device == tensor.device or device.type == tensor.device.type == "cpu"
    there = here and dtype in (None, tensor.dtype) and order in (None, torch.preserve_format)
    return tensor if there else with_values(func, args, kwargs)


def _change(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """What optimizers do to every parameter in every step, outside any graph: on the ranges, past autograd and its dispatch."""
    if torch.is_grad_enabled() or not change(func, args, kwargs):
        return with_values(func, args, kwargs)
    torch.autograd.graph.increment_version(args[0])
    return args[0]


def _as_real(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """What optimizers do to complex tensors.  To autograd, which would keep the parameter, it is no view.

    Elsewhere a parameter is read whole.
    """
    tensor = args[0]
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    if recorded or tensor.local_shard.spec.division is not None or (readable_whole(tensor) and not stepping()):
        return with_values(func, args, kwargs)
    return tensor.as_real()


def _as_complex(func: Function, args: Args, kwargs: Kwargs) -> Any:
    return args[0].as_complex() if isinstance(args[0].local_shard.spec, RealShard) else with_values(func, args, kwargs)


def _requires_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    if torch.__future__.get_swap_module_params_on_conversion():
        maker = sys._getframe(3)
        if maker.f_globals.get("__name__") == "torch.nn.modules.module":  # _apply makes what it will swap in
            raise swapped(tensor.local_shard.spec.name)
    before, owner = tensor.requires_grad, tensor.local_shard.owner
    out = _plain(func, args, kwargs)
    if tensor.requires_grad == before:
        return out
    if owner is None:
        refuse_gradients(tensor)
    elif isinstance(tensor, torch.nn.Parameter):
        owner.engine.relayout()
    elif tensor.requires_grad and sys._getframe(2).f_globals.get("__name__") != torch.utils.checkpoint.__name__:
        # Of a reentrant checkpoint's input, the node that stands for the parameter takes the gradient, as it should.
        raise ShardedOpError(
            f"Cannot set requires_grad of a detached {tensor.local_shard.spec.name}. Expected an independent tensor, found an "
            "alias of the attached parameter, which would get its gradients. Use full_tensor().requires_grad_(), or the "
            "parameter itself."
        )
    return out


def _register_hook(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Put a hook in the parameter's own table; torch itself answers where there is nothing to hook (frozen: an error)."""
    shard = args[0].local_shard
    if not (shard.owner and args[0].requires_grad):
        return _plain(func, args, kwargs)
    table: OrderedDict[int, Function] = shard.spec.hooks if func is Tensor.register_hook else shard.spec.post_hooks
    # torch's own handle: its numbers are the ones that hooks from before attach have in the same table.
    handle = RemovableHandle(table)
    table[handle.id] = args[1] if len(args) > 1 else kwargs["hook"]
    return handle


def _about(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """What fully_shard and FullyShardedDataParallel ask a parameter before they change anything: they would take its range."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith("torch.distributed.fsdp") and _owner(args[0]):
        raise AttachError(
            f"Parameter {args[0].local_shard.spec.name} is attached already. Expected fully_shard or FullyShardedDataParallel "
            "to get a plain model, found an attached one, which is partitioned already. Train the attached model as it is, or "
            "detach() it first."
        )
    return _plain(func, args, kwargs)


def _new_empty(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """torch's asynchronous save makes one of every tensor and copies the attributes, which are the range, over to it."""
    tensor, shard = args[0], args[0].local_shard
    if sys._getframe(2).f_globals.get("__name__") != _STAGER:
        return with_values(func, args, kwargs)
    return type(tensor)(torch.empty(0, dtype=shard.memory.dtype, device="cpu"), shard.spec, device=torch.device("cpu"))


def _new(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``p.new(p.numel())``: what stands for a missing gradient in a vector, so of the parameter's range too."""
    tensor, sizes = args[0], args[1:]
    spec = tensor.local_shard.spec if isinstance(tensor, ShardedTensor) else None
    if spec is None or torch.is_grad_enabled() or kwargs or sizes != (spec.numel,) or not spec.contiguous:
        return with_values(func, args, kwargs)
    if not_in_a_vector(spec, spec):
        return with_values(func, args, kwargs)
    device = tensor.local_shard.device
    return ShardedVector(torch.zeros(spec.own_numel, dtype=tensor.dtype, device=device), VectorShard((spec,)), device=device)


def _set_data(func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor, value = args[0], args[1]
    if value is tensor:  # Module._apply of what changed nothing
        return None
    if not isinstance(tensor, RangeTensor):
        raise ShardedOpError(
            "Cannot set .data. Expected a plain tensor, found a sharded one. Use full_tensor() for the whole value, or "
            "to_local()."
        )
    same = isinstance(value, Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
    if not same or value.device != tensor.device:
        raise ShardedOpError(
            f"Cannot set {tensor.local_shard.spec.name}.data. Expected a tensor of shape {tuple(tensor.shape)}, "
            f"{tensor.dtype} on {tensor.device}, found "
            f"{tuple(value.shape)}, {value.dtype} on {value.device}. Call attachment.detach(), change the model, attach again."
        )
    if isinstance(value, RangeTensor):
        if value.local_shard.memory is tensor.local_shard.memory:
            return None
        # Another parameter's range has the same elements on some ranks at most.
        if value.local_shard.spec is not tensor.local_shard.spec:
            value = value.full_tensor()
    with torch.no_grad():
        tensor.leave()
        tensor.copy_(value)
    return None


def _set_item(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``parameter[index] = value``: change the whole value, keep this rank's range."""
    tensor, index, value = args
    if not isinstance(tensor, RangeTensor):
        return _plain(func, (tensor, index, value.full_tensor() if isinstance(value, RangeTensor) else value), kwargs)
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if _over_range(tensor, index, value):
        tensor.local_shard.values[index.local_shard.values] = value
        tensor.local_shard.written()
        return None
    whole = tensor.full_tensor()
    whole[index] = value.full_tensor() if isinstance(value, RangeTensor) else value
    with torch.no_grad():
        tensor.copy_(whole)
    return None


def _over_range(tensor: RangeTensor, index: Any, value: Any) -> bool:
    """A number is put where a mask over the same range says so (Rprop does): no other rank is needed."""
    number = isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
    masked = isinstance(index, RangeTensor) and index.dtype is torch.bool and index.local_shard.spec is tensor.local_shard.spec
    return masked and number and tensor.local_shard.device.type == "cpu"


def _refused(func: Function, args: Args, kwargs: Kwargs) -> Any:
    name = next(value.local_shard.spec.name for value in args if isinstance(value, RangeTensor))
    raise ShardedOpError(
        f"Cannot compute {getattr(func, '__name__', func)} of {name}. Expected the whole tensor, found one rank's "
        "range. Use full_tensor(), or read it inside `with attachment.gathered(parameter):`."
    )


def _list(func: Function, args: Args, kwargs: Kwargs) -> Any:
    return args[0].full_tensor().tolist() if readable_whole(args[0]) else _refused(func, args, kwargs)


def _array(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """An array of the whole value, which cannot be written: that would be lost."""
    tensor = args[0]
    if not readable_whole(tensor):
        return _refused(func, args, kwargs)
    if tensor.requires_grad and not kwargs.get("force"):
        # torch's own error.
        return func(torch.empty(0, dtype=tensor.dtype, device=tensor.device, requires_grad=True), *args[1:], **kwargs)
    array = func(tensor.full_tensor(), *args[1:], **kwargs)
    array.flags.writeable = False
    return array


def _format(func: Function, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    number = tensor.dim() == 0 and readable_whole(tensor) and not isinstance(tensor, torch.nn.Parameter)
    return tensor.full_tensor().__format__(*args[1:]) if number else _plain(func, args, kwargs)


def _stored(func: Function, args: Args, kwargs: Kwargs) -> Any:
    # torch.export makes a stand-in of each parameter before it calls the model.
    if sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils":
        raise captured("export", f"the model of {args[0].local_shard.spec.name}")
    raise range_alone("use the storage of", args[0])


FUNCTIONS.update({
    OTHERS: with_values,
    _PROPERTIES.shape.__get__: _about,
    _PROPERTIES.is_meta.__get__: _about,
    Tensor.add_: _change,
    Tensor.mul_: _change,
    Tensor.lerp_: _change,
    Tensor.addcmul_: _change,
    Tensor.addcdiv_: _change,
    Tensor.to: _to,
    Tensor.cpu: _to,
    Tensor.new_empty: _new_empty,
    Tensor.new: _new,
    torch.view_as_real: _as_real,
    torch.view_as_complex: _as_complex,
    Tensor.view_as: _like,
    Tensor.expand_as: _like,
    _PROPERTIES.requires_grad.__set__: _requires_grad,
    Tensor.requires_grad_: _requires_grad,
    Tensor.register_hook: _register_hook,
    Tensor.register_post_accumulate_grad_hook: _register_hook,
    Tensor.__setitem__: _set_item,
    _PROPERTIES.data.__set__: _set_data,
    Tensor.numpy: _array,
    Tensor.tolist: _list,
    Tensor.__array__: _array,
    Tensor.__format__: _format,
    Tensor.share_memory_: _refused,
    Tensor.untyped_storage: _stored,
    Tensor.storage: _stored,
    torch.autograd.grad: _plain,
    torch.autograd.backward: _plain,
})
