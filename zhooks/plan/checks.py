"""What one rank finds that cannot be attached, before ranks meet; ``plan.py`` compares over them.  No model is changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from offload.device import default_device
from offload.errors import AttachError, CapabilityError, CheckpointError, PolicyError
from offload.kernels import available as available_kernels
from offload.policy import Policy
from offload.text import counted, shown
from offload.tier import Tier
from zhooks import tree
from zhooks.layout import EP, PP, Axis, Ignored, Mesh, UnitPlan, flats_of, is_divided, part_of
from zhooks.optim import check_rounding, holders, holds, partitions
from zhooks.run import Before, wrapper
from zhooks.tensor import ShardedTensor
from zhooks.unit import loose_references


def check_arguments(optimizer: object, mesh: object, init: object, sync: object) -> None:
    """The kinds of what ``attach`` is given beside model and policy.

    Raises:
        AttachError: one is of another kind.
    """
    for name, value, fits, expected in (
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer"),
        ("mesh", mesh, isinstance(mesh, DeviceMesh), "a DeviceMesh, e.g. init_device_mesh(...),"),
        ("init", init, callable(init), "a function that is called with a module"),
    ):
        if value is not None and not fits:
            raise AttachError(
                f"attach expected {expected} or None as {name}, found {_kind(value)}. Pass one, or leave it out."
            )
    if not isinstance(sync, bool):
        raise AttachError(f"attach expected True or False as sync, found {_kind(sync)}. Leave it out if in doubt.")


def check_holds(optimizers: Sequence[object], model: nn.Module, verb: str) -> None:
    """What a verb of the attachment is given as optimizers.

    Raises:
        CheckpointError: one is none, or holds no parameter of the model.
    """
    params = list(tree.parameters(model))
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise CheckpointError(
                f"{verb} expected a torch.optim.Optimizer, several of them, or () for none, found {_kind(each)}. Pass the "
                "optimizer itself."
            )
        if params and not holds(each, params):
            raise CheckpointError(
                f"{verb} expected an optimizer of the model's parameters, found {type(each).__name__} with none of them. Pass "
                "the one that was built from model.parameters()."
            )


def _kind(value: object) -> str:
    """A short value itself, else its type."""
    if isinstance(value, (str, int, float)) or value is None:
        return shown(value) if isinstance(value, str) else repr(value)[:60]
    return f"the class {value.__name__[:60]}" if isinstance(value, type) else type(value).__name__[:60]


def check_module(model: object) -> None:
    """It is one.

    Raises:
        AttachError: it is something else.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach expected a torch.nn.Module, found {type(model).__name__}. Pass the model itself.")


def check_ignored(model: nn.Module, ignored: Ignored, policy: Policy) -> None:
    """What is left alone can be: it has memory, and nothing that is done to the rest of the model would falsify it.

    Raises:
        AttachError: it is on meta, or would get gradients that are scaled and never divided.
    """
    buffers = ignored.buffers()
    whole = [*ignored.params.items(), *((name, buffer) for name, buffer in tree.named_buffers(model) if id(buffer) in buffers)]
    bare = [name for name, tensor in whole if tensor.device.type == "meta"]
    if bare:
        subject, other = ("attach", "") if bare[0] in ignored.unnamed else ("[units] ignore", ", or take it out of ignore")
        raise AttachError(
            f"{subject} expected {bare[0]} to have memory, found it on meta: attach does not initialise parameters "
            f"that it leaves as they are. Give it memory and values before attach{other}."
        )
    left = ignored.identities()
    for name, module in ignored.named_modules(model):
        if is_meta(module) and any(id(param) in left for param in module._parameters.values()):
            raise AttachError(
                f"[units] ignore needs module {name or '(root)'} to be on meta or ignored, found parameters of both kinds: "
                "initialising the module would overwrite the ignored ones. Give the module memory before attach."
            )
    trained = [name for name, param in ignored.params.items() if param.requires_grad]
    if policy.precision.loss_scale is not None and trained:
        raise AttachError(
            f"[precision] loss_scale needs no trainable parameters in [units] ignore, found {_some(trained)}: their "
            "gradients would be scaled, and never unscaled. Unset loss_scale and scale with torch.amp.GradScaler."
        )


