"""What cannot be attached is refused: by one rank for itself, or by all because they differ.

``request.py`` asks before ranks meet, ``plan.py`` compares over them.  Every refusal says what failed, expected, found and what
to do.  It never changes a model.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from offload.device import default_device
from offload.errors import AttachError, CheckpointError
from offload.policy import Policy
from offload.text import counted, shown
from zhooks import tree
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, Transport, by_rank, text_digest
from zhooks.layout import EP, PP, Axis, Division, Group, Ignored, Mesh, is_divided, part_of
from zhooks.optim import holders, holds, partitions
from zhooks.plan.initialisers import is_meta
from zhooks.run import Before, wrapper
from zhooks.tensor import ShardedTensor
from zhooks.unit import loose_references

#: So many parameters that differ between ranks are named.
_NAMED = 2


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


def _unwrapped(name: str, around: str) -> str:
    if around == "fully_shard":
        return "Attach the model without fully_shard."
    return "Put its .module in its place." if name else "Attach its .module, and drop the wrapper."


def check_model(model: nn.Module, ignored: Ignored) -> torch.device:
    """The device the model's parameters live on (CPU or CUDA where they are on meta).

    Raises:
        AttachError: attached already, no parameters, several devices, or a parameter we cannot shard.
    """
    for name, module in ignored.named_modules(model):
        if any(isinstance(hook, Before) for hook in module._forward_pre_hooks.values()):
            where = f"its module {name}" if name else "it"
            raise AttachError(
                f"attach expected a plain model, found {where} attached already. To change its policy, call "
                "apply() on that attachment; otherwise call detach() first."
            )
        around = wrapper(module)
        if around is not None:
            where = f"its module {name}" if name else "it"
            raise AttachError(
                f"attach expected a plain model, found {where} wrapped in {around}, which would reduce the same gradients. "
                f"{_unwrapped(name, around)}"
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
    first = next(iter(params.values()))
    if first.device.type != "meta":
        return first.device
    buffers = [buffer for buffer in tree.buffers(model) if buffer.device.type != "meta"]
    if buffers:
        return buffers[0].device
    return default_device()


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
        if not (placed[0].is_replicate() or type(placed[0]) is _shard()):
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


def _shard() -> type:
    from torch.distributed.tensor import Shard

    return Shard


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


def check_same_model(groups: Sequence[Group], ignored: Ignored, world: Transport) -> None:
    """Every rank attaches the same parameters in the same units, beside the same frozen tensor subclasses.  Collective.

    Raises:
        AttachError: names, shapes, dtypes, requires_grad or units differ between ranks, or what a frozen subclass holds; it
            says what each rank has.
    """
    facts = [
        f"{name} {tuple(param.shape)} {param.dtype}, {'trainable' if param.requires_grad else 'frozen'}, in unit {number}"
        f"{f', {placements}' if (placements := getattr(param, 'placements', '')) else ''}"
        for number, group in enumerate(groups)
        for name, param in group.params.items()
    ]
    if world.axis.world > 1:
        frozen = {name: one for name, one in ignored.frozen.items() if name in ignored.unnamed}
        facts += [f"{name} {one.kind}, which is frozen, checksum {one.checksum()}" for name, one in frozen.items()]
    ranks = ControlPlane(world, "compare models")
    if ranks.agree("\n".join(facts)):
        return

    def on_each_rank(text: str) -> str:
        return by_rank(dict(zip(world.axis.ranks, ranks.texts(text), strict=True)))

    if not ranks.agree(str(len(facts))):
        found = on_each_rank(counted(len(facts), "parameter"))
    else:
        each = torch.tensor([text_digest(fact) for fact in facts], dtype=torch.int64, device="cpu")
        least, most = each.clone(), each.clone()
        world.all_reduce(Call(CONTROL, "compare models", "each parameter"), least, "min")
        world.all_reduce(Call(CONTROL, "compare models", "each parameter"), most, "max")
        differ = [fact for fact, same in zip(facts, (least == most).tolist(), strict=True) if not same]
        found = "; ".join(on_each_rank(fact) for fact in differ[:_NAMED])
        found += f"; and {counted(len(differ) - _NAMED, 'more parameter')}" if len(differ) > _NAMED else ""
    raise AttachError(f"attach expected the same model and policy on every rank, found {found}. Build the same on all ranks.")


def check_ranks_equal(model: nn.Module, comm: Comm, ignored: Ignored) -> None:
    """With ``sync=False``: every rank's parameters and buffers hash to the same, over tp too where it has them whole."""
    named = [*ignored.named_parameters(model), *ignored.named_buffers(model)]
    apart = {name for name, tensor in named if (division := Division.of(tensor)) is not None and division.place is not None}
    for ranks, compared in (
        (comm.world, named),
        (comm.tp, [(name, tensor) for name, tensor in named if name not in apart]),
    ):
        _check_equal(ranks, compared)


def _check_equal(ranks: Transport, named: Sequence[tuple[str, Tensor]]) -> None:
    digests = torch.tensor([_digest(part_of(tensor)) for _, tensor in named], dtype=torch.int64, device="cpu")
    low, high = digests.clone(), digests.clone()
    if digests.numel():
        ranks.all_reduce(Call(CONTROL, "compare ranks", "all parameters"), low, "min")
        ranks.all_reduce(Call(CONTROL, "compare ranks", "all parameters"), high, "max")
    differ = [name for (name, _), a, b in zip(named, low.tolist(), high.tolist(), strict=True) if a != b]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise AttachError(
            f"attach(sync=False) expected equal values on every rank, found that {', '.join(differ[:3])}{more} differ (rank "
            f"{ranks.axis.ranks[ranks.axis.rank]} among them). Use sync=True, or the same seed on every rank."
        )


def _digest(tensor: Tensor) -> int:
    if tensor.device.type == "meta":
        return 0
    raw = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw.data, digest_size=8).digest(), "little", signed=True)


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
