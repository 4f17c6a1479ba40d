"""Owns the large-batch advice of a report: the measured noise scale, and what a batch that grows wants of the learning rate.

`zprof.show.report.findings` asks for the values, `zprof.show.report.text` draws them. It reads no file and knows no optimizer.

Note: [The rules]
    A run of batch B with noise scale N takes about S (1 + N / B) steps and S N (1 + B / N) samples, S being the fewest steps.
    While a batch is small against N, a step k times as large in samples wants k times the learning rate under SGD (linear:
    Goyal et al., arXiv:1706.02677) and about the square root of k under Adam and its like (Malladi et al., arXiv:2205.10287).
    From about N on neither helps. Source of the steps: McCandlish et al., arXiv:1812.06162, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zprof.analysis.ledger import Ledger

__all__ = ["advised", "large_batch"]

Body = dict[str, Any]

#: As `zhooks.report.noise_scale` names its samples.
_SCALE, _BATCH = "noise scale", "noise scale: batch"
#: Batches that are spoken of: so many doublings at most.
MOST = 8


def large_batch(ledger: Ledger) -> list[Body]:
    """[{name, noise_scale, batch, first, growth: [{times, batch, sgd_lr, adam_lr, steps, samples}]}], a model each; empty where
    nobody measured."""
    scales, batches = ledger.samples(_SCALE, points=1 << 16), ledger.samples(_BATCH, points=1 << 16)
    found = []
    for name, (_, values) in sorted(scales.items()):
        if name not in batches or not len(values) or not len(batches[name][1]):
            continue
        batch, scale = int(batches[name][1][-1]), int(values[-1])
        if batch > 0 and scale > 0:
            growth = list(_growth(scale, batch))
            found.append({"name": name, "noise_scale": scale, "first": int(values[0]), "batch": batch, "growth": growth})
    return found


def _growth(scale: int, batch: int) -> Iterator[Body]:
    """What larger batches would cost, by doublings up to the noise scale."""
    times = 2
    while times * batch <= scale and times <= 2**MOST:
        steps = (1 + scale / (times * batch)) / (1 + scale / batch)
        yield {
            "times": times,
            "batch": times * batch,
            "sgd_lr": float(times),
            "adam_lr": sqrt(times),
            "steps": steps,
            "samples": steps * times,
        }
        times *= 2


def advised(found: Body) -> list[str]:
    """The advice in words."""
    scale, batch = found["noise_scale"], found["batch"]
    lines = [f"{found['name']}: noise scale about {scale:,} samples ({found['first']:,} at first), batch {batch:,}"]
    if scale >= 2 * batch:
        lines.append(
            f"the batch may grow to about {scale:,}: learning rate x k for SGD (linear), x sqrt(k) for Adam and its like, for "
            "a batch k times as large; warm up, and expect less near the end of that range"
        )
    elif 2 * scale >= batch:
        lines.append("the batch is about as large as is useful: a larger one saves few steps; keep the learning rate")
    else:
        lines.append(
            f"the batch is {batch / scale:.3g} times the noise scale: one of about {scale:,} takes about "
            f"{2 / (1 + scale / batch):.2g} times the steps and {2 / (1 + batch / scale):.2g} times the samples"
        )
    lines.append("it grows as the loss falls: measure again later in the run")
    return lines