def check_model(model: nn.Module, ignored: Ignored) -> torch.device:
    """The device the model's parameters live on (CPU or CUDA where they are on meta).

    Raises:
        AttachError: attached already, no parameters, several devices, or a parameter we cannot shard.
    """
    for name, module in ignored.named_modules(model):
        where = f"its module {name}" if name else "it"
        if any(isinstance(hook, Before) for hook in module._forward_pre_hooks.values()):
            raise AttachError(
                f"attach expected a plain model, found {where} attached already. To change its policy, call "
                "apply() on that attachment; otherwise call detach() first."
            )
        around = wrapper(module)
        if around is not None:
            instead = "Put its .module in its place." if name else "Attach its .module, and drop the wrapper."
            raise AttachError(
                f"attach expected a plain model, found {where} wrapped in {around}, which would reduce the same gradients. "
                f"{'Attach the model without fully_shard.' if around == 'fully_shard' else instead}"
            )
    params = dict(ignored.named_parameters(model))
    _check_shown(model)
    if not params:
        found = "that [units] ignore names all of them" if ignored.params else "none"
        found = "only frozen tensor subclasses, which stay as they are" if ignored.unnamed else found
        raise AttachError(
            f"attach expected {type(model).__name__} to have parameters, found {found}. There is nothing to partition."
        )
    with loose_references(model):
        for name, param in params.items():
            _check_parameter(name, param, model)
    devices = sorted({str(param.device) for param in params.values()})
    if len(devices) > 1:
        raise AttachError(
            f"attach expected all parameters on one device, found {', '.join(devices)}. Call model.to({devices[0]!r}) first."
        )
    places = (tensor.device for tensor in (next(iter(params.values())), *tree.buffers(model)))
    return next((place for place in places if place.type != "meta"), None) or default_device()


def _check_parameter(name: str, param: nn.Parameter, model: nn.Module) -> None:
    if torch.nn.parameter.is_lazy(param):
        raise AttachError(
            f"Cannot attach parameter {name}. Expected a shape, found a lazy parameter. Run one forward on a small batch "
            "before attach."
        )
    if isinstance(param, ShardedTensor):
        raise AttachError(
            f"Cannot attach parameter {name}. Expected a plain parameter, found one of another attachment. Detach that first."
        )
    if type(param) is not nn.Parameter and not is_divided(param):
        raise AttachError(
            f"Cannot attach parameter {name}. Expected torch.nn.Parameter, found "
            f"{type(param).__module__}.{type(param).__qualname__}. Convert tensor subclasses to plain parameters before "
            "attach; a quantised one stays as it is where it is frozen (requires_grad_(False)) and has __tensor_flatten__ or "
            "memory of its own."
        )
    if param.layout is not torch.strided:
        raise AttachError(
            f"Cannot attach parameter {name}. Expected a dense tensor, found layout {param.layout}. Call .to_dense()."
        )
    if not param.is_leaf:
        raise AttachError(
            f"Cannot attach parameter {name}. Expected a leaf, found the result of {param.grad_fn}. Use a plain parameter."
        )
    if param.grad is not None and param.grad.layout is not torch.strided:
        raise AttachError(
            f"Cannot attach parameter {name}. Expected a dense gradient, found {param.grad.layout}. Set sparse=False."
        )
    # One reference is the module's object; a second may be the accumulation node of a graph that is gone.
    if param._use_count() > 2:  # type: ignore[attr-defined]
        raise AttachError(
            f"Cannot attach parameter {name}. Expected nothing else to refer to its memory, found {_holder(param, model)}"
        )
    if weakref.getweakrefcount(param):
        raise AttachError(
            f"Cannot attach parameter {name}. Expected no weak references to it, found {weakref.getweakrefcount(param)}. "
            "Delete what holds them (a WeakTensorKeyDictionary, another wrapper) before attach."
        )


#: Methods of a module that an optimizer's parameters may come from.
_SHOWN = ("parameters", "named_parameters", "modules", "named_modules", "children", "named_children")


