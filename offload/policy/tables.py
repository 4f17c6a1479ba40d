"""The tables of a policy file: every key, what it may be, its default, what it does and the reason for the default.

The checks, their errors, the page ``docs/reference/policy.md`` and the JSON schema are made from them.

Source: of [precision], Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2, and torch.amp.GradScaler.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from offload.documents import SIZE_SCHEMA, Kind, Name, Names, Size, Table, words
from offload.errors import PolicyError
from offload.text import Share, parse_amount
from offload.tier import Tier

__all__ = [
    "CELLS",
    "POLICY",
    "Activation",
    "Amount",
    "Budget",
    "Comm",
    "DeviceMemory",
    "Disk",
    "Dtype",
    "Dtypes",
    "Gradient",
    "Host",
    "Optimizer",
    "Partition",
    "Placed",
    "Precision",
    "Resilience",
    "Rule",
    "RuleCell",
    "RulePrecision",
    "Save",
    "Schedule",
    "TierName",
    "Units",
]

#: What the documents are, for their errors.
POLICY = Kind("policy", PolicyError)
CELLS = ("parameter", "gradient", "optimizer")

Partition = Literal["shard", "replicate"]
TierName = Literal["device", "host", "disk"]
Dtype = Literal["fp32", "bf16", "fp16"]
Toggle = bool | Literal["auto"]


def _path(value: str) -> str:
    if not 0 < len(value) <= 4096 or not value.isprintable():
        raise ValueError("not a path")
    return value


_SHARE_SCHEMA = {"type": "string", "pattern": r"^\s*\d{1,3}(\.\d+)?\s*%\s*$", "examples": ["80%"]}
PathText = Annotated[str, AfterValidator(_path)]
Amount = Annotated[
    int | InstanceOf[Share],
    BeforeValidator(parse_amount),
    WithJsonSchema({"anyOf": [*SIZE_SCHEMA["anyOf"], _SHARE_SCHEMA]}),
]
#: Beyond it a scaled gradient of one overflows fp32.
_LARGEST = 2.0**127
Scale = Annotated[float, Field(gt=0, le=_LARGEST, allow_inf_nan=False)]

_SCALE = "a number, above 0 and at most 2**127"
#: What users of other libraries call them; and torch's names of dtypes.
TIERS_ELSEWHERE = {"gpu": "device", "cuda": "device", "cpu": "host", "nvme": "disk"}
DTYPES_ELSEWHERE = {
    f"{at}{name}": ours
    for name, ours in {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.items()
    for at in ("", "torch.")
}


class Placed(Table):
    """One row of the table of placements: [parameter] or [gradient]."""

    partition: Partition | None = words(
        None,
        does="Whether each rank holds its own range or all of it.",
        why="Unset follows from the stage, so that a file needs either the stage or the partitions.",
    )
    tier: TierName = words(
        "device",
        meant=TIERS_ELSEWHERE,
        does="Where a rank stores what it holds between uses: on the device that computes, in host memory, or in a file.",
        why="The device is fastest.",
    )


class Gradient(Placed):
    """[gradient]: where gradients are kept, and what is made of those of several ranks."""

    reduce: Literal["mean", "sum"] = words(
        "mean",
        does="What the gradients of the ranks become: their mean, as under DistributedDataParallel, or their sum.",
        why="A loss is usually the mean over its rank's batch; sum is for a loss divided by a count over all ranks (tokens).",
    )


class Optimizer(Placed):
    """[optimizer]: the states and the masters, and how they are updated."""

    device_share: float = words(
        0.0,
        does="The share of elements, of those that tier moves off the device, whose states and masters stay there and are "
        "updated there: whole flat buffers of the first units, never more than the share.",
        why="0 takes the least device memory; a share takes more, and saves transfers and updates on the host.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    kernel: Literal["torch", "numba"] = words(
        "torch",
        does="What computes the update: the optimizer, or a compiled pass over gradient, master, states and 16-bit copy.",
        why="torch equals plain PyTorch bit for bit; numba agrees within a tolerance and runs on CPUs.",
    )
    compute: Literal["device", "host"] = words(
        "device",
        does="Where the update is computed, wherever the states are stored.",
        why="The device is faster; the host saves the transfer of states that are stored there.",
    )
    overlap: bool = words(
        False,
        does="Updates a unit in backward, as soon as its gradients are reduced.",
        why="false, because a clip, unscale or second backward that follows would come too late.",
    )
    rounding: Literal["nearest", "stochastic"] = words(
        "nearest",
        does="How updates of parameters that are stored in bf16 are rounded; stochastic updates them in fp32, states included.",
        why="nearest is what torch does. It loses updates below half a unit in the last place; stochastic keeps their mean.",
    )
    seed: int = words(
        0,
        does="The seed of stochastic rounding.",
        why="Any number works; the same one rounds the same way on every tier and over any number of ranks.",
        ge=0,
        lt=1 << 63,
    )

    def kept_on_device(self, numel: int) -> int:
        """Of so many elements, the most that ``device_share`` keeps there: 0.29 of 100 are 29, whatever a float is."""
        return int(Fraction(str(self.device_share)) * numel)


class Activation(Table):
    """[activation]: where what autograd saves for backward waits, and what is computed again instead."""

    tier: TierName = words(
        "device",
        meant=TIERS_ELSEWHERE,
        does="Where saved tensors are stored until backward; they are brought back ahead of their use.",
        why="The device is fastest.",
    )
    checkpoint: Literal["none", "unit"] = words(
        "none",
        does="unit keeps only the inputs of each unit, and recomputes everything else in backward.",
        why="none, because recomputation takes time.",
    )
    partition: Literal["none", "tp"] = words(
        "none",
        does="tp keeps 1/t of each unit input that is the same on the t ranks of that axis, and gathers it for backward.",
        why="none, because only a mesh with a tp axis holds inputs more than once.",
    )
    sharded_inputs: Names = words(
        (),
        does="Globs over units whose plain inputs differ between ranks (sequence parallelism); partition leaves them whole.",
        why="DTensors say so themselves; for plain tensors, a difference would be an error.",
    )
    min_bytes: Size = words(
        1 << 20,
        does="Smaller tensors stay on the device, and whole. For partition, the size of the whole tensor counts.",
        why="Below this size, latency outweighs the transfer.",
    )
    keep: Size = words(
        0,
        does="How many of the last bytes saved in a forward stay on the device, because backward needs them first.",
        why="0 moves everything: it frees the most memory, but backward waits for the transfer of the last unit.",
    )


class Units(Table):
    """[units]: which modules are gathered together."""

    classes: Names = words(
        (),
        does="Each outermost module of these classes is a unit.",
        why="Without any, repeated blocks are found automatically.",
    )
    names: Names = words(
        (),
        does='Globs over module names, e.g. "layers.*": each outermost module that matches is a unit.',
        why="Without any, as above.",
    )
    ignore: Names = words(
        (),
        does="Globs over names of modules and parameters that stay as they are: not sharded, gathered, cast or reduced.",
        why="Without any, every parameter is sharded and its gradient reduced.",
    )
    min_numel: int = words(
        65536,
        does="Neighbours with fewer elements are joined into one unit; a leaf with as many is its own unit; 0 joins none.",
        why="Below this size, latency outweighs the transfer.",
        ge=0,
        le=1 << 40,
    )
    max_numel: int = words(
        1 << 26,
        does="A sharded flat buffer with more elements is divided into segments, each of which is split evenly.",
        why="2**26 elements of fp32 are 256 MiB; larger transfers are not faster.",
        ge=1,
        le=1 << 40,
    )


class Schedule(Table):
    """[schedule]: when units are gathered, released and reduced."""

    reshard_after_forward: Toggle = words(
        "auto",
        does="true releases units between forward and backward, false keeps all, auto keeps the last ones that fit.",
        why="auto keeps what fits in [budget] device, also from one forward without gradients to the next; without a budget "
        "only the last one, until backward.",
    )
    prefetch: int = words(
        1,
        does="How many units are fetched and gathered ahead of use, in forward and in backward.",
        why="1 hides the transfer behind the compute and takes the buffer of one more unit.",
        ge=0,
        le=16,
    )
    max_reductions: int = words(
        2,
        does="How many reductions may be in flight before backward waits for the oldest; on a GPU, in bytes of the largest.",
        why="One runs while the next fills; more only take memory for gradients.",
        ge=1,
        le=64,
    )
    uneven: bool = words(
        False,
        does="true lets ranks use different units in a pass (layerdrop, early exit): what is gathered stays until it ends.",
        why="false, because it takes memory for all parameters gathered in a pass and all sums in backward.",
    )

    @property
    def most_reductions(self) -> int:
        """Reductions under way at once: where ranks differ none is waited for in backward, for another may stand before it."""
        return sys.maxsize if self.uneven else self.max_reductions


class DeviceMemory(Table):
    """[device]: the memory of the device."""

    arena: Literal["none", "states", "all"] = words(
        "none",
        does="What is allocated in memory reserved ahead: shards, gathered units and sums (states), "
        'and also the inputs that checkpoint = "unit" keeps, which are copied there (all).',
        why="none: it only helps if the allocator fails with much memory free (`zprof frag`). Not measured on a GPU.",
    )


class Host(Table):
    """[host]: the memory of the host tier."""

    pin: Toggle = words(
        "auto",
        does="Locks host memory in place, so that a GPU reads and writes it at full speed while it computes.",
        why="auto pins if there is CUDA.",
    )
    slab: Size = words(
        64 << 20,
        does="Host memory is allocated in slabs of at least this size, which are split to exact sizes; under [budget] host, in "
        "slabs of the size of each block.",
        why="Pinning is slow per call and fast per byte.",
        ge=4096,
    )


class Budget(Table):
    """[budget]: bytes a rank may use on each tier; the least of all ranks counts."""

    device: Amount | None = words(
        None,
        unset="no bound",
        does="Device memory per rank for what is stored there, gathered units in flight and units kept until backward. "
        "Activations are not counted: leave memory for them.",
        why="Unset sets no bound and keeps only the last unit.",
    )
    host: Amount | None = words(
        None,
        unset="no bound but what the machine has",
        does="Host memory of what is stored there and of buffers in transit to disk.",
        why="Unset is bounded only by what the machine has.",
    )
    disk: Amount | None = words(
        None,
        unset="no bound but what the file system has",
        does="The size of the scratch file.",
        why="Unset is bounded only by what the file system has.",
    )

    def resolve(self, tier: Tier, available: Callable[[], int]) -> int | None:
        """Bytes the budget allows on ``tier``, None for no bound; ``available`` is asked only for a share of it."""
        amount: int | Share | None = getattr(self, tier.value)
        return amount.of(available()) if isinstance(amount, Share) else amount


class Disk(Table):
    """[disk]: the scratch file of the disk tier, one a rank, removed at the end."""

    path: PathText | None = words(
        None,
        unset="the system's folder for temporary files",
        expected="the path of a folder",
        does="The folder of the scratch files, created if missing; best on NVMe, never on a network file system. "
        "~ is your home directory.",
        why="Unset is the system's folder for temporary files (TMPDIR, else /tmp). If that is a tmpfs, its files take memory, "
        "and attach warns.",
    )
    block: Size = words(
        4 << 20,
        does="The size of one request.",
        why="Requests of this size reach the bandwidth of a disk.",
        ge=1 << 20,
        multiple_of=4096,
    )
    threads: int = words(
        16,
        does="How many requests are in flight.",
        why="An NVMe disk needs several to be busy; more only wait.",
        ge=1,
        le=64,
    )
    direct: Toggle = words(
        "auto",
        does="Reads and writes bypass the page cache, which would hold everything twice.",
        why="auto does so if the file system allows it, and reports once if it does not.",
    )

    @property
    def folder(self) -> Path:
        """The folder meant, the system's own for temporary files where ``path`` is unset."""
        return Path(self.path if self.path is not None else tempfile.gettempdir()).expanduser()


