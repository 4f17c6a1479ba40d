"""The trials of `gpu.py`: copies, offloaded stage 3 beside its peers, activations, and equal bits on every tier.

`gpu.py` runs each by name, in a process of its own unless told otherwise, and compares the records. Nothing here compares,
prints, or asks which machine it is on: a trial gets a device and a size, and the same code runs on a CPU.

Note: [Exposed transfers]
    After the timed steps some more run with the seam's tickets watched. Where the compute stream is told to wait for a copy,
    an event before and one after that wait give the time it stood still; where the host itself waits, its clock does. On a
    CPU both are the host's clock. `gpu.py` sets beside it what the step takes longer than the same step without offload.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import measure
from drivers import ADAMW, Setting, Trial, placed, torch_trial
from drivers import zhooks as attached
from workload import Block, Shape, build, rank_batches

WARMUP_STEPS = 3
WATCHED_STEPS = 2
EQUAL_STEPS = 5
#: Enough under way that the copy engine never runs dry between two of them.
COPIES = 8


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured on one class of machine.

    Attributes:
        copy_nbytes: of one transfer.
        train: the GPT of offloaded stage 3.
        saved: the GPT whose activations are offloaded.
        equal: the GPT of the comparison of bits.
    """

    copy_nbytes: int
    train: Shape
    saved: Shape
    equal: Shape