def _check_shown(model: nn.Module) -> None:
    """A module that overrides how it shows its parameters may show fewer, but none that no module has registered."""
    known = {id(param) for param in tree.parameters(model)}
    for name, module in tree.named_modules(model):
        kind = type(module)
        if all(getattr(kind, method) is getattr(nn.Module, method) for method in _SHOWN):
            continue
        leaves = tree_leaves(list(module.parameters()))
        others = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad and id(each) not in known]
        if others:
            raise AttachError(
                f"attach expected {name or 'the model'} to register every parameter, found that parameters() of "
                f"{kind.__name__} returns {counted(len(others), 'trainable tensor')} that no module has, the first of shape "
                f"{tuple(others[0].shape)}: each rank would train its own. Assign it to an attribute of a module as an "
                "nn.Parameter, and keep modules in an nn.ModuleList."
            )


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _holder(param: nn.Parameter, model: nn.Module) -> str:
    """Who refers to the memory of ``param`` beside the model, as far as that can be seen, and what to do."""
    for found in gc.get_objects():
        around = wrapper(found) if issubclass(type(found), nn.Module) else None
        if around and any(param is each for each in tree.parameters(found)):
            return (
                f"{around} around the model, which listens to its gradients. Take the model out and delete the wrapper: "
                "model = wrapper.module; del wrapper."
            )
    for name, module in tree.named_modules(model):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return (
                    f"a graph of an earlier forward, kept in {f'{name}.{key}'.lstrip('.')}. Set it to None or detach it "
                    f"(module.{key} = module.{key}.detach()) before attach."
                )
    return (
        f"{param._use_count() - 1} references. Drop graphs (loss, outputs) of earlier forwards before attach."  # type: ignore[attr-defined]
    )


def check_division(model: nn.Module, tp: Axis, ignored: Ignored) -> None:
    """Every DTensor must be divided evenly, or whole, over the ``tp`` axis alone.

    Raises:
        AttachError: one lies over other ranks, or is uneven, or a partial sum.
    """
    named = [*tree.named_parameters(model, remove_duplicate=False), *tree.named_buffers(model, remove_duplicate=False)]
    left = ignored.identities() | ignored.buffers()
    for name, tensor in named:
        if id(tensor) in left or not is_divided(tensor):
            continue
        # Imported here: a model without DTensors needs none of it.
        from torch.distributed.tensor import Shard

        mesh, placed = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
        ranks = tuple(mesh.mesh.flatten().tolist())
        if mesh.ndim != 1 or ranks != tp.ranks:
            axes = "" if mesh.mesh_dim_names is None else f" (axes {', '.join(mesh.mesh_dim_names)})"
            raise AttachError(
                f"Cannot attach {name}. Expected a DTensor over the tp axis of the mesh given to attach, ranks "
                f"{list(tp.ranks)}, found one "
                f"over ranks {list(ranks)}{axes}, placed {placed}. Build one mesh with a dp and a tp axis, give "
                'parallelize_module mesh["tp"] and attach the whole mesh; fully_shard is not needed, attach partitions over dp.'
            )
        if not (placed[0].is_replicate() or type(placed[0]) is Shard):
            raise AttachError(
                f"Cannot attach {name}. Expected a DTensor placed Shard(dim) or Replicate() over tp, found {placed[0]}. Call "
                "redistribute() to one of these before attach."
            )
        if placed[0].is_shard() and tensor.shape[placed[0].dim] % tp.world:
            raise AttachError(
                f"Cannot attach {name}. Expected dim {placed[0].dim} of {tuple(tensor.shape)} to divide evenly over {tp.world} "
                f"tp ranks, found {tensor.shape[placed[0].dim]} elements. Pad it to a multiple of {tp.world}, or leave the "
                "module out of the plan."
            )