class Save(Table):
    """[save]: saves that go on beside training (`wait=False`)."""

    snapshot: Amount | None = words(
        None,
        unset="no bound but [budget] host and what the machine has",
        does="Host memory that a rank may copy its state to for a background save; what is on the disk tier stays there and is "
        "not copied.",
        why="Unset is bounded only by [budget] host and what the machine has.",
    )
    while_saving: Literal["wait", "refuse"] = words(
        "wait",
        does="What a save does while an earlier one is still running: wait for it, or raise an error.",
        why="wait loses no checkpoint; refuse never delays a step.",
    )


class Resilience(Table):
    """[resilience]: what is looked for beside training, and what a job keeps to go on after a failure."""

    check_every: int | None = words(
        None,
        unset="replicas are not compared",
        expected="a number of steps, from 1",
        does="How often checksums are compared of masters and optimizer states that several ranks hold; if they differ, every "
        "rank raises `DivergenceError`, which names unit, parameter and rank.",
        why="Unset, because a check reads all of them once, including those on disk.",
        ge=1,
    )
    nonfinite: Literal["ignore", "name"] = words(
        "ignore",
        does="name checks gradients before they are reduced, and the outputs of units. A step whose gradients hold an inf or "
        "a nan raises `NonFiniteError` on every rank before anything is updated, and says on which rank and where it first "
        "appeared. A loss scale still skips its steps.",
        why="ignore costs nothing; but after the mean, one rank's inf or nan is on every rank.",
    )
    copies: int = words(
        1,
        does="How many other hosts keep a copy of each rank's shards in memory at `save_to_peers`; with fewer hosts, as "
        "many as there are.",
        why="One copy survives the loss of any one host.",
        ge=0,
        le=16,
    )
    memory: PathText = words(
        "/dev/shm",
        expected="the path of a folder",
        does="A folder on a tmpfs, where checkpoints in memory outlive the ranks; it may differ between hosts.",
        why="Linux has a tmpfs there for every user.",
    )
    job: PathText | None = words(
        None,
        unset="torchrun's run id",
        expected="a name",
        does="A name by which restarted ranks find the memory of the ranks before them.",
        why="Unset is torchrun's run id.",
    )


