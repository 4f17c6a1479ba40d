"""Whole values: of what an attachment ignores, on every rank; of flat buffers, gathered on the ranks that want them, and
sharded over all ranks from the first's.

A checkpoint of shards holds every rank's own values of what is ignored; a full state can hold one value a name, so ranks that
differ are refused.

Note: [Checksums in place of values]
    Frozen parameters of tensor subclasses (a quantised base) are in no file: only their library can write and read
    them.  What is saved names each with a checksum, and is loaded beside the same values alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.shards import digest
from zhooks import tree
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.layout import Ignored, is_divided, part_of
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Ranges, full_copies, spread


def plain_of(ignored: Ignored, verb: str) -> dict[str, nn.Parameter]:
    """The ignored parameters whose values are here, by name; those that another attachment has sharded are its own.

    Of frozen ones of tensor subclasses there are checksums (`checksums_of`).

    Raises:
        CheckpointError: one is of a class that keeps more than its values, and not frozen.
    """
    found = {
        name: param
        for name, param in ignored.params.items()
        if not isinstance(param, ShardedTensor) and (name not in ignored.frozen or param.requires_grad)
    }
    for name, param in found.items():
        if type(param) is not nn.Parameter and not is_divided(param):
            raise CheckpointError(
                f"{verb} expected the ignored {name} to be a plain parameter, or frozen since attach, found "
                f"{type(param).__module__}.{type(param).__qualname__}, which may hold more than its values. Save and load it "
                "yourself, or detach() first."
            )
    return found


def checksums_of(ignored: Ignored) -> dict[str, str]:
    """What stands for the values of frozen tensor subclasses; see Note [Checksums in place of values]."""
    return {name: one.checksum() for name, one in ignored.frozen.items()}


def left_out_names(model: nn.Module, ignored: Ignored) -> frozenset[str]:
    """What of the model's state dict a full state leaves out: frozen tensor subclasses, and what their modules say of them."""
    ids = {id(one.param) for one in ignored.frozen.values()}
    modules = {id(one.module): one for one in ignored.frozen.values()}
    names = {name for name, param in tree.named_parameters(model, remove_duplicate=False) if id(param) in ids}
    for prefix, module in tree.named_modules(model, remove_duplicate=False):
        if id(module) in modules:
            names.update(f"{prefix}.{key}".lstrip(".") for key in modules[id(module)].beside())
    return frozenset(names)


def check_left_out(ignored: Ignored, saved: object, verb: str) -> None:
    """What was saved was saved beside the frozen tensor subclasses that are here.

    Raises:
        CheckpointError: others, or others' values.
    """
    here = checksums_of(ignored)
    if saved == here:
        return
    theirs = saved if isinstance(saved, Mapping) else {}
    name = next(name for name in sorted({*here, *theirs}) if here.get(name) != theirs.get(name))
    where = "here" if name in here else "in the checkpoint"
    found = f"different values of {name}" if name in here and name in theirs else f"{name} only {where}"
    raise CheckpointError(
        f"{verb} expected the same frozen parameters of tensor subclasses (the quantised base) as when this was saved, by "
        f"checksum, because their values are not in it; found {found}. Build the same base, quantised in the same way, and "
        "load again."
    )


def check_own(ignored: Ignored, verb: str) -> None:
    """Raise CheckpointError where a verb over whole values meets one that another attachment keeps."""
    for name, param in ignored.params.items():
        if isinstance(param, ShardedTensor):
            raise CheckpointError(
                f"{verb} expected only parameters of this attachment, found {name} of another, whose full values this one "
                "does not have. Call save() and load() of both attachments, or detach() that one first."
            )


def check_writable(verb: str, tensors: Mapping[str, Tensor]) -> None:
    """What a load overwrites in place can be: torch refuses to write to an expanded tensor or one made in inference mode.

    Raises:
        CheckpointError: one cannot.
    """
    for name, tensor in tensors.items():
        local = part_of(tensor)
        try:
            with torch.inference_mode(False), torch.no_grad():
                # Its own values: torch says now what it would say when others are loaded.
                local.copy_(local.clone())
        except RuntimeError as error:
            raise CheckpointError(
                f"{verb} expected buffers and parameters that can be written to, found {name}: {error} Replace it by a copy "
                "(module.name = module.name.clone()) and load again."
            ) from error


