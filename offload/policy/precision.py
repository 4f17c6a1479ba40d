"""Owns [precision]: the dtypes of compute and of reduction, and the loss scale that keeps small fp16 gradients alive.

`offload.policy` puts it among the other tables, and asks it what contradicts what. It never sees a tensor.

Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2; the defaults are torch.amp.GradScaler's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from offload.documents import Place, Table, words
from offload.policy.tables import DTYPES, DTYPES_ELSEWHERE, Dtype, Optimizer

__all__ = ["Precision", "misscaled", "uncast"]

_SCALE = "a number, above 0 and at most 2**127"
#: Beyond it a scaled gradient of one overflows fp32.
_LARGEST = 2.0**127
_Number = Annotated[float, Field(gt=0, le=_LARGEST, allow_inf_nan=False)]


class Precision(Table):
    """[precision]: the dtypes of compute and of reduction; the masters keep the model's own (fp32)."""

    param: Dtype | None = words(
        None,
        expected=DTYPES,
        meant=DTYPES_ELSEWHERE,
        does="The dtype parameters are gathered and computed in; BatchNorm and InstanceNorm keep their own.",
        why="Unset keeps each parameter's own dtype, so that attach by itself does not change results.",
    )
    reduce: Dtype | None = words(
        None,
        expected=DTYPES,
        meant=DTYPES_ELSEWHERE,
        does="The dtype gradients are summed in.",
        why="Unset is fp32 if param is set, else the gradient's own dtype, because 16 bits lose most in long sums.",
    )
    output: Dtype | None = words(
        None,
        expected=DTYPES,
        meant=DTYPES_ELSEWHERE,
        does="The dtype that floating-point outputs of the outermost module are cast to.",
        why="Unset leaves outputs as the model computed them; a loss function usually casts to fp32 itself.",
    )
    cast_inputs: bool | Literal["unit"] = words(
        True,
        expected='true, false or "unit"',
        does='true casts floating-point inputs of the outermost module to param, "unit" those of every unit.',
        why="Without it the first layer would refuse them; inside the model, only its forward knows what must stay fp32.",
    )
    loss_scale: Literal["dynamic"] | _Number | None = words(
        None,
        expected='"dynamic" or a number, above 0 and at most 2**127',
        does="Scales gradients inside the model, and unscales them when they are stored; a step that overflowed is skipped.",
        why="Unset scales nothing: fp16 then needs torch.amp.GradScaler in the loop; bf16 and fp32 need neither.",
    )
    initial_scale: _Number = words(
        65536.0,
        expected=_SCALE,
        does='The first scale of "dynamic".',
        why="As in GradScaler. Too large a scale costs a skipped step each time it is halved, too small a one loses gradients.",
    )
    growth_interval: int = words(
        2000,
        expected="an integer from 1 to 2**31 - 1",
        does="How many steps without an overflow until the scale grows (DeepSpeed's loss_scale_window).",
        why="As in GradScaler: one step lost in two thousand is cheap.",
        ge=1,
        le=(1 << 31) - 1,
    )
    hysteresis: int = words(
        1,
        expected="an integer from 1 to 1024",
        does="How many overflows since the scale last grew until it is reduced; each of them skips its step.",
        why="1 reduces it at once, as GradScaler does.",
        ge=1,
        le=1024,
    )
    min_scale: _Number = words(
        1.0,
        expected=_SCALE,
        does="The smallest scale; an overflow there raises `ScaleError`.",
        why="If a gradient overflows unscaled, no scale helps.",
    )
    growth_factor: float = words(
        2.0,
        expected="a number, above 1 and at most 2**127",
        does="What the scale is multiplied by when it grows.",
        why="Powers of two lose no bits.",
        gt=1,
        le=_LARGEST,
        allow_inf_nan=False,
    )
    backoff_factor: float = words(
        0.5,
        expected="a number between 0 and 1",
        does="What the scale is multiplied by when it is reduced.",
        why="Powers of two lose no bits.",
        gt=0,
        lt=1,
        allow_inf_nan=False,
    )


def uncast(precision: Precision) -> list[tuple[Place, str]]:
    """What contradicts the casts of inputs, place and words."""
    if precision.cast_inputs != "unit" or precision.param is not None:
        return []
    why = 'found "unit" and no param: inputs are cast to it; write param = "bf16" too (a bf16 model loses nothing by it)'
    return [(("precision", "cast_inputs"), why)]


def misscaled(precision: Precision, optimizer: Optimizer) -> list[tuple[Place, str]]:
    """What contradicts the loss scale, place and words."""
    if precision.loss_scale is None:
        return []
    found: list[tuple[Place, str]] = []
    if optimizer.overlap:
        why = "expected false with [precision] loss_scale, found true: whether to step is known only after backward"
        found.append((("optimizer", "overlap"), why))
    if precision.output == "fp16":
        why = 'expected "fp32" or nothing with loss_scale, found "fp16": gradients would vanish before they are scaled'
        found.append((("precision", "output"), why))
    if precision.loss_scale == "dynamic" and precision.min_scale > precision.initial_scale:
        why = f"expected at most initial_scale, {precision.initial_scale:g}, found {precision.min_scale:g}"
        found.append((("precision", "min_scale"), why))
    return found
