"""Owns the residual states of a report: activations beside the formulas of the field, buffers, and what nobody uses.

`zprof.show.report.findings` asks for the values, `zprof.show.report.text` draws them. It reads no file and rounds nothing.

Note: [Who saw activations]
    At level "alloc" the ledger has every storage. At level "events" zhooks says what its own saved-tensor hooks count (the
    samples "saved for backward"), in runs whose forwards have such hooks. What neither saw is null, and never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.formulas import Layers

if TYPE_CHECKING:
    from zprof.analysis.coverage import Coverage
    from zprof.analysis.ledger import Ledger

__all__ = ["residual"]

Body = dict[str, Any]

_SAVED, _INPUTS = "saved for backward", "inputs"
#: Lines of the reconciliation that are memory nobody uses.
_UNUSED = {"reserved, not given out": "free in the allocator", "kept by malloc": "kept by malloc"}


def residual(
    ledger: Ledger,
    covered: Coverage,
    tiers: Mapping[str, Body],
    reconciliation: Sequence[Body],
    begin_ns: int,
    end_ns: int,
) -> Body:
    """{"rows": [{name, tier, bytes, peak_bytes, formula_bytes, seen_by}], "formula": what was given to it, or null}.

    Args:
        covered: what the recording saw.
        tiers, reconciliation: of the same report.
        begin_ns, end_ns: the part of the run it is about.
    """
    layers = _layers(ledger)
    rows = [*_activations(ledger, covered, tiers, layers, (begin_ns, end_ns))]
    rows += _of("communication", "buffers", ledger, tiers)
    for line in reconciliation:
        if line["name"] in _UNUSED:
            tier = "device" if line["said"].startswith("cuda ") else "host"
            rows.append(_row(_UNUSED[line["name"]], tier, line["bytes"], None, seen_by="sampler"))
    return {"rows": rows, "formula": None if layers is None else _facts(layers)}


def _row(
    name: str, tier: str, nbytes: int | None, peak: int | None, formula: int | None = None, seen_by: str = "ledger"
) -> Body:
    return {
        "name": name,
        "tier": tier,
        "bytes": nbytes,
        "peak_bytes": peak,
        "formula_bytes": formula,
        "seen_by": None if nbytes is None else seen_by,
    }


def _layers(ledger: Ledger) -> Layers | None:
    notes = ledger.trace.notes("activation")
    return Layers.read(notes[-1].body.get("text")) if notes else None


def _facts(layers: Layers) -> Body:
    return asdict(layers) | {
        "words": layers.words,
        "saved_bytes": layers.saved_nbytes,
        "inputs_bytes": layers.inputs_nbytes,
        "korthikanti_bytes": layers.korthikanti_nbytes,
    }


def _activations(
    ledger: Ledger, covered: Coverage, tiers: Mapping[str, Body], layers: Layers | None, window: tuple[int, int]
) -> Iterator[Body]:
    formula = layers.kept_nbytes if layers is not None else None
    tier = layers.tier if layers is not None else "device"
    here = formula if tier == "device" or formula is None else 0
    again = layers is not None and layers.checkpoint == "unit"
    counted, inputs = _counted(ledger, window), _counted(ledger, window, _INPUTS)
    seen = [row for row in _of("activation", "activations", ledger, tiers) if row["tier"] == "device"]
    # Below level "alloc" the ledger has only those that zhooks copied or partitioned.
    if seen and covered.place("activation", "device") is None:
        yield seen[0] | {"formula_bytes": None if again else here}
    elif counted is not None:
        yield _row("activations", "device", *counted, None if again else here, "zhooks")
    else:
        yield _row("activations", "device", None, None, None if again else here)
    if again:
        found = (None, None) if inputs is None else inputs
        yield _row("of which inputs of recomputed units", "device", found[0], found[1], here, "zhooks")
    for row in _of("activation", "activations", ledger, tiers):
        if row["tier"] != "device":
            yield row | {"formula_bytes": formula if row["tier"] == tier else None}


def _of(category: str, name: str, ledger: Ledger, tiers: Mapping[str, Body]) -> Iterator[Body]:
    """What the ledger holds of a category, on each tier: at the report's moment there, and at most in the run."""
    for tier, held in tiers.items():
        peak = ledger.peak(tier, category).nbytes
        if peak:
            yield _row(name, tier, held["categories"].get(category, 0), peak)


def _counted(ledger: Ledger, window: tuple[int, int], *only: str) -> tuple[int, int] | None:
    """What zhooks counted: at most in a part of the run, and in all of it; None where it counted nothing."""
    series = [pair for key, pair in ledger.samples(_SAVED, points=1 << 16).items() if not only or key in only]
    series = [pair for pair in series if len(pair[0])]
    if not series:
        return None
    time_ns = np.unique(np.concatenate([times for times, _ in series]))
    total = np.zeros(len(time_ns), np.int64)
    for times, values in series:
        total += np.concatenate(([0], values))[np.searchsorted(times, time_ns, side="right")]
    begin, end = np.searchsorted(time_ns, window[0], side="right"), np.searchsorted(time_ns, window[1], side="right")
    if not total.any():
        # A forward that is counted keeps something: of these zhooks said only that none was.
        return None
    # What was said last before the part begins still holds in it.
    inside = total[max(0, int(begin) - 1) : int(end)]
    return int(inside.max()) if len(inside) else 0, int(total.max())
