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
_AUTO = 'true, false or "auto"'
_BOOL = "true or false"


class Placed(Table):
    """One row of the table of placements: [parameter] or [gradient]."""

    partition: Partition | None = words(
        None,
        expected='"shard" or "replicate"',
        does="Whether each rank holds its range or all of it.",
        why="Unset follows from the stage, so that a file says the stage or the cells and seldom both.",
    )
    tier: TierName = words(
        "device",
        expected=TIERS,
        does="Where a rank keeps what it holds between uses: with the compute, in host memory, or in a file.",
        why="The device is where the compute is.",
    )


class Gradient(Placed):
    """[gradient]: where gradients are kept, and what is made of those of several ranks."""

    reduce: Literal["mean", "sum"] = words(
        "mean",
        expected='"mean" or "sum"',
        does="What the gradients of the ranks become: their mean, as under DistributedDataParallel, or their sum.",
        why="A loss is usually the mean of its rank's batch; sum is for one divided by a count over all ranks (tokens).",
    )


class Optimizer(Placed):
    """[optimizer]: the states and the masters, and how they are updated."""

    device_share: float = words(
        0.0,
        expected="a number from 0 to 1",
        does="The share of the elements that tier places whose states and masters stay on the device all the same, and are "
        "updated there: whole flat buffers of the first units, never more than the share.",
        why="0 is the least device memory; a share trades it for transfers and for updates on the host.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    kernel: Literal["torch", "numba"] = words(
        "torch",
        expected='"torch" or "numba"',
        does="Who updates: the optimizer itself, or one pass of our own over gradient, master, states and 16-bit copy.",
        why="torch is plain PyTorch bit for bit; numba agrees within a tolerance, and runs on CPUs.",
    )
    compute: Literal["device", "host"] = words(
        "device",
        expected='"device" or "host"',
        does="Where the update is computed, wherever the states are stored.",
        why="The device is faster; the host spares the transfer of states that are stored there.",
    )
    overlap: bool = words(
        False,
        expected=_BOOL,
        does="Updates a unit in backward, as soon as its gradients are reduced.",
        why="A later clip, unscale or second backward of the step could not be honoured.",
    )
    rounding: Literal["nearest", "stochastic"] = words(
        "nearest",
        expected='"nearest" or "stochastic"',
        does="How updates of parameters that are stored in bf16 are rounded; stochastic updates them in fp32, states included.",
        why="nearest is what torch does; it loses updates below half a unit in the last place, which stochastic keeps.",
    )
    seed: int = words(
        0,
        expected="an integer from 0 to 2**63 - 1",
        does="The seed of stochastic rounding.",
        why="Any will do; the same one rounds the same way, on every tier and over any number of ranks.",
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
        does="Where saved tensors wait for backward; brought back ahead of it.",
        why="The device is where the compute is.",
    )
    checkpoint: Literal["none", "unit"] = words(
        "none",
        expected='"none" or "unit"',
        does="unit keeps the inputs of each unit alone, and computes everything else again in backward.",
        why="Computing forward twice costs time.",
    )
    partition: Literal["none", "tp"] = words(
        "none",
        expected='"none" or "tp"',
        does="tp keeps 1/t of each unit input that the t ranks of that axis hold alike, and gathers it for backward.",
        why="Only a mesh with a tp axis holds inputs more than once.",
    )
    sharded_inputs: Names = words(
        (),
        expected=_NAMES,
        does="Globs over units whose plain inputs differ from rank to rank (sequence parallelism), left alone by partition.",
        why="DTensors say so themselves; of plain tensors it would be an error.",
    )
    min_bytes: Size = words(
        1 << 20,
        expected=_SIZES,
        does="Smaller tensors stay on the device, and whole; of one that is partitioned the whole counts.",
        why="Below this latency outweighs transfer.",
    )
    keep: Size = words(
        0,
        expected=_SIZES,
        does="The last bytes saved in a forward that stay on the device, for backward needs them at once.",
        why="0 moves everything: the most memory is free, and the transfer of the last unit is waited for.",
    )


