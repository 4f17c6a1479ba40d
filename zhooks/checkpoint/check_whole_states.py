"""Dtypes of optimizer states as they are loaded, and whether those of parameters that are updated whole are as they should be.

``check_optimizers.py`` and ``check_states.py`` call it.  It never writes to an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import CheckpointError
from zhooks.checkpoint.saved_files import SavedFolder
from zhooks.checkpoint.shard_contents import RunState

__all__ = ["Follow", "check_fits", "check_whole", "converted", "dtypes_of", "follows", "state_dtype"]


def state_dtype(run: RunState, saved: torch.dtype, master_there: torch.dtype, master: torch.dtype) -> torch.dtype:
    """States of the masters' dtype follow it, as the optimizer would make them; others stay what they are."""
    if saved is not master_there or master is master_there or (run.rounding.stochastic and master is torch.bfloat16):
        return saved
    return master


Follow = Callable[[torch.dtype], torch.dtype]


def follows(run: RunState, param: nn.Parameter, folder: SavedFolder) -> Follow:
    """Of what dtype a state of a parameter that is updated whole is here, by that in the file."""
    for flat in run.flats:
        for member, spec in flat.members():
            if member is param and spec.name in folder.params:
                there, master = folder.params[spec.name].flat.dtype, flat.kind.master
                return lambda saved: state_dtype(run, saved, there, master)
    return lambda saved: saved


def converted(follow: Follow, value: Any) -> Any:
    """The tensors among these states in the dtypes that they have here; numbers stay what they are."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(follow(tensor.dtype)) if tensor.dim() else tensor

    return tree_map_only(Tensor, one, value)


def check_whole(optimizer: torch.optim.Optimizer, key: str, value: Any, held: Any, seen: list[Any]) -> None:
    """A state of a parameter that is updated whole, whose shape is the optimizer's affair: of the dtypes that it has here, and
    where there is none yet, of those that it has for other parameters of the same dtype.

    Args:
        value: as it will be here, without values.
        seen: the dtypes of the states of this name that were compared before.
    Raises:
        CheckpointError: another dtype, with which the optimizer would go on otherwise, or not at all.
    """
    saved = dtypes_of(value)
    expected = dtypes_of(held) or next(iter(seen), frozenset())
    seen += [saved] if saved else []
    if saved and expected and saved != expected:
        names = [", ".join(sorted(map(str, each))) for each in (expected, saved)]
        raise CheckpointError(
            f"load expected {type(optimizer).__name__}'s {key[:80]} in {names[0]}, as it has it for every parameter, found "
            f"{names[1]} in the checkpoint. Load another checkpoint."
        )


def dtypes_of(value: Any) -> frozenset[torch.dtype]:
    """Of the tensors that these are, numbers apart."""
    return frozenset(each.dtype for each in tree_leaves(value) if isinstance(each, Tensor) and each.dim())


def check_fits(optimizer: torch.optim.Optimizer, key: str, value: Any, follow: Follow) -> None:
    """Refuse numbers that would become infinite where the dtype of the masters, which this state follows, is narrower here.

    Args:
        value: with its values.
    """
    for each in tree_leaves(value):
        if isinstance(each, Tensor) and bool((each.to(follow(each.dtype)).isinf() & each.isfinite()).any()):
            raise CheckpointError(
                f"load expected numbers that {follow(each.dtype)} can hold, found larger ones in {type(optimizer).__name__}'s "
                f"{key[:80]}, saved as {each.dtype}. Attach a model in a dtype with that range."
            )
