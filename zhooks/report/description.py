"""The attachment in words: one row a unit, for people."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.kernels import cores_of_rank, update_threads
from offload.policy import Policy
from offload.text import counted, toml_value
from offload.tier import Tier
from zhooks.comm import Comm
from zhooks.grad import Scaling
from zhooks.layout import EP, PP, REPLICATE, SHARD, TP, Placement, Table, flats_of
from zhooks.plan import unmatched
from zhooks.session import Session
from zhooks.unit import Unit


def describe(session: Session) -> str:
    """A plain-text table: unit, parameters, elements, padding, dtypes, placement; then the totals, and what to look at."""
    units, policy, comm, ignored = session.units, session.policy, session.comm, session.ignored
    table = Table.of(policy.table())
    head = ("unit", "params", "numel", "padding", "kept -> use", "parameter", "gradient", "optimizer")
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
    numel = sum(flat.layout.numel for flat in flats_of(units))
    padding = sum(flat.layout.padding for flat in flats_of(units))
    on_tp = " on this tp rank" if comm.tp.axis.world > 1 else ""
    flats = sum(len(unit.flats) for unit in units)
    # A unit whose parameters differ in dtype, tier or training has a row for each kind.
    in_rows = "" if flats == len(units) else f" in {counted(flats, 'flat buffer')} (rows)"
    lines.append(
        f"{counted(len(units), 'unit')}{in_rows}, {numel:,} elements{on_tp}, "
        f"{f'{padding:,} of padding ({padding / max(1, numel):.3%})' if padding else 'no padding'}; "
        f"{_ranks(comm)}."
    )
    payload = session.runtime.payload()
    if payload is not None and comm.stage.axis.world > 1:
        lines.append(f"According to the plan, a training step gathers and reduces {payload / 2**20:,.2f} MiB in all.")
    lines.extend(_scaled(session.runtime.scaling, any(flat.kind.compute is torch.float16 for flat in flats_of(units))))
    if named := ignored.named:
        count, few = sum(param.numel() for param in named.values()), ", ".join(list(named)[:3])
        lines.append(f"Ignored, and not reduced: {counted(len(named), 'parameter')}, {count:,} elements ({few}).")
    if ignored.unnamed:
        names = [name for name in ignored.frozen if name in ignored.unnamed]
        kinds = ", ".join(sorted({ignored.frozen[name].kind for name in names}))
        lines.append(
            f"Frozen tensor subclasses (quantised), left as they are on every rank: {counted(len(names), 'parameter')}, "
            f"{sum(map(ignored.nbytes, names)) / 2**20:,.2f} MiB ({', '.join(names[:3])}: {kinds})."
        )
    lines.extend(_divided(units, policy))
    lines.extend(_updated(policy))
    lines.extend(_chosen(policy))
    lines.extend(f"Matches nothing here: {text}." for text in unmatched(session.model, units, policy))
    lines.append("R replicated, P partial sum until the accumulation boundary, S sharded.")
    return "\n".join([*lines, session.why] if session.why else lines)


def _ranks(comm: Comm) -> str:
    """How many ranks each axis has, which this rank is on tp and pp, and the transport, by axis where they differ."""
    every = [(comm.shard, SHARD), (comm.replicate, REPLICATE), (comm.tp, TP), (comm.pp, PP if comm.pipelined else EP)]
    over = {name: transport for transport, name in every if transport.axis.world > 1}
    sizes = [f"{name} x {each.axis.world}" for each, name in every if name in (SHARD, REPLICATE) or name in over]
    here = [f"{each.axis.rank} of {name}" for name, each in over.items() if name not in (SHARD, REPLICATE)]
    this = f" (this is {', '.join(here)})" if here else ""
    used = "one rank, nothing to exchange"
    if len({each.name for each in over.values()}) > 1:
        used = "transports " + ", ".join(f"{each.name} over {name}" for name, each in over.items())
    elif over:
        used = f"transport {next(iter(over.values())).name}"
    return f"{', '.join(sizes)}{this}; {used}"


def _updated(policy: Policy) -> list[str]:
    """How many threads update on the host, and on which cores."""
    numba = policy.optimizer.kernel == "numba"
    if policy.optimizer.compute != "host" and not numba:
        return []
    if not numba:
        return [f"Updates on the host: {counted(torch.get_num_threads(), 'thread')} of torch."]
    cores = cores_of_rank()
    bound = f", bound to cores {cores[0]} to {cores[-1]}" if len(cores) > 1 else ""
    return [f"Updates on the host: {counted(update_threads(), 'thread')}{bound}."]


def _divided(units: Sequence[Unit], policy: Policy) -> list[str]:
    """What a share of the states came to, in whole flats."""
    share = policy.optimizer.device_share
    trained = [flat for flat in flats_of(units) if flat.kind.trainable]
    if not share or not trained:
        return []
    near = sum(flat.layout.numel for flat in trained if flat.kind.tiers.optimizer is Tier.DEVICE)
    part = near / max(1, sum(flat.layout.numel for flat in trained))
    return [f"[optimizer] device_share = {share:g}: masters and states of {part:.1%} of the elements on the device."]


def _chosen(policy: Policy) -> list[str]:
    """What the policy asks for beyond the table, where that is not the default."""
    said = []
    for name in ("activation", "device", "comm", "schedule"):
        keys = getattr(policy, name).model_dump(exclude_defaults=True, mode="json")
        if keys:
            said.append(f"[{name}] " + ", ".join(f"{key} = {toml_value(value)}" for key, value in keys.items()))
    return [f"Set: {'; '.join(said)}."] if said else []


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
