"""From measured ranges to a dtype for each unit, with the reason in words, as a table and as policy rules.  Pure.

Note: [What is proposed]
    The base is what every unit computes in for which it is safe; the others compute in fp32.  bf16 has the range of fp32 and 8
    bits of significand: unsafe where the rounding error is a large share of what varies in a unit's activations (large values
    that differ by little).  fp16 has 11 bits and a narrow range: unsafe, too, where values come near its largest, or where
    gradients underflow at the loss scale that the model's largest gradient allows.  Where units' outputs come near fp16's
    largest value, or fp16 is unsafe for most of the model, the base is bf16.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Literal

from offload.policy import Policy
from offload.text import counted, toml_value

__all__ = ["Advice", "Proposal", "Ranges", "propose"]

Base = Literal["bf16", "fp16"]

#: Exponents of fp32 from the least subnormal: bin ``i`` of a histogram counts values in [2**(LOWEST + i - 1), 2**(LOWEST + i)).
LOWEST, BINS = -148, 278

_FP16_MAX = 65504.0
#: How far below fp16's largest value a measured one must stay.
_HEADROOM = 8.0
#: Exponents of fp16: below the first a value is subnormal and has fewer digits, at the second or below it is zero.
_NORMAL, _ZERO = -14, -25
#: Shares above which a dtype is unsafe: gradients that become zero or subnormal, rounding noise, lost updates.
_MOST_ZERO, _MOST_SUBNORMAL, _MOST_NOISE, _MOST_LOST = 0.01, 0.1, 0.05, 0.1


@dataclass(frozen=True, slots=True)
class Ranges:
    """What was measured of one unit, over all ranks.

    Attributes:
        gradients: histograms by power of two, without zeros: of the parameters' gradients, and of the activations'.
        gradient: the largest of both.
        weight: the largest element of a parameter.
        activation: the largest output of any module in the unit; ``output`` of the unit itself.
        noise: the largest error of rounding an activation to bf16, relative to how much its values vary.
        lost: the share of updates that rounding to the nearest bf16 would undo; None where none was seen.
        nonfinite: infinities and NaN among gradients and activations.
    """

    unit: str
    params: tuple[str, ...]
    numel: int
    gradients: tuple[tuple[float, ...], tuple[float, ...]]
    gradient: float
    weight: float
    activation: float
    output: float
    noise: float
    lost: float | None
    nonfinite: int

    def below(self, exponent: float) -> float:
        """The share of gradients below ``2**exponent``, in the histogram where it is larger."""
        top = min(BINS, max(0, math.ceil(exponent) - LOWEST + 1))
        return max(sum(counts[:top]) / (sum(counts) or 1.0) for counts in self.gradients)

    @property
    def smallest(self) -> float:
        """A power of two that a hundredth of the gradients is below, in the histogram where it is smaller."""
        return min((_hundredth(counts) for counts in self.gradients if any(counts)), default=0.0)


@dataclass(frozen=True, slots=True)
class Advice:
    """One unit's dtype, and why."""

    unit: str
    dtype: Literal["fp32", "bf16", "fp16"]
    reason: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """A dtype for each unit: ``base`` for most, fp32 by rule for the others.

    Attributes:
        loss_scale: what fp16 was judged at, and should be trained with at first.
        backwards: how many were measured.
    """

    base: Base
    loss_scale: float
    backwards: int
    ranges: tuple[Ranges, ...]
    advice: tuple[Advice, ...]

    def values(self) -> dict[str, Any]:
        """The proposal as keys of a policy: ``zhooks.attach(model, policy={"stage": 2, **proposal.values()})``."""
        rules = [{"match": match, "precision.param": "fp32"} for _, matches in self._rules() for match in matches]
        return {"precision": {"param": self.base, "output": "fp32", **self._scaling()}, "rule": rules}

    def over(self, policy: Policy) -> dict[str, Any]:
        """``policy`` with the proposal in it, its rules last, for ``attachment.apply(proposal.over(attachment.policy))``."""
        values, mine = policy.values(), self.values()
        precision = {**values.get("precision", {}), **mine["precision"]}
        if self.base == "fp16":
            precision["min_scale"] = min(policy.precision.min_scale, self.loss_scale)
        return {**values, "precision": precision, "rule": [*values.get("rule", ()), *mine["rule"]]}

    def _scaling(self) -> dict[str, Any]:
        """fp16 is trained with the loss scale that it was judged at."""
        return {"loss_scale": "dynamic", "initial_scale": self.loss_scale} if self.base == "fp16" else {}

    def toml(self) -> str:
        """The same as a policy file, or the end of one, with the reasons."""
        lines = [f"# Proposed by a calibration over {self.backwards} backward passes."]
        if self.base == "fp16":
            lines.append("# fp16 was judged at this scale; omit these two lines if the loop has its own GradScaler.")
        lines += ["[precision]", f"param = {toml_value(self.base)}", 'output = "fp32"']
        lines += [f"{key} = {toml_value(value)}" for key, value in self._scaling().items()]
        for advice, matches in self._rules():
            for match in matches:
                lines += ["", f"# {advice.unit}: {advice.reason}", "[[rule]]", f"match = {toml_value(match)}"]
                lines.append('precision.param = "fp32"')
        return "\n".join(lines) + "\n"

    def _rules(self) -> list[tuple[Advice, list[str]]]:
        names = {name for one in self.ranges for name in one.params}
        pairs = zip(self.advice, self.ranges, strict=True)
        return [(advice, _matches(one, names)) for advice, one in pairs if advice.dtype != self.base and one.params]

    def __str__(self) -> str:
        # Imported late: drawing a table is rare, and its library is not small.
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.ASCII)
        for heading in ("unit", "dtype"):
            table.add_column(heading)
        for heading in ("gradients (1 % below .. max)", "weight", "activation", "bf16 noise", "lost in bf16"):
            table.add_column(heading, justify="right")
        table.add_column("why")
        for advice, one in zip(self.advice, self.ranges, strict=True):
            spread = f"{one.smallest:.0e} .. {one.gradient:.0e}"
            lost = "-" if one.lost is None else f"{one.lost:.0%}"
            figures = (f"{one.weight:.1e}", f"{one.activation:.1e}", f"{one.noise:.1%}", lost)
            table.add_row(advice.unit, advice.dtype, spread, *figures, advice.reason)
        text = io.StringIO()
        Console(file=text, width=150, color_system=None).print(table)
        return f"{text.getvalue()}{self._summary()}"

    def _summary(self) -> str:
        """Below the table: what holds for the whole model."""
        lines = [f"Base {self.base}, from {self.backwards} backward passes."]
        if self.base == "fp16":
            lines.append(f"Judged at a loss scale of {self.loss_scale:g}.")
        lost = [one.unit for one in self.ranges if one.lost is not None and one.lost > _MOST_LOST]
        if lost:
            lines.append(
                f"In {counted(len(lost), 'unit')} more than {_MOST_LOST:.0%} of the updates would vanish if parameters were "
                'kept in bf16 and rounded to the nearest: keep fp32 masters, or set [optimizer] rounding = "stochastic".'
            )
        return "\n".join(lines)