def check_alike(
    model: nn.Module, ignored: Ignored, comm: Comm, verb: str, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """What is ignored has one value for all ranks, so that a full state can hold it.  Collective where anything is ignored.

    Raises:
        CheckpointError: ranks differ, or another attachment has it; on every rank.
    """
    if not ignored:
        return
    ranks = ControlPlane(comm.stage, verb, "the parameters in [units] ignore")

    def digests() -> dict[str, str]:
        check_own(ignored, verb)
        values: dict[str, Tensor] = {name: part_of(param) for name, param in plain_of(ignored, verb).items()}
        left = ignored.buffers()
        values |= {name: part_of(buffer) for name, buffer in tree.named_buffers(model) if id(buffer) in left}
        for name, param in ignored.params.items():
            states = {} if optimizer is None else optimizer.state.get(param, {})
            values |= {f"{name} ({key})": value for key, value in states.items() if isinstance(value, Tensor)}
        return {name: digest([value]) for name, value in values.items()} | checksums_of(ignored)

    mine = ranks.run(digests)
    first: Mapping[str, str] = ranks.on_first(lambda: mine)

    def compare() -> None:
        differ = sorted(name for name in {*first, *mine} if first.get(name) != mine.get(name))
        if differ:
            more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
            raise CheckpointError(
                f"{verb} expected the parameters in [units] ignore to be the same on every rank, because a full state holds "
                f"them once; found other values of {differ[0]}{more} than on the first rank. Use save(), which keeps every "
                "rank's values, or make the ranks equal: zhooks does not reduce these gradients."
            )

    ranks.run(compare)


# Of flat buffers: one flat in memory, or over tp one parameter.


def is_first(comm: Comm) -> bool:
    """This rank gives and gets full state: the first of all that attached the model."""
    return comm.stage.axis.rank == 0


def whole_values(flat: Flat, ranges: Ranges, wanted: Collection[int], device: torch.device) -> list[Tensor | None]:
    """New global plain tensors, one a parameter, of those ``wanted`` on this rank, on ``device``.  Collective.

    A parameter that is divided over tp is gathered on every rank of that axis first.
    """
    divided = [index for index, spec in enumerate(flat.specs) if spec.place is not None]
    if not divided:
        return full_copies(flat, ranges, wanted=wanted, device=device)
    copies = full_copies(flat, ranges, wanted={*divided, *wanted})
    whole = [None if copy is None else spec.whole(copy) for spec, copy in zip(flat.specs, copies, strict=True)]
    return [None if value is None or index not in wanted else value.to(device) for index, value in enumerate(whole)]


def from_first(comm: Comm, name: str, given: Any, whole: Tensor) -> Tensor:
    """The first rank's value in ``whole`` on every rank; ``given`` is read there alone.  Collective."""
    if is_first(comm) and isinstance(given, Tensor):
        whole.copy_(given)
    comm.stage.broadcast(Call(CONTROL, "load", name), whole)
    return whole


def spread_values(comm: Comm, flat: Flat, tensors: Sequence[Any], shard: Tensor) -> None:
    """Rank 0's full tensors as every rank's range in ``shard``, in chunks, or over tp one parameter in memory at a time."""
    if comm.tp.axis.world == 1:
        spread(flat, tensors if is_first(comm) else None, shard, comm.world.broadcast)
        return
    shard.zero_()
    for index, (spec, tensor) in enumerate(zip(flat.specs, tensors, strict=True)):
        if spec.numel:
            order = torch.zeros(spec.numel, dtype=shard.dtype, device=flat.kind.device)
            whole = order.as_strided(spec.shape, spec.stride)
            if tensor is not None:
                whole.copy_(tensor)
            from_first(comm, spec.name, None, order)
            flat.local(index, shard).copy_(spec.take(whole))