def check_embeddings(model: nn.Module, ignored: Ignored, axes: Mesh) -> None:
    """Embeddings that hand us dense gradients, and do not write to rows that other ranks did not look up.

    Raises:
        AttachError: one has ``sparse=True``, or ``max_norm`` on several ranks.
    """
    left, ranks = ignored.identities(), axes.data.world
    for name, module in ignored.named_modules(model):
        # By its table: a parametrized weight that is read is computed, which may change buffers.
        held = module._parameters.get("weight")
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or id(held) in left:
            continue
        if module.sparse:
            raise AttachError(
                f"Cannot attach module {name}. Expected dense gradients, found sparse=True. Build it with sparse=False: its "
                "gradient is reduced as part of a flat buffer."
            )
        if module.max_norm is not None and ranks > 1:
            raise AttachError(
                f"Cannot attach module {name}. Expected no max_norm on {ranks} ranks, found {module.max_norm}: its forward "
                "writes to only the rows of this rank's batch. Set max_norm = None; after each step, under no_grad, `with "
                "attachment.gathered(weight, write=True) as (rows,): rows.renorm_(2, 0, most)`."
            )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None, ignored: Ignored) -> None:
    """The optimizer passed must be the model's; others that already hold state must be passed."""
    params = ignored.parameters(model)
    if optimizer is not None and not holds(optimizer, params):
        raise AttachError(
            f"attach expected {type(optimizer).__name__} to hold parameters of {type(model).__name__}, found none "
            "of them. Build it from model.parameters()."
        )
    problem = partitions(optimizer)
    if problem:
        raise AttachError(problem)

    def others() -> list[str]:
        ours = None if optimizer is None else optimizer.state
        return [
            type(found).__name__
            for found in holders(params)
            if found.state is not ours and any(found.state.get(param) for param in params)
        ]

    # One that nobody refers to any more may only wait for the collector.
    if others() and gc.collect() >= 0 and (names := others()):
        raise AttachError(
            f"attach expected an optimizer without state, found {names[0]} with state for this model. Pass it: "
            "attach(model, optimizer); or, if a new one replaces it, delete it and its schedulers before attach."
        )


def check_scaled(model: nn.Module, policy: Policy, ignored: Ignored) -> None:
    """Gradients are kept in the parameters' own dtype: in fp16 they would vanish where the loss scale is taken off.

    Raises:
        AttachError: the policy scales the loss of a model with fp16 parameters.
    """
    half = [name for name, param in ignored.named_parameters(model) if param.dtype is torch.float16 and param.requires_grad]
    if policy.precision.loss_scale is not None and half:
        raise AttachError(
            f"[precision] loss_scale needs fp32 parameters, found {_some(half)} in fp16. Build the "
            'model in fp32 and set [precision] param = "fp16".'
        )


def check_resilience(policy: Policy, names: Sequence[str]) -> None:
    """What ``policy`` compares is compared between the ranks of one stage, which raise alone.

    Raises:
        AttachError: the mesh has an axis, one of ``names``, over which ranks train other parameters at other moments.
    """
    apart = [name for name in names if name in (PP, EP)]
    chosen = policy.resilience
    key = "check_every" if chosen.check_every is not None else "nonfinite" if chosen.nonfinite != "ignore" else ""
    if key and apart:
        raise AttachError(
            f"[resilience] {key} needs a mesh whose ranks all train one model together, found the axis "
            f"{apart[0]}, whose other ranks would wait for those that have raised. Leave it unset."
        )