_SMALL_EQUAL = Shape(layers=2, dim=256, heads=4, vocab=1024, length=128, batch=2)
SIZES: dict[str, Size] = {
    # 0.78 billion parameters, 12 GB of host memory in all; 1.7 billion for the activations.
    "h200": Size(
        256 << 20,
        Shape(layers=24, dim=1536, heads=12, vocab=32768, length=1024, batch=8),
        Shape(layers=8, dim=4096, heads=32, vocab=8192, length=2048, batch=4),
        _SMALL_EQUAL,
    ),
    # For a card of 8 GiB.
    "small": Size(
        64 << 20,
        Shape(layers=12, dim=768, heads=12, vocab=16384, length=512, batch=4),
        Shape(layers=8, dim=1024, heads=16, vocab=8192, length=2048, batch=2),
        _SMALL_EQUAL,
    ),
    # To see that the code runs.
    "nano": Size(
        1 << 20,
        Shape(layers=2, dim=64, heads=2, vocab=128, length=32, batch=2),
        Shape(layers=2, dim=64, heads=2, vocab=128, length=64, batch=2),
        Shape(layers=1, dim=32, heads=2, vocab=64, length=16, batch=2),
    ),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a trial is told."""

    name: str
    device: torch.device
    size: Size
    steps: int
    rounds: int


Record = dict[str, Any]


# --- time and memory --------------------------------------------------------------------------------------------------


def wait_for(device: torch.device) -> None:
    """Until everything queued on the device has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def restart_peaks(device: torch.device) -> None:
    gc.collect()
    measure.restart_peak()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peaks(device: torch.device) -> Record:
    """Bytes at the peak: of the device as allocated and as taken from the driver, and resident on the host."""
    cuda = device.type == "cuda"
    return {
        "device_nbytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
        "reserved_nbytes": torch.cuda.max_memory_reserved(device) if cuda else 0,
        "host_nbytes": measure.peak_rss_nbytes(),
    }


class Waits:
    """See Note [Exposed transfers]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stalled_s = self._blocked_s = 0.0

    @contextmanager
    def watch(self, seam: Any) -> Iterator[None]:
        """Inside, every ticket of the seam's copies is watched."""
        plain = seam.copy
        seam.copy = lambda *args, **named: Watched(self, plain(*args, **named))
        try:
            yield
        finally:
            del seam.copy

    def stall(self, wait: Callable[[], None]) -> None:
        """The compute stream is told to wait."""
        if self._device.type != "cuda":
            begin = time.perf_counter()
            wait()
            self._stalled_s += time.perf_counter() - begin
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(torch.cuda.current_stream(self._device))
        wait()
        after.record(torch.cuda.current_stream(self._device))
        self._stalls.append((before, after))

    def block(self, wait: Callable[[], None]) -> None:
        """The host waits."""
        begin = time.perf_counter()
        wait()
        self._blocked_s += time.perf_counter() - begin

    def per_step(self, steps: int) -> Record:
        """Seconds a step; the device must have run everything."""
        stalled = self._stalled_s + sum(before.elapsed_time(after) for before, after in self._stalls) / 1e3
        return {"stalled_s": stalled / steps, "blocked_s": self._blocked_s / steps}


class Watched:
    """A ticket whose waits are timed."""

    def __init__(self, waits: Waits, ticket: Any) -> None:
        self._waits, self._ticket = waits, ticket
        self.done: Callable[[], bool] = ticket.done

    def wait(self) -> None:
        self._waits.stall(self._ticket.wait)

    def synchronize(self) -> None:
        self._waits.block(self._ticket.synchronize)


@dataclass(slots=True)
class Stashed:
    """An observer that adds up what activations put away."""

    nbytes: int = 0

    def on_event(self, event: Any) -> None:
        if event.what == "stash" and event.kind == "begin":
            self.nbytes += event.nbytes


# --- copies -----------------------------------------------------------------------------------------------------------


def copies(ask: Ask) -> Record:
    """Bytes a second each way: a plain pinned copy, our seam on our pinned slabs, and the store with its buffers."""
    from offload.budget import Budget
    from offload.device import open_device
    from offload.memory import HostPool
    from offload.store import Store
    from offload.tier import Tier

    device, nbytes = ask.device, ask.size.copy_nbytes
    cuda = device.type == "cuda"
    # On a CPU the copies that a GPU would need are forced.
    seam = open_device(device, addresses_host=None if cuda else False)
    pool = HostPool(seam)
    store = Store(seam, pool, _no_disk, Budget(dict.fromkeys(Tier)), staging_nbytes=2 * COPIES * nbytes)
    far = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(COPIES)]
    plain = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda).fill_(1) for _ in range(COPIES)]
    own = [pool.take(nbytes, f"copy {number}").fill_(1) for number in range(COPIES)]
    blocks = [store.put(f"block {number}", nbytes, torch.uint8, Tier.HOST) for number in range(COPIES)]
    for block in blocks:
        block.tensor().fill_(1)

    def plain_copies(out: list[Tensor], source: list[Tensor]) -> None:
        for one, other in zip(out, source, strict=True):
            one.copy_(other, non_blocking=True)

    def seam_copies(out: list[Tensor], source: list[Tensor]) -> None:
        tickets = [seam.copy(one, other) for one, other in zip(out, source, strict=True)]
        for ticket in tickets:
            ticket.synchronize()

    def fetches() -> None:
        for lease in [store.fetch(block, Tier.DEVICE) for block in blocks]:
            lease.wait()
        for block in blocks:
            store.close(block)

    def write_backs() -> None:
        for block, values in zip(blocks, far, strict=True):
            store.change(block, values, add=False)
        store.flush()

    ways: dict[str, Callable[[], None]] = {
        "h2d plain": lambda: plain_copies(far, plain),
        "h2d seam": lambda: seam_copies(far, own),
        "h2d store": fetches,
        "d2h plain": lambda: plain_copies(plain, far),
        "d2h seam": lambda: seam_copies(own, far),
        "d2h store": write_backs,
    }
    seconds = _alternating(ways, device, ask.rounds)
    pinned = all(tensor.is_pinned() for tensor in own) if cuda else None
    store.shut()
    moved = COPIES * nbytes
    return {"nbytes": moved, "seconds": seconds, "pinned": pinned, "rates": _rates(seconds, moved)}


def _no_disk() -> Any:
    raise AssertionError("nothing is put on disk here")


