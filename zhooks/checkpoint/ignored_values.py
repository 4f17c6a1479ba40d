"""What an attachment leaves as it is, where it writes or reads its whole state.

The other modules of this package ask it.  A checkpoint of shards holds every rank's own values; a full state can hold one
value a name, so ranks that differ are refused.  It never touches what another attachment has sharded.

Note: [Checksums in place of values]
    Frozen parameters of tensor subclasses (a quantised base) are in no file: only their library can write and read
    them.  What is saved names each with a checksum, and is loaded beside the same values alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.shards import digest
from zhooks import tree
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import Ignored, is_divided, part_of
from zhooks.tensor import ShardedTensor

__all__ = ["check_alike", "check_left_out", "check_own", "check_writable", "checksums_of", "left_out_names", "plain_of"]


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
    """A verb over whole values meets none that another attachment keeps.

    Raises:
        CheckpointError: it does.
    """
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
        values = _values(model, ignored, verb, optimizer)
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


def _values(
    model: nn.Module, ignored: Ignored, verb: str, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {name: part_of(param) for name, param in plain_of(ignored, verb).items()}
    left = ignored.buffers()
    values |= {name: part_of(buffer) for name, buffer in tree.named_buffers(model) if id(buffer) in left}
    for name, param in ignored.params.items():
        states = {} if optimizer is None else optimizer.state.get(param, {})
        values |= {f"{name} ({key})": value for key, value in states.items() if isinstance(value, Tensor)}
    return values