class Units(Table):
    """[units]: which modules are gathered together."""

    classes: Names = words(
        (),
        expected=_NAMES,
        does="Each outermost module of these classes is a unit.",
        why="None lets repeated blocks find themselves.",
    )
    names: Names = words(
        (),
        expected=_NAMES,
        does='Globs over module names, e.g. "layers.*": each outermost module that matches is a unit.',
        why="None as above.",
    )
    ignore: Names = words(
        (),
        expected=_NAMES,
        does="Globs over names of modules and parameters that stay as they are: not sharded, gathered, cast or reduced.",
        why="None: every parameter is partitioned, and its gradient reduced.",
    )
    min_numel: int = words(
        65536,
        expected="an integer from 0 to 2**40",
        does="Neighbours of fewer elements are joined; a leaf from it on is a unit of its own; 0 joins none.",
        why="Below this latency outweighs transfer.",
        ge=0,
        le=1 << 40,
    )
    max_numel: int = words(
        1 << 26,
        expected="an integer from 1 to 2**40",
        does="A sharded flat buffer of more elements is divided into segments, each split evenly.",
        why="2**26 of fp32 are 256 MiB, where size no longer helps.",
        ge=1,
        le=1 << 40,
    )


class Schedule(Table):
    """[schedule]: when units are gathered, released and reduced."""

    reshard_after_forward: Toggle = words(
        "auto",
        expected=_AUTO,
        does="Releases units between forward and backward, keeps all, or keeps the last ones that fit the budget.",
        why="auto keeps what fits in [budget] device, also from one forward without gradients to the next; with no budget the "
        "last one until backward.",
    )
    prefetch: int = words(
        1,
        expected="an integer from 0 to 16",
        does="Units fetched and gathered ahead of use, in forward and in backward.",
        why="One hides the transfer behind the compute and costs one more unit's buffer.",
        ge=0,
        le=16,
    )
    max_reductions: int = words(
        2,
        expected="an integer from 1 to 64",
        does="Reductions under way before backward waits for the oldest.",
        why="One runs while the next fills, more only pile up gradient buffers.",
        ge=1,
        le=64,
    )
    uneven: bool = words(
        False,
        expected=_BOOL,
        does="Ranks may use different units in a pass (layerdrop, an early exit): what is gathered stays until the pass ends.",
        why="Only ranks that differ need it: it costs memory for all gathered parameters in a pass and all sums in backward.",
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
        does="What lies in memory reserved ahead, apart from what comes and goes: shards, gathered units and sums (states), "
        'and also the inputs that checkpoint = "unit" keeps, which are copied there (all).',
        why="Of use where the allocator fails with much memory free, which `zprof frag` shows; measured on no GPU yet.",
    )


class Host(Table):
    """[host]: the memory of the host tier."""

    pin: Toggle = words(
        "auto",
        expected=_AUTO,
        does="Locks host memory in place, so that a GPU reads and writes it at full speed while it computes.",
        why="auto pins where there is CUDA.",
    )
    slab: Size = words(
        64 << 20,
        expected=f"{_SIZES}, at least 4 KiB",
        does="Host memory is taken from the system in slabs of at least this size, and split to exact size.",
        why="Pinning is slow a call and quick a byte.",
        ge=4096,
    )


class Budget(Table):
    """[budget]: bytes a rank may use on each tier; the least of all ranks counts."""

    device: Amount | None = words(
        None,
        expected=_AMOUNTS,
        does="Device memory in all: what is stored there, gathered units in flight, units kept until backward.",
        why="Unset bounds nothing and keeps the last unit alone.",
    )
    host: Amount | None = words(
        None,
        expected=_AMOUNTS,
        does="Host memory of what is stored there and of buffers on the way to disk.",
        why="Unset bounds nothing but what the machine has.",
    )
    disk: Amount | None = words(
        None,
        expected=_AMOUNTS,
        does="The size of the scratch file.",
        why="Unset bounds nothing but what the file system has.",
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
        does="The folder of the scratch files, made where it is missing; best on NVMe, and never on a network. "
        "~ is your home directory.",
        why="Unset is the system's folder for temporary files.",
    )
    block: Size = words(
        4 << 20,
        expected=f"{_SIZES}, at least 1 MiB and a multiple of 4 KiB",
        does="Bytes of one request.",
        why="Requests of this size reach a disk's bandwidth.",
        ge=1 << 20,
        multiple_of=4096,
    )
    threads: int = words(
        16,
        expected="an integer from 1 to 64",
        does="Requests in flight.",
        why="An NVMe disk needs several to be busy; more only pile up.",
        ge=1,
        le=64,
    )
    direct: Toggle = words(
        "auto",
        expected=_AUTO,
        does="Reads and writes past the page cache, which would hold everything twice.",
        why="auto does where the file system allows it, and says once where it does not.",
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
        does="Host memory that a rank may copy its state to, while it is written beside training; what is on the disk tier is "
        "kept there and not copied.",
        why="Unset bounds nothing but [budget] host and what the machine has.",
    )
    while_saving: Literal["wait", "refuse"] = words(
        "wait",
        expected='"wait" or "refuse"',
        does="What a save does while an earlier one still goes on.",
        why="wait loses no checkpoint; refuse never holds up a step.",
    )


