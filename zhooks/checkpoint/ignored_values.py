"""What ``[units] ignore`` left plain, where an attachment writes or reads its whole state.

The other modules of this package ask it.  A checkpoint of shards holds every rank's own values; a full state has room for one
value a name, so ranks that differ are refused.  It never touches what another attachment has sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.shards import digest
from zhooks.comm import AllRanks, Comm
from zhooks.compiled import plain_name
from zhooks.layout import Ignored, is_divided, part_of
from zhooks.tensor import ShardedTensor

__all__ = ["check_alike", "check_own", "plain_of"]


def plain_of(ignored: Ignored, verb: str) -> dict[str, nn.Parameter]:
    """The ignored parameters whose values are here, by name; those that another attachment has sharded are its own.

    Raises:
        CheckpointError: one is of a class that keeps more than its values.
    """
    found = {name: param for name, param in ignored.params.items() if not isinstance(param, ShardedTensor)}
    for name, param in found.items():
        if type(param) is not nn.Parameter and not is_divided(param):
            raise CheckpointError(
                f"{verb}: expected {name}, which [units] ignore leaves as it is, to be a plain parameter, found "
                f"{type(param).__module__}.{type(param).__qualname__}, which may keep more than its values. Save and load it "
                "yourself, or detach() first."
            )
    return found


def check_own(ignored: Ignored, verb: str) -> None:
    """A verb over whole values meets none that another attachment keeps.

    Raises:
        CheckpointError: it does.
    """
    for name, param in ignored.params.items():
        if isinstance(param, ShardedTensor):
            raise CheckpointError(
                f"{verb}: expected all parameters to be this attachment's, found {name} in another's, whose full values it "
                "does not have. Call save() and load() of both attachments, or detach() that one first."
            )


def check_alike(
    model: nn.Module, ignored: Ignored, comm: Comm, verb: str, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """What is ignored has one value for all ranks, so that a full state can hold it.  Collective where anything is ignored.

    Raises:
        CheckpointError: ranks differ, or another attachment has it; on every rank.
    """
    if not ignored:
        return
    ranks = AllRanks(comm.stage, verb, "what [units] ignore leaves as it is")

    def digests() -> dict[str, str]:
        check_own(ignored, verb)
        return {name: digest([value]) for name, value in _values(model, ignored, verb, optimizer).items()}

    mine = ranks.run(digests)
    first: Mapping[str, str] = ranks.share(mine)

    def compare() -> None:
        differ = sorted(name for name in {*first, *mine} if first.get(name) != mine.get(name))
        if differ:
            more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
            raise CheckpointError(
                f"{verb}: expected what [units] ignore leaves as it is to be the same on every rank, for a full state holds it "
                f"once; found other values of {differ[0]}{more} than on the first rank. Use save(), which keeps every "
                "rank's, or make the ranks equal: nobody but you reduces these gradients."
            )

    ranks.run(compare)


def _values(
    model: nn.Module, ignored: Ignored, verb: str, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {name: part_of(param) for name, param in plain_of(ignored, verb).items()}
    left = ignored.buffers()
    values |= {plain_name(name): part_of(buffer) for name, buffer in model.named_buffers() if id(buffer) in left}
    for name, param in ignored.params.items():
        states = {} if optimizer is None else optimizer.state.get(param, {})
        values |= {f"{name} ({key})": value for key, value in states.items() if isinstance(value, Tensor)}
    return values
