"""Errors that several packages raise alike."""

from __future__ import annotations

from collections.abc import Iterable

from offload.errors import AttachError, PolicyError, ShardedOpError

__all__ = ["captured", "modified", "no_accumulation", "not_stepped", "too_late", "too_old", "transformed"]


def too_late(what: str, found: str) -> ShardedOpError:
    """Something came between backward and step that an update made in backward could not know of."""
    return ShardedOpError(
        f"{what} expected nothing between backward and step, because [optimizer] overlap = true updates in backward, found "
        f"{found}. This step's early updates were made without it; set overlap = false."
    )


def not_stepped(what: str, optimizer: str, found: str) -> ShardedOpError:
    """Parameters were updated in backward for an optimizer whose step did not come."""
    return ShardedOpError(
        f"{what} expected {optimizer}.step() after backward, because [optimizer] overlap = true has updated its parameters "
        f"in backward, found {found}. These updates have been made: load a checkpoint if the values matter. Step the same "
        "optimizer after every backward and delete one that you replace, or set overlap = false."
    )


def no_accumulation() -> PolicyError:
    """Several backward passes shall make one gradient, and the first of them would be stepped with."""
    return PolicyError(
        "[optimizer] overlap = true needs one backward per step, found accumulate() or a pipeline's microbatches, whose "
        "gradients are complete only after the last. Set overlap = false."
    )


def too_old(what: str) -> AttachError:
    """A graph that was made while the model was attached is used afterwards."""
    return AttachError(
        f"{what} expected backward before detach, found a graph of the attached model afterwards. Run backward() first, or "
        "the forward again."
    )


def transformed(what: str, found: Iterable[str]) -> ShardedOpError:
    """A transform of torch.func is to go through gathers and reductions, which it cannot."""
    return ShardedOpError(
        f"forward of {what} expected a call outside of torch.func transforms, found one inside torch.func "
        f"({', '.join(sorted(found))}). Use backward() or torch.autograd.grad, vmap under torch.no_grad(), or the plain model: "
        "detach() first."
    )


def captured(verb: str, what: str) -> ShardedOpError:
    """torch is to keep a forward as a program of its own, in which nothing gathers."""
    return ShardedOpError(
        f"Cannot {verb} {what}. Expected a plain model, found an attached one, whose gathered values would become constants "
        f"of the program. Call attachment.detach(), {verb} the model, attach again."
    )


def modified(what: str, found: int, expected: int) -> RuntimeError:
    """Plain PyTorch's error for a value that was changed between its use in forward and backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}] is at version {found}; expected version {expected} instead."
    )
