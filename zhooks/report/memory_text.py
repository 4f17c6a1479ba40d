"""``attachment.memory()`` in words: what every row of the table means, for a reader without the documentation.

``memory.py`` and ``memory_residual.py`` print with it.  It knows names and figures only; it measures nothing.
"""

from __future__ import annotations

from offload.tier import Tier

__all__ = ["meaning", "mib"]

_MEANINGS = {
    "parameter": "as kept between uses: shards at stage 3, whole at stages 0 to 2",
    "gradient": "in .grad, reduced over the ranks; zero_grad() frees them",
    "optimizer": "states; with 16-bit parameters also the fp32 values it updates",
    "gathered units": "all values of the units (blocks of the model) in use now",
    "partial gradients": "of this rank's batch, not yet reduced over the ranks",
    "reduced ranges": "results of reductions that have not ended",
    "idle buffers": "kept for the next gathers and reductions",
    "message rings": "one for all CPU ranks of this machine; no [budget] counts it",
    "staging": "values on their way between the device, host and disk tiers",
    "staging on device": "values of the host and disk tiers while they are in use",
    "arena, unused": "reserved by [device] arena",
    "frozen subclasses": "quantized parameters and the like, whole on every rank",
    "ignored parameters": "named by [units] ignore, whole on every rank",
    "ignored gradients": "named by [units] ignore, whole on every rank",
    "ignored states": "named by [units] ignore, whole on every rank",
    "activation inputs": "of the units that backward computes again",
    "recomputed": "saved by the unit that backward computes again now",
    "activations, fetched": "back from their tier for backward",
    "activations in transit": "on their way to their tier or back",
    "other tensors": "the batch, the loss, workspaces of libraries",
    "free in the allocator": "reserved by torch, in no tensor",
    "of which in split blocks": "next to memory in use: only smaller tensors fit",
    "ends of pages": "unused: every block begins on a page of its own",
    "free in host slabs": "reserved for the host tier, unused",
    "free in scratch file": "of the disk tier, unused",
    "rest of the process": "Python, libraries, tensors not listed here",
}


def meaning(what: str, tier: str, *, counted: bool = True, recomputed: bool = False) -> str:
    """What the row ``what`` of a ``tier`` holds; "" for a name that is none of a row's.

    Args:
        counted: its bytes are known.
        recomputed: the policy recomputes units, whose inputs have a row of their own.
    """
    if not counted:
        return "not counted: see below"
    if what == "activations":
        here = "all else that autograd saved" if recomputed else "saved by autograd for backward"
        return here if tier == Tier.DEVICE.value else "saved by autograd, stored there until backward"
    return _MEANINGS.get(what, "")


def mib(nbytes: int | None) -> str:
    """For a reader; "-" where it is not known."""
    return "-" if nbytes is None else f"{nbytes / 2**20:,.2f} MiB"
