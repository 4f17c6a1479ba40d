"""The attachment in words: one row a unit, for people.

``Attachment.describe`` calls it.  It reads units and formats; it never changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.tier import Tier
from zhooks.comm import Comm
from zhooks.placement import Placement, Table
from zhooks.scaling import Scaling
from zhooks.unit import Unit


def describe(units: Sequence[Unit], table: Table, comm: Comm, payload: int | None, scaling: Scaling) -> str:
    """A plain-text table: unit, parameters, elements, padding, dtypes, placement; then the totals."""
    head = ("unit", "params", "numel", "padding", "rest -> use", "parameter", "gradient", "optimizer")
    rows = [head]
    for unit in units:
        for flat in unit.flats:
            kind = flat.kind
            frozen = not kind.trainable
            dtypes = f"{_short(kind.master)} -> {_short(kind.compute)}"
            cells = (
                _cell(table.parameter, kind.tiers.parameter),
                "-" if frozen else _cell(table.gradient, kind.tiers.gradient),
                "-" if frozen else _cell(table.optimizer, kind.tiers.optimizer),
            )
            rows.append(
                (flat.name, str(len(flat.params)), f"{flat.layout.numel:,}", f"{flat.layout.padding:,}", dtypes, *cells)
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(_pad(cell, width, index) for index, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    numel = sum(flat.layout.numel for unit in units for flat in unit.flats)
    padding = sum(flat.layout.padding for unit in units for flat in unit.flats)
    axes = f"shard x {comm.shard.axis.world}, replicate x {comm.replicate.axis.world}"
    lines.append(
        f"{len(units)} units, {numel:,} elements, {padding:,} of padding ({padding / max(1, numel):.3%}); {axes}; "
        f"transport {comm.shard.name}."
    )
    if payload is not None:
        lines.append(f"By the plan a training step moves {payload / 2**20:,.2f} MiB of payload.")
    lines.extend(_scaled(scaling, any(flat.kind.compute is torch.float16 for unit in units for flat in unit.flats)))
    lines.append("R replicated, P partial sum until the accumulation boundary, S sharded.")
    return "\n".join(lines)


def _scaled(scaling: Scaling, half: bool) -> list[str]:
    """What the loss is scaled by, and the latest overflow."""
    lines = []
    if scaling.on:
        kind = "dynamic" if scaling.scale.dynamic else "fixed"
        lines.append(f"Loss scale {scaling.scale.value:g} ({kind}).")
    elif half:
        lines.append("fp16 without [precision] loss_scale: small gradients vanish, unless a GradScaler in the loop scales.")
    if scaling.overflows.latest:
        last = scaling.overflows.latest[-1]
        unit, parameter = last.parameters[0]
        more = f" and {len(last.parameters) - 1} more" if len(last.parameters) > 1 else ""
        lines.append(f"Last overflow in step {last.step} at scale {last.scale:g}: {parameter} of unit {unit}{more}.")
    return lines


def _cell(placement: Placement, tier: Tier) -> str:
    """The placement, and the tier where it is not the device."""
    return placement.value if tier is Tier.DEVICE else f"{placement.value} {tier.value}"


def _pad(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if 0 < column < 4 else cell.ljust(width)


def _short(dtype: object) -> str:
    return {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(
        str(dtype), str(dtype).removeprefix("torch.")
    )