def _alternating(ways: dict[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            wait_for(device)
            begin = time.perf_counter()
            way()
            wait_for(device)
            seconds[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


def _rates(seconds: dict[str, list[float]], nbytes: int) -> dict[str, float]:
    return {name: nbytes / statistics.median(values) for name, values in seconds.items()}


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """A model ready to train on one batch list."""

    trial: Trial
    batches: list[tuple[Tensor, Tensor]]
    losses: list[float] = field(default_factory=list)

    def step(self) -> Tensor:
        tokens, targets = self.batches[len(self.losses) % len(self.batches)]
        loss = self.trial.forward(tokens, targets)
        self.trial.backward(loss)
        self.trial.update()
        self.losses.append(0.0)
        return loss.detach()


def model_on(device: torch.device, shape: Shape) -> nn.Module:
    """The workload's model, made where it will live: its numbers are the same in every process of one kind of device."""
    with device:
        return build(shape)


def batches_on(device: torch.device, shape: Shape) -> list[tuple[Tensor, Tensor]]:
    found = rank_batches(shape, rank=0, world=1, of=1)
    return [(tokens.to(device), targets.to(device)) for tokens, targets in found]


def timed(ask: Ask, shape: Shape, make: Callable[[nn.Module], Trial]) -> Record:
    """Warm up, time steps one by one, then watch some more."""
    device = ask.device
    run = Run(make(model_on(device, shape)), batches_on(device, shape))
    for _ in range(min(WARMUP_STEPS, ask.steps)):
        run.step()
    wait_for(device)
    restart_peaks(device)
    seconds, losses = [], []
    for _ in range(ask.steps):
        begin = time.perf_counter()
        loss = run.step()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
    record: Record = {"step_s": statistics.median(seconds), "seconds": seconds, "losses": losses, **peaks(device)}
    record |= watched(run, device)
    if run.trial.attachment is not None:
        run.trial.attachment.detach()
    return record


def watched(run: Run, device: torch.device) -> Record:
    """What a step waits for transfers and what it puts away; nothing for a peer, or where nothing is offloaded."""
    attachment = run.trial.attachment
    if attachment is None or attachment.session.tiers.store is None:
        return {}
    waits, stashed = Waits(device), Stashed()
    watch = attachment.observe(stashed)
    with waits.watch(attachment.session.tiers.store.device):
        for _ in range(WATCHED_STEPS):
            run.step()
        wait_for(device)
    watch.close()
    return waits.per_step(WATCHED_STEPS) | {"stashed_nbytes": stashed.nbytes / WATCHED_STEPS}


# --- offloaded stage 3 ------------------------------------------------------------------------------------------------


OFFLOADED = (
    "zhooks-device",
    "zhooks-host-device-torch",
    "zhooks-host-host-torch",
    "zhooks-host-host-numba",
    "fsdp2-offload",
    "deepspeed-3-offload",
    "deepspeed-2-offload",
)


def policy_of(name: str) -> dict[str, Any]:
    """The tables of one of our rows."""
    if name == "zhooks-device":
        return {}
    _, _, compute, kernel = name.split("-")
    policy = placed("host", kernel)
    return {**policy, "optimizer": {**policy["optimizer"], "compute": compute}}


def offloaded(ask: Ask) -> Record:
    """One row of the comparison, bf16 compute and fp32 masters, AdamW."""
    setting = Setting(ask.size.train, "bf16", 1)

    def make(model: nn.Module) -> Trial:
        if ask.name.startswith("zhooks"):
            return attached(model, setting, stage=3, transport="auto", more=policy_of(ask.name))
        if ask.name == "fsdp2-offload":
            return fsdp2(model, ask.device)
        return deepspeed(model, setting, stage=int(ask.name.split("-")[1]))

    if ask.name.startswith("zhooks"):
        return timed(ask, ask.size.train, make)
    with group_of_one(ask.device, by_environment=ask.name.startswith("deepspeed")):
        return timed(ask, ask.size.train, make)


@contextmanager
def group_of_one(device: torch.device, *, by_environment: bool) -> Iterator[None]:
    """A process group of this process alone; DeepSpeed makes its own from the variables a launcher sets."""
    if by_environment:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        os.environ.update(alone)
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def fsdp2(model: nn.Module, device: torch.device) -> Trial:
    """torch's fully_shard with CPUOffloadPolicy, a unit a block, pinned where there is CUDA."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (1,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return torch_trial(model, optimizer, Setting(_SMALL_EQUAL, "bf16", 1), autocast=False)


def deepspeed(model: nn.Module, setting: Setting, *, stage: int) -> Trial:
    """ZeRO-Offload as DeepSpeed's documentation has it: states on the host, and parameters too at stage 3."""
    import deepspeed as ds

    host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": host, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 3:
        zero["offload_param"] = host
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.shape.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "bf16": {"enabled": True},
    }
    engine = ds.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    return Trial(engine, engine.backward, engine.step)


# --- activations ------------------------------------------------------------------------------------------------------


#: Row -> ([activation], dtype of compute).
ACTIVATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "saved-device": ({}, "bf16"),
    "saved-host": ({"tier": "host"}, "bf16"),
    "saved-host-wide": ({"tier": "host"}, "bf16"),
    "unit-device": ({"checkpoint": "unit"}, "bf16"),
    "unit-host": ({"checkpoint": "unit", "tier": "host"}, "bf16"),
    "torch-checkpoint": ({}, "bf16"),
    "saved32-device": ({}, "fp32"),
    "saved32-host": ({"tier": "host"}, "fp32"),
}
#: Bytes under way in `saved-host-wide`, where the others have the stash's own bound.
WIDE_NBYTES = 1 << 30


def activations(ask: Ask) -> Record:
    """One choice for what backward needs, under plain SGD; everything else stays on the device."""
    from zhooks import attach

    chosen, dtype = ACTIVATIONS[ask.name]
    policy: dict[str, Any] = {"stage": 3, "activation": chosen}
    if dtype == "bf16":
        policy["precision"] = {"param": "bf16", "reduce": "fp32"}

    def make(model: nn.Module) -> Trial:
        if ask.name == "torch-checkpoint":
            from activations import Checkpointed

            blocks: Any = model.blocks
            model.blocks = nn.ModuleList(Checkpointed(block) for block in blocks)
            policy["units"] = {"classes": ["Block"]}
        attachment = attach(model, policy=policy)
        stash = attachment.session.runtime.saved.stash
        if ask.name == "saved-host-wide" and stash is not None:
            stash.limits = dataclasses.replace(stash.limits, window_nbytes=WIDE_NBYTES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        trial = torch_trial(model, optimizer, Setting(ask.size.saved, dtype, 1), autocast=False)
        return Trial(trial.forward, trial.backward, trial.update, attachment)

    return timed(ask, ask.size.saved, make)


# --- equal bits -------------------------------------------------------------------------------------------------------


Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "adamw foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True, **ADAMW),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def equal(ask: Ask) -> Record:
    """For every optimizer and precision: the tiers whose losses or parameters differ from the device's after some steps."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    differ: list[str] = []
    compared = 0
    try:
        for name, optimizer in OPTIMIZERS.items():
            for dtype in ("fp32", "bf16"):
                wanted = _trained(ask, {}, dtype, optimizer)
                for label, policy in _elsewhere().items():
                    compared += 1
                    if _trained(ask, policy, dtype, optimizer) != wanted:
                        differ.append(f"{name} {dtype} {label}")
    finally:
        torch.use_deterministic_algorithms(before)
    return {"compared": compared, "differ": differ}


def _elsewhere() -> dict[str, dict[str, Any]]:
    ahead = {f"host, prefetch {depth}": {**placed("host"), "schedule": {"prefetch": depth}} for depth in (0, 1, 4)}
    saved = {"host, activations too": {**placed("host"), "activation": {"tier": "host", "min_bytes": 1024}}}
    return {**ahead, "disk": placed("disk"), **saved}


def _trained(
    ask: Ask, policy: dict[str, Any], dtype: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> tuple[list[float], str]:
    """Losses of some steps, and a digest of the parameters after them."""
    from zhooks import attach

    with tempfile.TemporaryDirectory() as folder:
        tables: dict[str, Any] = {"stage": 3, "units": {"min_numel": 0}, "disk": {"path": folder}, **policy}
        if dtype == "bf16":
            tables["precision"] = {"param": "bf16", "reduce": "fp32"}
        model = model_on(ask.device, ask.size.equal)
        attachment = attach(model, policy=tables)
        trial = torch_trial(model, optimizer(model), Setting(ask.size.equal, dtype, 1), autocast=False)
        run = Run(trial, batches_on(ask.device, ask.size.equal))
        losses = [float(run.step()) for _ in range(min(EQUAL_STEPS, ask.steps))]
        digest = hashlib.blake2b()
        for value in attachment.state_dict()["model"].values():
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        attachment.detach()
    return losses, digest.hexdigest()


# --- all of them ------------------------------------------------------------------------------------------------------


#: Section -> its trials, in the order they are run.
SECTIONS: dict[str, dict[str, Callable[[Ask], Record]]] = {
    "copies": {"copies": copies},
    "equal": {"equal": equal},
    "stage3": dict.fromkeys(OFFLOADED, offloaded),
    "activations": dict.fromkeys(ACTIVATIONS, activations),
}
