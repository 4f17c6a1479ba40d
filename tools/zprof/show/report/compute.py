"""Owns the "compute" of a report: what a step computed, module by module, and what share of the hardware that reached.

`findings` takes the body, `text` the lines. Both only say what `zprof.analysis.compute` found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from offload.errors import HardwareError
from offload.text import as_duration
from zprof.analysis.compute import hardware_of
from zprof.analysis.coverage import Unseen

if TYPE_CHECKING:
    from offload.hardware import Hardware
    from zprof.analysis.compute import Computed, Reached

__all__ = ["compute_body", "compute_lines"]


def compute_body(did: Computed, hardware: Hardware | None, most: int) -> dict[str, Any]:
    """The JSON of what was computed; ``hardware`` None takes the shipped profile of the device."""
    reached: Reached | None = None
    on = hardware_of(did) if hardware is None else hardware
    if isinstance(on, Unseen):
        why = on.why
    else:
        try:
            reached, why = did.on(on), ""
        except HardwareError as error:
            why = str(error)
    modules = [
        {
            "name": name,
            "flops": sum(flops for doing, flops in sums.items() if doing != "nbytes"),
            "forward": sums["forward"] + sums["outside"] + sums["evaluation"],
            "backward": sums["backward"],
            "again": sums["recompute"],
            "bytes": sums["nbytes"],
        }
        for name, sums in did.by_module().items()
    ]
    return {
        "steps": did.steps,
        "step_s": did.step_s,
        "flops": did.flops,
        "model_flops": did.model_flops,
        "tokens": did.tokens,
        "samples": did.samples,
        "dtypes": did.by_dtype(),
        "uncounted": list(did.uncounted),
        "modules": modules[:most],
        "reached": None if reached is None else asdict(reached),
        "reached_why": why,
    }


def compute_lines(run: Mapping[str, Any], most: int) -> list[Any]:
    """The table and the lines below it; empty where nothing of it is known."""
    did = run["compute"]
    if did is None:
        why = run["unseen"]["flops.per_step"]
        return [Text(_plain(why))] if why.startswith("not counted: ") else []
    if not did["flops"]:
        return [Text("no operation with a formula for its FLOPs was seen")]
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("module", "FLOPs per step", "share", "forward", "backward", "recomputed", "FLOPs/byte"):
        drawing.add_column(heading, justify="left" if heading == "module" else "right", no_wrap=True, overflow="fold")
    for each in did["modules"][:most]:
        if each["flops"]:
            drawing.add_row(
                Text(_plain(each["name"])),
                _flops(each["flops"]),
                f"{each['flops'] / did['flops']:.0%}",
                *(_flops(each[name]) if each[name] else "-" for name in ("forward", "backward", "again")),
                f"{each['flops'] / each['bytes']:.1f}" if each["bytes"] else "-",
            )
    return [drawing, *(Text(_plain(line)) for line in _lines(did))]


def _lines(did: Mapping[str, Any]) -> list[str]:
    took, seconds = as_duration(did["step_s"] * 1e9), did["step_s"]
    again = 1 - did["model_flops"] / did["flops"]
    beside = f"; {again:.0%} of them recomputed, or in the optimizer" if again >= 0.005 else ""
    dtypes = ", ".join(f"{_flops(flops)} in {dtype or 'integers'}" for dtype, flops in did["dtypes"].items())
    lines = [f"{_flops(did['flops'])} per step of {took}: {_flops(did['flops'] / seconds)}/s{beside} ({dtypes})"]
    if did["tokens"] is not None:
        lines.append(f"{did['tokens']:,.0f} tokens per step: {did['tokens'] / seconds:,.0f} tokens/s on this rank")
    elif did["samples"] is not None:
        lines.append(f"{did['samples']:,.0f} samples per step: {did['samples'] / seconds:,.1f} samples/s on this rank")
    reached = did["reached"]
    if reached is None:
        lines.append(did["reached_why"])
    else:
        lines.append(f"of {reached['hardware']}: MFU {reached['mfu']:.1%}, HFU {reached['hfu']:.1%}")
        floor, compute, memory = (as_duration(reached[name] * 1e9) for name in ("floor_s", "compute_s", "memory_s"))
        bound = f"{compute} bound by compute, {memory} by memory"
        lines.append(f"it needs at least {floor} of the {took} for these operations: {bound}")
        if reached["joules"] is not None:
            lines.append(f"energy by the profile's watts: about {reached['joules']:,.3g} J per step and device")
        if reached["price"] is not None:
            each = f", {1e6 * reached['price'] / did['tokens']:,.3g} US dollars a million tokens" if did["tokens"] else ""
            lines.append(f"price by the profile: {reached['price']:,.3g} US dollars per step and device{each}")
    if did["uncounted"]:
        lines.append(f"not counted, because they have no formula: {', '.join(did['uncounted'])}")
    return lines


def _flops(number: float) -> str:
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number:.3g} FLOP"


def _plain(text: object) -> str:
    from zprof.show.report.text import plain

    return plain(text)
