"""Errors that several rooms raise alike.

It formats messages and decides nothing.
"""

from __future__ import annotations

from offload.errors import AttachError, PolicyError, ShardedOpError

__all__ = ["no_accumulation", "too_late", "too_old"]


def too_late(what: str, found: str) -> ShardedOpError:
    """Something came between backward and step that an update made in backward could not know of."""
    return ShardedOpError(
        f"{what}: expected nothing between backward and step, for [optimizer] overlap = true updates in backward, found "
        f"{found}. This step's early updates were made without it; set overlap = false."
    )


def no_accumulation() -> PolicyError:
    """Several backward passes shall make one gradient, and the first of them would be stepped with."""
    return PolicyError(
        "[optimizer] overlap = true: expected one backward a step, found accumulate() or a pipeline's microbatches, whose "
        "gradients are complete after the last. Set overlap = false."
    )


def too_old(what: str) -> AttachError:
    """A graph that was made while the model was attached is used afterwards."""
    return AttachError(
        f"{what}: expected backward before detach, found a graph of the attached model afterwards. Run backward() first, or "
        "the forward again."
    )