class Resilience(Table):
    """[resilience]: what is looked for beside training, and what a job keeps to go on after a failure."""

    check_every: int | None = words(
        None,
        expected="a number of steps, from 1",
        does="So often masters and optimizer states that several ranks hold alike are compared by checksums; where they differ "
        "every rank raises `DivergenceError`, which names unit, parameter and rank.",
        why="Unset reads nothing. A check reads all of them once, those on a disk too.",
        ge=1,
    )
    nonfinite: Literal["ignore", "name"] = words(
        "ignore",
        expected='"ignore" or "name"',
        does="name looks at gradients before they are reduced and at what units make; a step whose gradients hold an inf or a "
        "nan raises `NonFiniteError` on every rank before anything is updated, and says on which rank and where it came up. A "
        "loss scale goes on skipping steps.",
        why="ignore reads nothing, and what one rank computed is everybody's after the mean.",
    )
    copies: int = words(
        1,
        expected="an integer from 0 to 16",
        does="How many other hosts keep a copy of each rank's shards in memory, at `save_to_peers`; where there are fewer, as "
        "many as there are.",
        why="One outlives the loss of any one host.",
        ge=0,
        le=16,
    )
    memory: Annotated[str, AfterValidator(_path)] = words(
        "/dev/shm",
        expected="the path of a folder",
        does="A folder on a tmpfs, where checkpoints in memory outlive the ranks; each host may have its own.",
        why="Linux has one there for every user.",
    )
    job: Annotated[str, AfterValidator(_path)] | None = words(
        None,
        expected="a name",
        does="By which ranks that are started again find the memory of those before.",
        why="Unset is torchrun's run id.",
    )


def unjudged(resilience: Resilience, optimizer: Optimizer) -> list[tuple[tuple[str, ...], str]]:
    """What contradicts the look at gradients before a step, place and words."""
    if resilience.nonfinite == "ignore" or not optimizer.overlap:
        return []
    why = 'expected false beside [resilience] nonfinite = "name", found true: gradients are judged when backward is over'
    return [(("optimizer", "overlap"), why)]


class Comm(Table):
    """[comm]: how ranks talk."""

    transport: Transport = words(
        "auto",
        expected='"auto", "stock", "p2p" or "shm"',
        does="How ranks exchange tensors, below.",
        why="auto takes the fastest that the backend and the hosts allow.",
    )
    timeout_s: float = words(
        300.0,
        expected="seconds, above 0 and at most 86400",
        does="After so long without progress a waiting rank raises `DivergenceError`; not for CUDA tensors.",
        why="Long enough for a slow first step, short enough that a missing rank is named within a coffee.",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    bucket: Size = words(
        16 << 20,
        expected=f"{_SIZES}, at least 256 B",
        does='Shared memory of one rank that gathers and reductions pass through; read by "shm" only.',
        why="Constant, whatever the model.",
        ge=256,
    )
    buffer: Size = words(
        256 << 20,
        expected=f"{_SIZES}, at least 64 B",
        does="No buffer that values are copied, cast, reduced or saved through is larger; what is larger goes in chunks.",
        why="Units of up to 67 million fp32 elements stay whole, and above that size no longer helps a transfer.",
        ge=64,
    )
