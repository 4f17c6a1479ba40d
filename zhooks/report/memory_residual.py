"""What is in memory beside the model states: activations and their formula, what is unaccounted for, and what to change.

Source: ZeRO, arXiv:1910.02054, sections 3.2 and 6 (residual states: activations, temporary buffers, fragmentation).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.device import memory_statistics
from offload.formulas import Layers
from offload.store import Store
from offload.tier import Tier
from zhooks.activation import Residual

#: What holds more than this share of the memory of a tier is worth a change of the policy.
_LARGE = 0.4
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Residue:
    """What one of the residual states holds now, and held at most in the last step; None where that is not known.

    ``formula`` is what the literature's formulas say it holds at most, None where none applies.
    """

    what: str
    tier: str
    nbytes: int | None
    formula: int | None = None
    peak: int | None = None


def activations(residual: Residual) -> Iterator[Residue]:
    """What autograd keeps for backward, on each tier; see Note [What is counted] in ``activation/residual.py``."""
    terms, layers = residual.terms, residual.layers()
    formula = layers.kept_nbytes if layers is not None else None
    again, offloaded_to = terms.checkpoint == "unit", Tier(terms.tier)
    here = formula if offloaded_to is Tier.DEVICE else None if formula is None else 0
    if not residual.counted:
        yield Residue("activations", "device", None, formula)
        return
    stash = residual.stash
    if stash is not None:
        stash.flush()
    now, most, stale = residual.now(), residual.most(), residual.stale

    def near(what: str, held: int, peak: int, formula: int | None = None) -> Residue:
        return Residue(what, "device", None if stale else held, formula, peak)

    if again:
        yield near("activation inputs", now.inputs + now.near, most.inputs + most.near, here)
        yield near("recomputed", now.again, most.again)
        yield near("activations", now.saved, most.saved)
    else:
        yield near("activations", now.saved + now.near, most.saved + most.near, here)
    if stash is None:
        return
    back, _ = stash.account.held("activation", Tier.DEVICE)
    if back:
        yield Residue("activations, fetched", "device", back)
    for tier in (Tier.HOST, Tier.DISK):
        held, peak = stash.account.held("activation", tier)
        if tier is offloaded_to:
            yield Residue("activations", tier.value, held, formula, peak)
        elif peak:
            yield Residue("activations in transit", tier.value, held, None, peak)


def unaccounted(device: torch.device, known: Mapping[str, int], shared: int, store: Store | None) -> Iterator[Residue]:
    """What is reserved or resident beyond what is known: in the device's allocator and the tiers, and the process' own memory.

    Args:
        known: bytes by tier.
        shared: bytes that other ranks have mapped, too.
    """
    stats = memory_statistics(device)
    if stats:
        allocated, reserved = (int(stats.get(f"{what}_bytes.all.current", 0)) for what in ("allocated", "reserved"))
        yield Residue("other tensors", "device", allocated - known["device"])
        yield Residue("free in the allocator", "device", reserved - allocated)
        yield Residue("of which in split blocks", "device", int(stats.get("inactive_split_bytes.all.current", 0)))
    locked = 0
    if store is not None:
        unused, rounded = store.unused, store.rounded
        locked = unused[Tier.HOST] if store.host.pinned else 0
        for free, tier in (("free in host slabs", Tier.HOST), ("free in scratch file", Tier.DISK)):
            for what, nbytes in (("ends of pages", rounded[tier]), (free, unused[tier])):
                if nbytes:
                    yield Residue(what, tier.value, nbytes)
        locked += rounded[Tier.HOST]
    try:
        resident = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return  # the kernel does not say
    mine = known["host"] + shared + locked + (known["device"] if device.type == "cpu" else 0)
    yield Residue("rest of the process", "host", resident - mine)


def notes(residual: Residual) -> Iterator[str]:
    """What the formula of activations was given, or why there is none."""
    if residual.refused:
        yield f"activations are not counted: {residual.refused}"
        return
    if not residual.counted:
        yield (
            "activations were not counted so far, because that takes hooks in every forward. They are from now on: run a "
            "forward, then call memory() again"
        )
        return
    if residual.stale:
        yield "activations at their peak are those of the first step; those of every step are counted from now on"
    layers = residual.layers()
    if layers is None:
        yield "no estimate of activations, because no units repeat with an input [batch, seq, hidden]"
        return
    yield f"estimate of activations (ZeRO paper): {layers.words}"
    if layers.partition == "tp" and layers.tp > 1 and layers.input_nbytes < residual.least_nbytes:
        kept, least = mib(layers.input_nbytes), mib(residual.least_nbytes)
        yield f"inputs of {kept} are kept whole, although the estimate divides them: [activation] min_bytes is {least}"
    known = layers.korthikanti_nbytes
    if layers.checkpoint != "unit" and known is not None:
        yield f"in 16 bits, with dropout and {layers.heads} heads, Korthikanti et al. (arXiv:2205.05198) estimate {mib(known)}"


def advice(on_device: Mapping[str, int], layers: Layers) -> str | None:
    """What to change about what holds most of the device; ``layers`` for the policy's [activation]."""
    whole = sum(on_device.values())
    largest = max(on_device, key=lambda name: on_device[name], default="")
    if not whole or on_device[largest] < _LARGE * whole:
        return None
    activations = "make the batch smaller, or accumulate over more of them"
    if layers.checkpoint == "none":
        activations = 'set [activation] checkpoint = "unit", or tier = "host"'
    elif layers.tier == "device":
        activations = 'set [activation] tier = "host"'
    change = {
        "activations": activations,
        "parameters": 'use more ranks with stage = 3, or [parameter] tier = "host"',
        "gradients": 'use more ranks with stage = 2 or 3, or [gradient] tier = "host"',
        "optimizer states": 'use more ranks with stage = 1, 2 or 3, or [optimizer] tier = "host"',
        "gathered units": "lower [schedule] prefetch, or set [schedule] reshard_after_forward = true",
        "partial gradients": "set stage = 2 or 3, which reduce at every backward",
        "idle buffers": "lower [schedule] prefetch, or [units] max_numel",
    }.get(largest)
    if change is None:
        return None
    return f"{largest} are {on_device[largest] / whole:.0%} of the device memory counted above; to reduce them, {change}"


def mib(nbytes: int | None) -> str:
    """For a reader; "-" where it is not known."""
    return "-" if nbytes is None else f"{nbytes / 2**20:,.2f} MiB"
