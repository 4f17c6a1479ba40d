"""Owns the tables of a policy file: every key, what it may be, its default and the reason for it.

`offload.policy` puts them together; the page ``docs/reference/policy.md`` and the JSON schema are made from them. It never
compares one table with another and never reads a file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, InstanceOf, WithJsonSchema

from offload.documents import SIZE_SCHEMA, Kind, Names, Size, Table, words
from offload.errors import PolicyError
from offload.text import Share, parse_amount
from offload.tier import Tier

__all__ = [
    "DTYPES",
    "POLICY",
    "TIERS",
    "Activation",
    "Amount",
    "Budget",
    "Comm",
    "DeviceMemory",
    "Disk",
    "Dtype",
    "Host",
    "Optimizer",
    "Partition",
    "Placed",
    "Resilience",
    "Save",
    "Schedule",
    "TierName",
    "Units",
    "unjudged",
]

#: What the documents are, for their errors.
POLICY = Kind("policy", PolicyError)

Partition = Literal["shard", "replicate"]
TierName = Literal["device", "host", "disk"]
Dtype = Literal["fp32", "bf16", "fp16"]
Transport = Literal["auto", "stock", "p2p", "shm"]
Toggle = bool | Literal["auto"]


def _path(value: str) -> str:
    if not 0 < len(value) <= 4096 or not value.isprintable():
        raise ValueError("not a path")
    return value


_SHARE_SCHEMA = {"type": "string", "pattern": r"^\s*\d{1,3}(\.\d+)?\s*%\s*$", "examples": ["80%"]}

Amount = Annotated[
    int | InstanceOf[Share],
    BeforeValidator(parse_amount),
    WithJsonSchema({"anyOf": [*SIZE_SCHEMA["anyOf"], _SHARE_SCHEMA]}),
]

_NAMES = "a list of non-empty names"
DTYPES = '"fp32", "bf16" or "fp16"'
_SIZES = 'bytes or a size like "20 GiB"'
_AMOUNTS = 'bytes, a size like "20 GiB" or a share like "80%"'
TIERS = '"device", "host" or "disk"'
#: What users of other libraries call them; and torch's names of dtypes.
TIERS_ELSEWHERE = {"gpu": "device", "cuda": "device", "cpu": "host", "nvme": "disk"}
DTYPES_ELSEWHERE = {
    f"{at}{name}": ours
    for name, ours in {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.items()
    for at in ("", "torch.")
}
_AUTO = 'true, false or "auto"'
_BOOL = "true or false"


class Placed(Table):
    """One row of the table of placements: [parameter] or [gradient]."""

    partition: Partition | None = words(
        None,
        expected='"shard" or "replicate"',
        does="Whether each rank holds its own range or all of it.",
        why="Unset follows from the stage, so that a file needs either the stage or the partitions.",
    )
    tier: TierName = words(
        "device",
        expected=TIERS,
        meant=TIERS_ELSEWHERE,
        does="Where a rank stores what it holds between uses: on the device that computes, in host memory, or in a file.",
        why="The device is fastest.",
    )


class Gradient(Placed):
    """[gradient]: where gradients are kept, and what is made of those of several ranks."""

    reduce: Literal["mean", "sum"] = words(
        "mean",
        expected='"mean" or "sum"',
        does="What the gradients of the ranks become: their mean, as under DistributedDataParallel, or their sum.",
        why="A loss is usually the mean over its rank's batch; sum is for a loss divided by a count over all ranks (tokens).",
    )


class Optimizer(Placed):
    """[optimizer]: the states and the masters, and how they are updated."""

    device_share: float = words(
        0.0,
        expected="a number from 0 to 1",
        does="The share of elements, of those that tier moves off the device, whose states and masters stay there and are "
        "updated there: whole flat buffers of the first units, never more than the share.",
        why="0 takes the least device memory; a share takes more, and saves transfers and updates on the host.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    kernel: Literal["torch", "numba"] = words(
        "torch",
        expected='"torch" or "numba"',
        does="What computes the update: the optimizer, or a compiled pass over gradient, master, states and 16-bit copy.",
        why="torch equals plain PyTorch bit for bit; numba agrees within a tolerance and runs on CPUs.",
    )
    compute: Literal["device", "host"] = words(
        "device",
        expected='"device" or "host"',
        does="Where the update is computed, wherever the states are stored.",
        why="The device is faster; the host saves the transfer of states that are stored there.",
    )
    overlap: bool = words(
        False,
        expected=_BOOL,
        does="Updates a unit in backward, as soon as its gradients are reduced.",
        why="false, because a clip, unscale or second backward that follows would come too late.",
    )
    rounding: Literal["nearest", "stochastic"] = words(
        "nearest",
        expected='"nearest" or "stochastic"',
        does="How updates of parameters that are stored in bf16 are rounded; stochastic updates them in fp32, states included.",
        why="nearest is what torch does. It loses updates below half a unit in the last place; stochastic keeps their mean.",
    )
    seed: int = words(
        0,
        expected="an integer from 0 to 2**63 - 1",
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
        expected=TIERS,
        meant=TIERS_ELSEWHERE,
        does="Where saved tensors are stored until backward; they are brought back ahead of their use.",
        why="The device is fastest.",
    )
    checkpoint: Literal["none", "unit"] = words(
        "none",
        expected='"none" or "unit"',
        does="unit keeps only the inputs of each unit, and recomputes everything else in backward.",
        why="none, because recomputation takes time.",
    )
    partition: Literal["none", "tp"] = words(
        "none",
        expected='"none" or "tp"',
        does="tp keeps 1/t of each unit input that is the same on the t ranks of that axis, and gathers it for backward.",
        why="none, because only a mesh with a tp axis holds inputs more than once.",
    )
    sharded_inputs: Names = words(
        (),
        expected=_NAMES,
        does="Globs over units whose plain inputs differ between ranks (sequence parallelism); partition leaves them whole.",
        why="DTensors say so themselves; for plain tensors, a difference would be an error.",
    )
    min_bytes: Size = words(
        1 << 20,
        expected=_SIZES,
        does="Smaller tensors stay on the device, and whole. For partition, the size of the whole tensor counts.",
        why="Below this size, latency outweighs the transfer.",
    )
    keep: Size = words(
        0,
        expected=_SIZES,
        does="How many of the last bytes saved in a forward stay on the device, because backward needs them first.",
        why="0 moves everything: it frees the most memory, but backward waits for the transfer of the last unit.",
    )


class Units(Table):
    """[units]: which modules are gathered together."""

    classes: Names = words(
        (),
        expected=_NAMES,
        does="Each outermost module of these classes is a unit.",
        why="Without any, repeated blocks are found automatically.",
    )
    names: Names = words(
        (),
        expected=_NAMES,
        does='Globs over module names, e.g. "layers.*": each outermost module that matches is a unit.',
        why="Without any, as above.",
    )
    ignore: Names = words(
        (),
        expected=_NAMES,
        does="Globs over names of modules and parameters that stay as they are: not sharded, gathered, cast or reduced.",
        why="Without any, every parameter is sharded and its gradient reduced.",
    )
    min_numel: int = words(
        65536,
        expected="an integer from 0 to 2**40",
        does="Neighbours with fewer elements are joined into one unit; a leaf with as many is its own unit; 0 joins none.",
        why="Below this size, latency outweighs the transfer.",
        ge=0,
        le=1 << 40,
    )
    max_numel: int = words(
        1 << 26,
        expected="an integer from 1 to 2**40",
        does="A sharded flat buffer with more elements is divided into segments, each of which is split evenly.",
        why="2**26 elements of fp32 are 256 MiB; larger transfers are not faster.",
        ge=1,
        le=1 << 40,
    )


class Schedule(Table):
    """[schedule]: when units are gathered, released and reduced."""

    reshard_after_forward: Toggle = words(
        "auto",
        expected=_AUTO,
        does="true releases units between forward and backward, false keeps all, auto keeps the last ones that fit.",
        why="auto keeps what fits in [budget] device, also from one forward without gradients to the next; without a budget "
        "only the last one, until backward.",
    )
    prefetch: int = words(
        1,
        expected="an integer from 0 to 16",
        does="How many units are fetched and gathered ahead of use, in forward and in backward.",
        why="1 hides the transfer behind the compute and takes the buffer of one more unit.",
        ge=0,
        le=16,
    )
    max_reductions: int = words(
        2,
        expected="an integer from 1 to 64",
        does="How many reductions may be in flight before backward waits for the oldest.",
        why="One runs while the next fills; more only take memory for gradients.",
        ge=1,
        le=64,
    )
    uneven: bool = words(
        False,
        expected=_BOOL,
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
        expected='"none", "states" or "all"',
        does="What is allocated in memory reserved ahead: shards, gathered units and sums (states), "
        'and also the inputs that checkpoint = "unit" keeps, which are copied there (all).',
        why="none: it only helps if the allocator fails with much memory free (`zprof frag`). Not measured on a GPU.",
    )


class Host(Table):
    """[host]: the memory of the host tier."""

    pin: Toggle = words(
        "auto",
        expected=_AUTO,
        does="Locks host memory in place, so that a GPU reads and writes it at full speed while it computes.",
        why="auto pins if there is CUDA.",
    )
    slab: Size = words(
        64 << 20,
        expected=f"{_SIZES}, at least 4 KiB",
        does="Host memory is allocated in slabs of at least this size, which are split to exact sizes; under [budget] host, in "
        "slabs of the size of each block.",
        why="Pinning is slow per call and fast per byte.",
        ge=4096,
    )


class Budget(Table):
    """[budget]: bytes a rank may use on each tier; the least of all ranks counts."""

    device: Amount | None = words(
        None,
        expected=_AMOUNTS,
        does="Device memory per rank for what is stored there, gathered units in flight and units kept until backward. "
        "Activations are not counted: leave memory for them.",
        why="Unset sets no bound and keeps only the last unit.",
    )
    host: Amount | None = words(
        None,
        expected=_AMOUNTS,
        does="Host memory of what is stored there and of buffers in transit to disk.",
        why="Unset is bounded only by what the machine has.",
    )
    disk: Amount | None = words(
        None,
        expected=_AMOUNTS,
        does="The size of the scratch file.",
        why="Unset is bounded only by what the file system has.",
    )

    def resolve(self, tier: Tier, available: Callable[[], int]) -> int | None:
        """Bytes the budget allows on ``tier``, None for no bound; ``available`` is asked only for a share of it."""
        amount: int | Share | None = getattr(self, tier.value)
        return amount.of(available()) if isinstance(amount, Share) else amount


class Disk(Table):
    """[disk]: the scratch file of the disk tier, one a rank, removed at the end."""

    path: Annotated[str, AfterValidator(_path)] | None = words(
        None,
        expected="the path of a folder",
        does="The folder of the scratch files, created if missing; best on NVMe, never on a network file system. "
        "~ is your home directory.",
        why="Unset is the system's folder for temporary files (TMPDIR, else /tmp). If that is a tmpfs, its files take memory, "
        "and attach warns.",
    )
    block: Size = words(
        4 << 20,
        expected=f"{_SIZES}, at least 1 MiB and a multiple of 4 KiB",
        does="The size of one request.",
        why="Requests of this size reach the bandwidth of a disk.",
        ge=1 << 20,
        multiple_of=4096,
    )
    threads: int = words(
        16,
        expected="an integer from 1 to 64",
        does="How many requests are in flight.",
        why="An NVMe disk needs several to be busy; more only wait.",
        ge=1,
        le=64,
    )
    direct: Toggle = words(
        "auto",
        expected=_AUTO,
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
        expected=_AMOUNTS,
        does="Host memory that a rank may copy its state to for a background save; what is on the disk tier stays there and is "
        "not copied.",
        why="Unset is bounded only by [budget] host and what the machine has.",
    )
    while_saving: Literal["wait", "refuse"] = words(
        "wait",
        expected='"wait" or "refuse"',
        does="What a save does while an earlier one is still running: wait for it, or raise an error.",
        why="wait loses no checkpoint; refuse never delays a step.",
    )


class Resilience(Table):
    """[resilience]: what is looked for beside training, and what a job keeps to go on after a failure."""

    check_every: int | None = words(
        None,
        expected="a number of steps, from 1",
        does="How often checksums are compared of masters and optimizer states that several ranks hold; if they differ, every "
        "rank raises `DivergenceError`, which names unit, parameter and rank.",
        why="Unset, because a check reads all of them once, including those on disk.",
        ge=1,
    )
    nonfinite: Literal["ignore", "name"] = words(
        "ignore",
        expected='"ignore" or "name"',
        does="name checks gradients before they are reduced, and the outputs of units. A step whose gradients hold an inf or "
        "a nan raises `NonFiniteError` on every rank before anything is updated, and says on which rank and where it first "
        "appeared. A loss scale still skips its steps.",
        why="ignore costs nothing; but after the mean, one rank's inf or nan is on every rank.",
    )
    copies: int = words(
        1,
        expected="an integer from 0 to 16",
        does="How many other hosts keep a copy of each rank's shards in memory at `save_to_peers`; with fewer hosts, as "
        "many as there are.",
        why="One copy survives the loss of any one host.",
        ge=0,
        le=16,
    )
    memory: Annotated[str, AfterValidator(_path)] = words(
        "/dev/shm",
        expected="the path of a folder",
        does="A folder on a tmpfs, where checkpoints in memory outlive the ranks; it may differ between hosts.",
        why="Linux has a tmpfs there for every user.",
    )
    job: Annotated[str, AfterValidator(_path)] | None = words(
        None,
        expected="a name",
        does="A name by which restarted ranks find the memory of the ranks before them.",
        why="Unset is torchrun's run id.",
    )


def unjudged(resilience: Resilience, optimizer: Optimizer) -> list[tuple[tuple[str, ...], str]]:
    """What contradicts the look at gradients before a step, place and words."""
    if resilience.nonfinite == "ignore" or not optimizer.overlap:
        return []
    why = 'expected false with [resilience] nonfinite = "name", found true: gradients are checked only after backward'
    return [(("optimizer", "overlap"), why)]


class Comm(Table):
    """[comm]: how ranks talk."""

    transport: Transport = words(
        "auto",
        expected='"auto", "stock", "p2p" or "shm"',
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
        expected=f"{_SIZES}, at least 256 B",
        does='Shared memory per rank that gathers and reductions pass through, beside every [budget]; only for "shm".',
        why="It does not depend on the model.",
        ge=256,
    )
    buffer: Size = words(
        256 << 20,
        expected=f"{_SIZES}, at least 64 B",
        does="The largest buffer through which values are copied, cast, reduced or saved; anything larger passes in chunks.",
        why="Units of up to 67 million fp32 elements stay whole; larger transfers are not faster.",
        ge=64,
    )