class Comm(Table):
    """[comm]: how ranks talk."""

    transport: Literal["auto", "stock", "p2p", "shm"] = words(
        "auto",
        does="How ranks exchange tensors; see below.",
        why="auto takes the fastest that the backend and the hosts allow.",
    )
    timeout_s: float = words(
        300.0,
        expected="seconds, above 0 and at most 86400",
        does="How long a rank waits without progress before it raises `DivergenceError`. The limit of collectives on a device, "
        "too, which the host learns of later.",
        why="Long enough for a slow first step, short enough to name a missing rank within minutes.",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    bucket: Size = words(
        16 << 20,
        does='Shared memory per rank that gathers and reductions pass through, beside every [budget]; only for "shm".',
        why="It does not depend on the model.",
        ge=256,
    )
    buffer: Size = words(
        256 << 20,
        does="The largest buffer through which values are copied, cast, reduced or saved; anything larger passes in chunks.",
        why="Units of up to 67 million fp32 elements stay whole; larger transfers are not faster.",
        ge=64,
    )


class Precision(Table):
    """[precision]: the dtypes of compute and of reduction; the masters keep the model's own (fp32)."""

    param: Dtype | None = words(
        None,
        unset="each parameter's own dtype",
        meant=DTYPES_ELSEWHERE,
        does="The dtype parameters are gathered and computed in; BatchNorm and InstanceNorm keep their own.",
        why="Unset keeps each parameter's own dtype, so that attach by itself does not change results.",
    )
    reduce: Dtype | None = words(
        None,
        meant=DTYPES_ELSEWHERE,
        does="The dtype gradients are summed in.",
        why="Unset is fp32 if param is set, else the gradient's own dtype, because 16 bits lose most in long sums.",
    )
    output: Dtype | None = words(
        None,
        unset="as the model computed it",
        meant=DTYPES_ELSEWHERE,
        does="The dtype that floating-point outputs of the outermost module are cast to.",
        why="Unset leaves outputs as the model computed them; a loss function usually casts to fp32 itself.",
    )
    cast_inputs: bool | Literal["unit"] = words(
        True,
        does='true casts floating-point inputs of the outermost module to param, "unit" those of every unit.',
        why="Without it the first layer would refuse them; inside the model, only its forward knows what must stay fp32.",
    )
    loss_scale: Literal["dynamic"] | Scale | None = words(
        None,
        unset="gradients are not scaled",
        expected='"dynamic" or a number, above 0 and at most 2**127',
        does="Scales gradients inside the model, and unscales them when they are stored; a step that overflowed is skipped.",
        why="Unset scales nothing: fp16 then needs torch.amp.GradScaler in the loop; bf16 and fp32 need neither.",
    )
    initial_scale: Scale = words(
        65536.0,
        expected=_SCALE,
        does='The first scale of "dynamic".',
        why="As in GradScaler. Too large a scale costs a skipped step each time it is halved, too small a one loses gradients.",
    )
    growth_interval: int = words(
        2000,
        does="How many steps without an overflow until the scale grows (DeepSpeed's loss_scale_window).",
        why="As in GradScaler: one step lost in two thousand is cheap.",
        ge=1,
        le=(1 << 31) - 1,
    )
    hysteresis: int = words(
        1,
        does="How many overflows since the scale last grew until it is reduced; each of them skips its step.",
        why="1 reduces it at once, as GradScaler does.",
        ge=1,
        le=1024,
    )
    min_scale: Scale = words(
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


class RuleCell(Table):
    """What a rule says of one cell."""

    tier: TierName | None = words(
        None,
        meant=TIERS_ELSEWHERE,
        does="The tier of this cell for the parameters that match.",
        why="Unset leaves this to the table.",
    )


class RulePrecision(Table):
    """What a rule says of dtypes."""

    param: Dtype | None = words(
        None,
        meant=DTYPES_ELSEWHERE,
        does="The dtype the parameters that match are gathered and computed in.",
        why="Unset leaves it to [precision] param.",
    )
    reduce: Dtype | None = words(
        None,
        meant=DTYPES_ELSEWHERE,
        does="The dtype the gradients of the parameters that match are summed in.",
        why="Unset leaves it to [precision] reduce.",
    )


class Rule(Table):
    """[[rule]]: other tiers and dtypes for the parameters whose name matches; the last that matches wins, key by key."""

    match: Name = words(
        ...,
        expected='a glob over parameter names, e.g. "*.embed*"',
        does="A glob over the names of `model.named_parameters()`; * matches dots too.",
    )
    parameter: RuleCell = Field(RuleCell(), description="The tensors the model computes with.")
    gradient: RuleCell = Field(RuleCell(), description="What backward leaves for the optimizer.")
    optimizer: RuleCell = Field(RuleCell(), description="The optimizer's states and the masters it updates.")
    precision: RulePrecision = Field(RulePrecision(), description="Dtypes of compute and of reduction.")

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, values: Any) -> Any:
        """JSON has no dotted keys; "parameter.tier" written there means what it means in TOML."""
        if not isinstance(values, Mapping):
            return values
        nested: dict[Any, Any] = {}
        for key, value in values.items():
            cell, dot, name = key.partition(".") if isinstance(key, str) else (key, "", "")
            if dot and cell in (*CELLS, "precision") and isinstance(values.get(cell, {}), Mapping):
                nested[cell] = {**(nested.get(cell) or values.get(cell) or {}), name: value}
            else:
                nested.setdefault(key, value)
        return nested

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if not self.says():
            *some, last = [f"{cell}.tier" for cell in CELLS] + [f"precision.{key}" for key in RulePrecision.model_fields]
            problem = ((), f"sets nothing; write {', '.join(some)} or {last}")
            raise PydanticCustomError("policy_rule", "sets nothing", {"problems": [problem]})
        return self

    def tiers(self) -> dict[str, TierName]:
        """The cells the rule speaks of, and where it puts them."""
        return {cell: tier for cell in CELLS if (tier := getattr(self, cell).tier) is not None}

    def says(self) -> dict[str, dict[str, str]]:
        """Everything the rule sets, table by table, as a file nests it."""
        cells: dict[str, dict[str, str]] = {cell: {"tier": tier} for cell, tier in self.tiers().items()}
        dtypes = {key: str(value) for key, value in self.precision if value is not None}
        return {**cells, "precision": dtypes} if dtypes else cells

    def matches(self, *names: str) -> bool:
        """Whether the rule is about the parameter that has these names (a tied one has several); case counts."""
        return any(fnmatchcase(name, self.match) for name in names)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The policy's words for one parameter: what it is computed in, and what its gradients are summed in; None is its own."""

    param: Dtype | None
    reduce: Dtype | None