def check_initialisers(model: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Every module on meta can be given values.

    Raises:
        AttachError: one has no initialiser, and none was passed.
    """
    meta = [(name, module) for name, module in tree.named_modules(model) if is_meta(module)] if init is None else []
    missing = [name or type(module).__name__ for name, module in meta if initialiser_of(model, module) is None]
    if missing:
        raise AttachError(
            "attach expected every module of a meta model to have reset_parameters, or the root _init_weights; found none for "
            f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Pass init=function(module)."
        )


def initialiser_of(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """The module's own reset, then the model's rule for its modules, which knows better where it says anything."""
    found = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    reset = next((method for method in found if callable(method)), None)
    weights = getattr(model, "_init_weights", None)
    if not callable(weights):
        return None if reset is None else lambda _: reset()

    def both(inner: nn.Module) -> None:
        if reset is not None:
            reset()
        weights(inner)

    return both


def is_meta(module: nn.Module) -> bool:
    """The module owns a tensor without memory."""
    tensors = [*tree.own_parameters(module), *module._buffers.values()]
    return any(tensor is not None and tensor.device.type == "meta" for tensor in tensors)


class _Range(NamedTuple):
    """The addresses from a tensor's first element to its last; others may have those between."""

    start: int
    stop: int
    name: str
    tensor: Tensor
    written: bool


def check_own_memory(model: nn.Module, ignored: Ignored) -> None:
    """No trainable parameter shares memory with another parameter or a buffer.

    Sharding copies each tensor, so that two objects over one memory would part without a word; the same object in two places
    is a tied weight, and fine.

    Raises:
        AttachError: one does.
    """
    trained = {id(param) for param in ignored.parameters(model) if param.requires_grad}
    ranges: list[_Range] = []
    for name, tensor in [*tree.named_parameters(model), *tree.named_buffers(model)]:
        part = tensor if torch.nn.parameter.is_lazy(tensor) else part_of(tensor)
        plain = type(part) in (Tensor, nn.Parameter) and part.layout is torch.strided
        if plain and part.device.type != "meta" and part.numel():
            start = part.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            ranges.append(_Range(start, start + (last + 1) * part.element_size(), name, part, id(tensor) in trained))
    reaches: list[_Range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        reaches = [other for other in reaches if other.stop > one.start and other.tensor.device == one.tensor.device]
        for other in reaches:
            if (one.written or other.written) and _meet(one, other):
                raise AttachError(
                    f"attach expected {one.name} to have memory of its own, found that it shares memory with {other.name}, "
                    "which is another tensor: each would be copied, and a step would no longer reach both. Tie them as one "
                    "object (b.weight = a.weight), or give one of them a copy (param.data = param.data.clone())."
                )
        reaches.append(one)


def _meet(one: _Range, other: _Range) -> bool:
    """They have an element in common: ranges that interleave (columns of one matrix) have none."""
    first, second = one.tensor, other.tensor
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() or first.dtype != second.dtype:
        return True
    begin = min(first.storage_offset(), second.storage_offset())
    size = (max(one.stop, other.stop) - min(one.start, other.start)) // first.element_size()
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    marks.as_strided(first.shape, first.stride(), first.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), second.storage_offset() - begin).any())


def check_compute(policy: Policy, device: torch.device, units: Sequence[UnitPlan]) -> None:
    """Where and by whom updates are to be computed must be possible.

    Raises:
        CapabilityError: the kernel cannot run where the policy wants it.
    """
    check_rounding(policy, [unit.group for unit in units])
    chosen = policy.optimizer
    if chosen.kernel == "numba":
        lacks = available_kernels()
        if device.type != "cpu" and chosen.compute == "device":
            lacks = f'the numba kernels run on the host, found compute = "device" on {device}; set [optimizer] compute = "host"'
        if lacks is not None:
            raise CapabilityError(f'[optimizer] kernel = "numba": {lacks}.')
    if chosen.compute == "device":
        return
    for flat in [flat for flat in flats_of(units) if flat.kind.trainable]:
        kind, tiers, name = flat.kind, flat.kind.tiers, flat.names[0]
        if chosen.device_share and tiers.optimizer is Tier.DEVICE:
            # It is updated there.
            continue
        if Tier.DEVICE in (tiers.gradient, tiers.optimizer) or (tiers.parameter is Tier.DEVICE and not kind.apart):
            raise CapabilityError(
                f'[optimizer] compute = "host" needs masters, gradient and states of {name} off the device, found '
                f"parameter {tiers.parameter.value}, gradient {tiers.gradient.value}, optimizer {tiers.optimizer.value}. Place "
                'them on "host" or "disk" (the parameter may stay where [precision] param is 16 bit), or compute = "device".'
            )


def check_change(old: Policy, new: Policy, fixed: Sequence[str]) -> None:
    """What ``Attachment.apply`` cannot change: these tables of a policy.

    Raises:
        PolicyError: the new policy changes one.
    """
    changed = [name for name in fixed if getattr(old, name) != getattr(new, name)]
    if changed:
        raise PolicyError(
            f"apply expected [{'], ['.join(changed)}] as at attach, found a change. Write it into the new policy as it was, "
            "or detach() and attach again."
        )