def propose(ranges: Sequence[Ranges], prefer: Base, loss_scale: float | None, backwards: int) -> Proposal:
    """A dtype for each unit; see Note [What is proposed].

    Args:
        prefer: the base, where the model allows it.
        loss_scale: for fp16; None is the largest power of two that keeps the largest gradient finite.
    """
    scale = loss_scale or _scale(max((one.gradient for one in ranges), default=0.0))
    against = [_against_fp16(one, scale) for one in ranges]
    base, reason = prefer, ""
    if prefer == "fp16":
        unsafe = sum(one.numel for one, problem in zip(ranges, against, strict=True) if problem)
        output = max((one.output for one in ranges), default=0.0)
        if output > _FP16_MAX / _HEADROOM:
            base, reason = "bf16", f"units output values up to {output:.1e}, too close to the largest of fp16 (65504)"
        elif 2 * unsafe > sum(one.numel for one in ranges):
            base, reason = "bf16", "most of the model does not fit fp16"
    if base == "bf16":
        against = [_against_bf16(one) for one in ranges]
    fine = f"fits {base}{'; ' + reason if reason else ''}"
    advice = [
        Advice(one.unit, "fp32" if problem else base, problem or (fine if one.params else "has no parameters"))
        for one, problem in zip(ranges, against, strict=True)
    ]
    return Proposal(base, scale, backwards, tuple(ranges), tuple(advice))


def _scale(gradient: float) -> float:
    if not 0 < gradient < math.inf:
        return 65536.0
    return math.ldexp(1.0, min(24, max(0, math.floor(math.log2(_FP16_MAX / _HEADROOM / gradient)))))


def _hundredth(counts: Sequence[float]) -> float:
    """The power of two that a hundredth of what a histogram counts is below."""
    total, seen = sum(counts), 0.0
    for index, count in enumerate(counts):
        seen += count
        if seen >= 0.01 * total:
            return math.ldexp(1.0, LOWEST + index)
    return 0.0


def _against_bf16(one: Ranges) -> str:
    """Why the unit should not compute in bf16; empty where it may."""
    if one.nonfinite:
        return f"{one.nonfinite} infinite or undefined values were seen"
    if one.noise > _MOST_NOISE:
        return f"rounding to bf16 is {one.noise:.0%} of the variation of its activations (large values, small differences)"
    return ""


def _against_fp16(one: Ranges, scale: float) -> str:
    """Why it should not compute in fp16 at this loss scale; empty where it may."""
    if one.nonfinite:
        return f"{one.nonfinite} infinite or undefined values were seen"
    for what, largest in (("activations", one.activation), ("weights", one.weight)):
        if largest > _FP16_MAX / _HEADROOM:
            return f"{what} up to {largest:.1e}, too close to the largest of fp16 (65504)"
    if one.gradient * scale > _FP16_MAX / _HEADROOM:
        return f"gradients up to {one.gradient:.1e} are too close to the largest of fp16 at a loss scale of {scale:g}"
    power = math.log2(scale)
    zero, subnormal = one.below(_ZERO - power), one.below(_NORMAL - power)
    if zero > _MOST_ZERO:
        return f"{zero:.0%} of its gradients vanish in fp16 even at a loss scale of {scale:g}"
    if subnormal > _MOST_SUBNORMAL:
        return f"{subnormal:.0%} of its gradients lose digits in fp16 even at a loss scale of {scale:g}"
    if one.noise / 8 > _MOST_NOISE:
        return f"rounding to fp16 is {one.noise / 8:.0%} of the variation of its activations (large values, small differences)"
    return ""


def _matches(one: Ranges, names: set[str]) -> list[str]:
    """Globs for the parameters of a unit, and for no other's."""
    glob = f"{escape(one.unit)}.*"
    if {name for name in names if fnmatchcase(name, glob)} == set(one.params):
        return [glob]
    return [escape(name) for name in one.params]
