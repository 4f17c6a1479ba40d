"""Owns what steps computed: FLOPs by module, pass and dtype, batches, and how near that came to what the hardware could do.

Measures, reports and `zprof.open` ask it. It reads the notes of counted steps, see `zprof.recording.computing`, and checks
each, for a file may be forged; rates and prices are those of a hardware profile, never guessed.

Note: [What counts as what]
    FLOPs of the model are those of its forwards and backwards; FLOPs done also those computed a second time (checkpointing,
    fused attention's backward) and an optimizer's. MFU and HFU are the time these would take at the peak of their dtypes, as
    a share of the median step. Forwards without gradients of a model in eval mode count where every counted step had them:
    a teacher's do, those of an evaluation now and then do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.errors import HardwareError
from zprof.analysis.coverage import Coverage, Unseen
from zprof.analysis.curves import NO_KEY, module_of
from zprof.analysis.operators import pauses

if TYPE_CHECKING:

    from offload.hardware import Hardware
    from zprof.analysis.steps import Steps
    from zprof.trace.reader import Trace

__all__ = ["Computed", "Reached", "Row", "computed", "hardware_of", "last_batch", "slowed"]

_PASSES = frozenset({"forward", "backward", "recompute", "step", "outside", "evaluation"})
_OF_MODEL = frozenset({"forward", "backward", "outside", "evaluation"})
_MOST = 1 << 62
_MOST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """What one kind of operation did in the counted steps.

    Attributes:
        module: the path of the module in whose forward it ran, or whose backward it was.
        doing: "forward", "backward", "recompute", "step" (an optimizer's), "outside" (of modules) or "evaluation".
        operation: torch's name of it where it has a formula, "" of all others together.
        device, dtype: as torch names them; "tf32" of float32 where TF32 was allowed.
        calls, flops, again, nbytes: in all; ``again`` of the FLOPs were computed before; bytes read and written.
    """

    module: str
    doing: str
    operation: str
    device: str
    dtype: str
    calls: int
    flops: int
    again: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Reached:
    """What a step reached of what the hardware could do.

    Attributes:
        mfu, hfu: shares of the median step, 0 to 1, at the peak; see Note: [What counts as what].
        floor_s: the least time of these operations one after the other, of a step: each bound by its FLOPs or by its bytes.
        compute_s, memory_s: of it, bound by either.
        price: US dollars per step of this device; None where the profile has none.
        joules: of this device a step, estimated from the profile's watts; None where it has none.
    """

    hardware: str
    mfu: float
    hfu: float
    floor_s: float
    compute_s: float
    memory_s: float
    price: float | None
    joules: float | None


@dataclass(frozen=True, slots=True)
class Computed:
    """What was computed in the counted steps.

    Attributes:
        rows: sums over them.
        steps: how many these are.
        step_s: the median step of the run, in seconds.
        batches: of the first model called: (dtype, shape, calls).
        uncounted: operations without a formula that are not torch's own: their FLOPs are in no figure.
        threads: torch's, of operations on the CPU.
        device_name: the GPU's, or "cpu".
    """

    rows: tuple[Row, ...]
    steps: int
    step_s: float
    batches: tuple[tuple[str, tuple[int, ...], int], ...]
    uncounted: tuple[str, ...]
    threads: int
    device_name: str

    @property
    def flops(self) -> float:
        """Done per step."""
        return sum(row.flops for row in self.rows) / self.steps

    @property
    def model_flops(self) -> float:
        """Of the model per step."""
        return sum(row.flops - row.again for row in self.rows if row.doing in _OF_MODEL) / self.steps

    @property
    def samples(self) -> float | None:
        """A step; None where no model was called with a tensor."""
        found = _samples(self.batches)
        return None if found is None else found / self.steps

    @property
    def tokens(self) -> float | None:
        """A step; None where the model's input is not a matrix of integers, batch by sequence."""
        found = _tokens(self.batches)
        return None if found is None else found / self.steps

    def by_module(self) -> dict[str, Counter[str]]:
        """Module up to its first number -> FLOPs per step by pass, and "nbytes"; the most FLOPs first."""
        found: dict[str, Counter[str]] = {}
        for row in self.rows:
            sums = found.setdefault(module_of(row.module) or NO_KEY, Counter())
            sums[row.doing] += row.flops
            sums["nbytes"] += row.nbytes
        for sums in found.values():
            for name in sums:
                sums[name] = round(sums[name] / self.steps)
        return dict(sorted(found.items(), key=lambda pair: (-_flops_of(pair[1]), pair[0])))

    def by_dtype(self) -> dict[str, int]:
        """FLOPs per step."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row.dtype] += row.flops
        return {dtype: round(flops / self.steps) for dtype, flops in found.most_common() if flops}

    def on(self, hardware: Hardware) -> Reached:
        """How near a step came to what ``hardware`` could do.

        Raises:
            HardwareError: the profile is of another kind of device, or has no rate for a dtype.
        """
        from offload.hardware import CostModel

        kind = "gpu" if any(row.flops and row.device != "cpu" for row in self.rows) else "cpu"
        if hardware.kind != kind:
            raise HardwareError(
                f"{hardware.name}: expected a profile of kind {kind}, which the run computed on, found {hardware.kind}; "
                "choose another (zprof hardware list)"
            )
        model = CostModel(hardware)
        # A device of a profile of kind "cpu" is one thread.
        many = min(self.threads, hardware.device.count) if kind == "cpu" else 1
        at_peak = {"model": 0.0, "done": 0.0}
        compute_s = memory_s = 0.0
        for row in self.rows:
            if row.flops:
                peak = getattr(hardware.peak, model.dtype(row.dtype or "float32"))
                at_peak["done"] += row.flops / peak
                at_peak["model"] += (row.flops - row.again) / peak if row.doing in _OF_MODEL else 0.0
            nbytes, flops = row.nbytes / row.calls, row.flops / row.calls
            took = row.calls * model.compute(flops, nbytes, row.dtype or "float32", operation=row.operation)
            bound = row.flops and row.calls * model.compute(0, nbytes) < took
            compute_s, memory_s = compute_s + (took if bound else 0.0), memory_s + (0.0 if bound else took)
        share = self.steps * many
        busy = min(1.0, (compute_s + memory_s) / share / self.step_s)
        cost = model.step(self.step_s, busy, many)
        return Reached(
            hardware=hardware.name,
            mfu=at_peak["model"] / share / self.step_s,
            hfu=at_peak["done"] / share / self.step_s,
            floor_s=(compute_s + memory_s) / share,
            compute_s=compute_s / share,
            memory_s=memory_s / share,
            price=cost.price,
            joules=cost.joules,
        )


def _flops_of(sums: Counter[str]) -> int:
    return sum(flops for name, flops in sums.items() if name != "nbytes")


def _samples(batches: Sequence[tuple[str, tuple[int, ...], int]]) -> int | None:
    found = [shape[0] * calls for _, shape, calls in batches if shape]
    return sum(found) if found else None


def _tokens(batches: Sequence[tuple[str, tuple[int, ...], int]]) -> int | None:
    if not batches or any("int" not in dtype or len(shape) != 2 for dtype, shape, _ in batches):
        return None
    return sum(shape[0] * shape[1] * calls for _, shape, calls in batches)


def hardware_of(found: Computed) -> Hardware | Unseen:
    """The profile of the device that the run computed on, where one is shipped."""
    if found.device_name != "cpu":
        from offload.hardware import for_device

        known = for_device(found.device_name)
        if known is not None:
            return known
    return Unseen(
        f"no hardware profile of {found.device_name} is shipped: zprof bench --profile machine.toml measures this one, then "
        "zprof report --hardware machine.toml"
    )


def computed(trace: Trace, steps: Steps, covered: Coverage) -> Computed | Unseen:
    """What the counted steps of ``trace`` computed."""
    if trace.header.simulated:
        return Unseen("not counted in a simulation's trace")
    bodies = [note.body for note in trace.notes("compute")]
    why = next((body["why"] for body in reversed(bodies) if isinstance(body.get("why"), str)), None)
    if why is not None:
        return Unseen(f"not counted: {why}")
    unseen = covered.steps() or steps.warm.unseen
    if unseen is not None:
        return unseen
    counted = [each for each in (_counted(body) for body in bodies) if each is not None]
    if not counted or not steps.count:
        return Unseen("no step was counted: that takes two optimizer steps, of torch's own optimizers or their subclasses")
    # A loop is whole only once all its optimizers have stepped.
    most = max(each.optimizers for each in counted)
    counted = [each for each in counted if each.optimizers == most]
    ends = steps.issued[:, 1]
    number = sum(max(1, int(((ends > each.begin_ns) & (ends <= each.end_ns)).sum())) for each in counted)
    always = all(any(row.doing == "evaluation" for row in each.rows) for each in counted)
    sums: dict[tuple[str, ...], list[int]] = {}
    batches: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for each in counted:
        for row in each.rows:
            if row.doing != "evaluation" or always:
                key = (row.module, row.doing, row.operation, row.device, row.dtype)
                added = (row.calls, row.flops, row.again, row.nbytes)
                sums[key] = [old + new for old, new in zip(sums.get(key, [0] * 4), added, strict=True)]
        for name, dtype, shape, calls in each.inputs:
            if name == each.inputs[0][0]:
                batches[dtype, shape] += calls
    return Computed(
        rows=tuple(_row([*key, *values]) for key, values in sums.items()),
        steps=number,
        step_s=float(np.median(steps.warm.apart_from(slowed(trace)).duration_ns)) / 1e9,
        batches=tuple((dtype, shape, calls) for (dtype, shape), calls in batches.items()),
        uncounted=tuple(sorted({name for each in counted for name in each.uncounted})),
        threads=counted[-1].threads,
        device_name=counted[-1].device_name,
    )


def last_batch(trace: Trace) -> tuple[float | None, float | None]:
    """(tokens, samples) of the model's input in the last counted step; None for what is not known."""
    for note in reversed(trace.notes("compute")):
        counted = _counted(note.body)
        if counted is not None and counted.inputs:
            first = counted.inputs[0][0]
            inputs = [(dtype, shape, calls) for name, dtype, shape, calls in counted.inputs if name == first]
            return _tokens(inputs), _samples(inputs)
    return None, None


def slowed(trace: Trace) -> list[tuple[int, int]]:
    """When the recording itself took time of steps: to count what they compute, and to record operators."""
    bodies = [note.body for note in trace.notes("compute")]
    spans = [(body.get("begin_ns"), body.get("end_ns")) for body in bodies] + pauses(trace)
    whole = [(begin, end) for begin, end in spans if type(begin) is int and type(end) is int]
    return [(begin, end) for begin, end in whole if 0 <= begin <= end <= _MOST]


@dataclass(frozen=True, slots=True)
class _Counted:
    """One note, checked."""

    begin_ns: int
    end_ns: int
    optimizers: int
    threads: int
    device_name: str
    rows: tuple[Row, ...]
    inputs: tuple[tuple[str, str, tuple[int, ...], int], ...]
    uncounted: tuple[str, ...]


def _counted(body: dict[str, Any]) -> _Counted | None:
    """None where it is not what a recording writes."""
    try:
        rows = tuple(_row(row) for row in body["rows"])
        if any(row.doing not in _PASSES or not row.calls or row.again > row.flops for row in rows):
            return None
        inputs = tuple(
            (_text(name), _text(dtype), tuple(_whole(each) for each in shape), _whole(calls))
            for name, dtype, shape, calls in body["inputs"]
        )
        numbers = (_whole(body[name]) for name in ("begin_ns", "end_ns", "optimizers", "threads"))
        uncounted = tuple(_text(name) for name, _ in body["uncounted"])
        begin_ns, end_ns, optimizers, threads = numbers
        return _Counted(begin_ns, end_ns, optimizers, max(threads, 1), _text(body["device_name"]), rows, inputs, uncounted)
    except (KeyError, TypeError, ValueError):
        return None


def _row(values: Sequence[object]) -> Row:
    module, doing, operation, device, dtype, calls, flops, again, nbytes = values
    texts = _text(module), _text(doing), _text(operation), _text(device), _text(dtype)
    return Row(*texts, _whole(calls), _whole(flops), _whole(again), _whole(nbytes))


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError("not a count")
    return value


def _text(value: object) -> str:
    if type(value) is not str or len(value) > _MOST_TEXT:
        raise ValueError("not a text")
    return value
