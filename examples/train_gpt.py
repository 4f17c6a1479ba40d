"""Train a small GPT on the source code of Python's standard library, sharded over ranks with one line: `zhooks.attach`.

Run it with torchrun, or with python for one process; the model is in `gpt.py`, the data in `text.py`:

    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py --plain

Read `run` first, then `train`, the ordinary training loop. This file never treats a sharded model and a plain one
differently beyond the attach line and what the Attachment offers after it.
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import zhooks
from gpt import GPT, GPTConfig, sample
from offload.events import Event
from text import Corpus, CorpusError, held_out_batch, read_corpus, readable, share, standard_library, train_batch

MAX_CORPUS_NBYTES = 16 << 20
HELD_OUT_ROWS = 512
PROMPT = b"def "
WARMUP_STEPS = 50
#: How far a sharded run may be from the plain one, in nats per byte: the two add the same numbers in another order.
TOLERANCE = 1e-4
#: Options to go on with, and what they show.
TO_TRY = {
    "--stage 0": "the memory table when less is sharded (also 1 and 2)",
    "--check-plain 50": "the same losses as in one process without zhooks",
    "--precision bf16": "16-bit compute (or fp16, with a loss scale)",
    "--policy examples/policies/checkpoint_units.toml": "a policy file: this one recomputes activations",
    "--layers 8 --dim 384 --steps 3000 --seconds 3600": "a larger model, which takes longer",
}
#: How far a loss computed in 16 bits may be from the same weights' in fp32.
TOLERANCE_16 = 2e-2

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
Show = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Job:
    """The options of the command line, one field each; `--help` explains them."""

    steps: int
    seconds: float
    batch: int
    layers: int
    dim: int
    heads: int
    context: int
    lr: float
    seed: int
    stage: int | None
    policy: Path | None
    precision: str
    plain: bool
    check_plain: int
    device: str
    source: Path
    out: Path
    json: Path | None

    def new_model(self, device: torch.device) -> GPT:
        """The same numbers on every rank and in every run with this seed."""
        torch.manual_seed(self.seed)
        return GPT(GPTConfig(self.layers, self.dim, self.heads, self.context)).to(device)

    def new_policy(self) -> Path | dict[str, Any]:
        """What the attached model is trained under; fp16 needs its small gradients scaled, bf16 has the range of fp32."""
        if self.policy is not None:
            return self.policy
        precision = {"fp32": {}, "bf16": {"param": "bf16"}, "fp16": {"param": "fp16", "loss_scale": "dynamic"}}
        return {"stage": 3 if self.stage is None else self.stage, "precision": precision[self.precision]}

    def new_optimizer(self, model: nn.Module) -> Optimizer:
        """An ordinary optimizer, over sharded or plain parameters alike."""
        return AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95))

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a tenth at the last step."""
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, self.steps - WARMUP_STEPS)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the others."""

    rank: int
    world: int
    device: torch.device

    def total(self, *values: float) -> list[float]:
        """Each value summed over all ranks; every rank must call it."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()


@dataclass(slots=True)
class Result:
    """What `--json` writes."""

    world: int
    device: str
    parameters: int
    losses: list[float]
    seconds: float
    skipped_steps: int
    held_out_loss: float
    reloaded_loss: float
    plain_losses: list[float] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """So many losses are of both runs; either may have ended by `--seconds`."""
        return min(len(self.losses), len(self.plain_losses))

    @property
    def plain_difference(self) -> float:
        """The largest distance of a loss from the plain run's; 0 where none was asked for."""
        return max((abs(a - b) for a, b in zip(self.losses, self.plain_losses, strict=False)), default=0.0)

    def check(self, job: Job) -> None:
        """Raise a one-line error unless sharding changed nothing; a policy file may say 16 bits too."""
        tolerance = TOLERANCE if job.precision == "fp32" and job.policy is None else TOLERANCE_16
        if self.plain_difference > TOLERANCE:
            found = f"{self.plain_difference:.1e}"
            raise click.ClickException(f"losses: expected within {TOLERANCE} of the plain run's, found {found}")
        if abs(self.reloaded_loss - self.held_out_loss) > tolerance:
            found = f"{self.reloaded_loss:.6f}"
            raise click.ClickException(f"reloaded model: expected the loss {self.held_out_loss:.6f}, found {found}")


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


@contextlib.contextmanager
def open_ranks(device: str) -> Iterator[Ranks]:
    """Join the other processes under torchrun, over NCCL if each has a GPU, else over Gloo; alone without torchrun."""
    local_world, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if device == "cuda" and gpus < local_world:
        raise click.UsageError(f"--device cuda: expected {local_world} GPUs, one per rank, found {gpus}")
    use_cuda = device != "cpu" and gpus >= local_world
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(mine)
    if "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, mine)
        return
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=mine if use_cuda else None)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), mine)
        dist.barrier()  # nobody takes the group down while another rank still uses it
    finally:
        dist.destroy_process_group()


def run(job: Job, ranks: Ranks, console: Console) -> Result:
    """The whole job: read, build, attach, train, validate, sample, save, and load what was saved into a plain GPT."""
    corpus = read_corpus(job.source, max_nbytes=MAX_CORPUS_NBYTES, min_nbytes=HELD_OUT_ROWS + job.context)
    console.print(
        f"{corpus.train_files} files, {mib(corpus.train.numel())} to train on; "
        f"{corpus.held_out_files} files, {mib(corpus.held_out.numel())} held out"
    )
    plain_losses = train_plainly(job, corpus, ranks, console) if job.check_plain else []

    model = job.new_model(ranks.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attachment = None
    if not job.plain:
        attachment = zhooks.attach(model, policy=job.new_policy())
    optimizer = job.new_optimizer(model)
    how = f"attached, world size {ranks.world}" if attachment else "plain, in one process"
    console.print(f"GPT with {parameters:,} parameters on {ranks.device.type}, {how}")

    with Display(job, model, attachment, console) as display:
        losses = train(model, optimizer, job, corpus, ranks, steps=job.steps, show=display.show)
    if len(losses) < job.steps:
        longer = command(f"--seconds {max(3600, 2 * job.seconds):g}")
        console.print(f"stopped after step {len(losses)} of {job.steps} by --seconds {job.seconds:g}; for longer: {longer}")
    skipped = len(attachment.overflows) if attachment else 0
    if attachment and attachment.loss_scale is not None:
        console.print(f"loss scale {attachment.loss_scale:g}, {skipped} steps skipped")
    if attachment:
        # One more backward: the table is about the moment when gradients and optimizer states are all there. The first call
        # has the activations of what follows counted.
        attachment.memory()
        loss_of_step(model, job, corpus, ranks, step=0).backward()
        console.print(f"\n{attachment.memory()}")
        optimizer.zero_grad()

    # Evaluation and sampling use every unit many times over: gather all once and keep them.
    with attachment.resident() if attachment else contextlib.nullcontext():
        held_out_loss = validate(model, job, corpus, ranks)
        written = sample(model, PROMPT, length=400, context=job.context, seed=job.seed)
    console.print(f"\nvalidation loss {held_out_loss:.4f} nats per byte")
    console.print(f"\nText that the model generates after {PROMPT.decode()!r}\n\n{readable(written)}\n")

    save(model, attachment, job.out)
    ranks.wait()
    # Each rank loads the file for itself: a plain model needs neither ranks nor zhooks.
    reloaded = job.new_model(ranks.device)
    reloaded.load_state_dict(load_file(job.out, device=str(ranks.device)))
    reloaded_loss = validate(reloaded, job, corpus, ranks)
    console.print(f"saved to {job.out}; a plain GPT that loads it has validation loss {reloaded_loss:.4f}")
    return Result(
        ranks.world, ranks.device.type, parameters, losses, display.seconds, skipped, held_out_loss, reloaded_loss, plain_losses
    )


def train(
    model: nn.Module, optimizer: Optimizer, job: Job, corpus: Corpus, ranks: Ranks, *, steps: int, show: Show
) -> list[float]:
    """Train for `steps` steps or until the time is spent, and return the loss of every step.

    The loop one would write for one process; only the batch and the reported loss know of ranks.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, job.lr_factor)
    losses: list[float] = []
    began = time.monotonic()
    for step in range(steps):
        loss = loss_of_step(model, job, corpus, ranks, step=step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        # Clocks differ between ranks: all stop as soon as one of them is out of time.
        total, out_of_time = ranks.total(loss.item(), time.monotonic() - began > job.seconds)
        losses.append(total / ranks.world)
        if not math.isfinite(total):
            raise click.ClickException(f"step {step}: the loss is {total}; lower --lr from {job.lr}")
        show(step, losses[-1])
        if out_of_time:
            break
    return losses


def loss_of_step(model: nn.Module, job: Job, corpus: Corpus, ranks: Ranks, *, step: int) -> Tensor:
    """The mean loss over this rank's share of the batch of `step`."""
    batch = train_batch(corpus.train, seed=job.seed, step=step, rows=job.batch, context=job.context)
    inputs, targets = share(batch, rank=ranks.rank, world=ranks.world)
    return cross_entropy(model, inputs.to(ranks.device), targets.to(ranks.device))


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte, averaged over all positions."""
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, job: Job, corpus: Corpus, ranks: Ranks) -> float:
    """The loss over windows spread over the held-out files, each rank taking its share of every batch."""
    inputs, targets = held_out_batch(corpus.held_out, rows=HELD_OUT_ROWS, context=job.context)
    total, count = 0.0, 0
    # Whole batches only: every rank must get the same number of rows.
    for batch in zip(inputs.split(job.batch), targets.split(job.batch), strict=True):
        if len(batch[0]) < job.batch:
            break
        mine, wanted = share(batch, rank=ranks.rank, world=ranks.world)
        total += cross_entropy(model, mine.to(ranks.device), wanted.to(ranks.device)).item()
        count += 1
    return ranks.total(total)[0] / (count * ranks.world)


def train_plainly(job: Job, corpus: Corpus, ranks: Ranks, console: Console) -> list[float]:
    """The first losses of the same training in one process, for comparison; rank 0 does it while the others wait."""
    losses: list[float] = []
    if ranks.rank == 0:
        console.print(f"{job.check_plain} steps of the plain model first, to compare with")
        alone = Ranks(0, 1, ranks.device)
        model = job.new_model(ranks.device)
        optimizer = job.new_optimizer(model)
        losses = train(model, optimizer, job, corpus, alone, steps=job.check_plain, show=lambda step, loss: None)
    ranks.wait()
    return losses


def save(model: nn.Module, attachment: zhooks.Attachment | None, path: Path) -> None:
    """Write the full parameters as safetensors; with ranks, rank 0 writes and every rank must call."""
    if attachment is None:
        save_file(model.state_dict(), path)
    else:
        attachment.save_full(path)


class GatherCount:
    """An observer that adds up the bytes of every gather."""

    def __init__(self) -> None:
        self.nbytes = 0

    def on_event(self, event: Event) -> None:
        if event.what == "gather" and event.kind == "begin":
            self.nbytes += event.nbytes


class Display(contextlib.ExitStack):
    """The progress bar on rank 0, and a line for the first step and every fiftieth, for logs that keep no bar."""

    def __init__(self, job: Job, model: nn.Module, attachment: zhooks.Attachment | None, console: Console) -> None:
        super().__init__()
        self.seconds = 0.0
        self._job, self._console = job, console
        self._count, self._gathered_before = GatherCount(), 0
        if attachment is not None:
            self.callback(attachment.observe(self._count).close)
        # What lies here between steps: a rank's range of a sharded parameter, all of a plain one.
        held = sum(getattr(parameter, "to_local", parameter.detach)().nbytes for parameter in model.parameters())
        self._held = f"{'holds' if attachment is None else 'shards'} {mib(held)}"
        columns = MofNCompleteColumn(), TextColumn("{task.description}"), BarColumn(None, table_column=Column(ratio=1))
        self._progress = self.enter_context(Progress(*columns, console=console, disable=console.quiet, expand=True))
        self._task = self._progress.add_task("training", total=job.steps)
        self._began = time.monotonic()

    def show(self, step: int, loss: float) -> None:
        """Take the loss of a finished step."""
        self.seconds = time.monotonic() - self._began
        tokens = (step + 1) * self._job.batch * self._job.context
        gathered, self._gathered_before = self._count.nbytes - self._gathered_before, self._count.nbytes
        speed = tokens / self.seconds
        line = f"loss {loss:.3f}, {speed:,.0f} tokens/s, {self._held}, gathers {mib(gathered)} per step"
        self._progress.update(self._task, completed=step + 1, description=line)
        if step == 0 or (step + 1) % 50 == 0:
            self._console.print(f"step {step + 1}, {self.seconds:.0f} s: {line}")


def report(job: Job, result: Result, console: Console) -> None:
    """The comparison with the plain run, what to try next, and the JSON file."""
    if result.plain_losses:
        console.print(f"first {result.compared} losses: at most {result.plain_difference:.1e} from the plain run's")
    console.print("\nWhat to try next")
    for options, why in TO_TRY.items():
        console.print(f"  {why}:\n    {command(options)}")
    console.print(f"  zhooks.attach(model) in your own training loop:\n    {command('', 'your_script.py')}")
    if job.json is not None and not console.quiet:
        facts = asdict(result) | {"plain_difference": result.plain_difference}
        job.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def command(options: str, script: str = "") -> str:
    """How to run this program with other options, or another one, in the way in which it was started."""
    made, local, world = (os.environ.get(name, "") for name in ("TRAIN_GPT_MAKE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if made and not script:
        return f'{made} ARGS="{options}"'
    if local == world != "":
        # The Makefile's virtual environment need not be active.
        torchrun = os.path.relpath(Path(sys.executable).with_name("torchrun")) if made else "torchrun"
        threads = os.environ.get("OMP_NUM_THREADS", "") if made else ""
        start = f"OMP_NUM_THREADS={threads} {torchrun}" if threads else torchrun
        return f"{start} --nproc-per-node {local} {script or sys.argv[0]} {options}".rstrip()
    # Of several nodes each has its own command.
    return f"{'python' if world in ('', '1') else '...'} {script or sys.argv[0]} {options}".rstrip()


def check_options(job: Job) -> None:
    """Raise a one-line error for options that contradict each other or the number of ranks; make the output folder."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if job.plain and (world > 1 or job.check_plain or job.stage is not None or job.policy):
        raise click.UsageError("--plain runs one process unsharded: no torchrun, --stage, --policy or --check-plain")
    if job.policy and (job.stage is not None or job.precision != "fp32"):
        raise click.UsageError("--policy and --stage or --precision: write stage and precision into the policy file")
    if job.precision != "fp32" and (job.plain or job.check_plain):
        raise click.UsageError(f"--precision {job.precision}: --plain and --check-plain compare fp32 runs")
    if job.batch % world:
        raise click.UsageError(f"--batch: expected a multiple of the {world} ranks, found {job.batch}")
    if job.dim % (2 * job.heads):
        raise click.UsageError(f"--dim: expected an even number for each of the {job.heads} heads, found {job.dim}")
    if job.check_plain > job.steps:
        raise click.UsageError(f"--check-plain: expected at most --steps, {job.steps}, found {job.check_plain}")
    for name, number in (("--lr", job.lr), ("--seconds", job.seconds)):
        if math.isnan(number):
            raise click.UsageError(f"{name}: expected a number, found nan")
    if job.json is not None and job.json.resolve() == job.out.resolve():
        raise click.UsageError(f"--json: expected another file than --out, found {job.json}")
    # What would be refused after minutes of training is refused now.
    for path in filter(None, (job.out, job.json)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise click.UsageError(f"{path}: expected a file or no such path, found a device or a pipe")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.UsageError(f"{path}: expected a path that may be written; name another")


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=1200, type=click.IntRange(1), help="Training steps.")
@click.option("--seconds", default=540.0, type=click.FloatRange(0), help="Stop training after this time, not counting set-up.")
@click.option("--batch", default=16, type=click.IntRange(1, HELD_OUT_ROWS), help="Windows per step, over all ranks.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--dim", default=192, type=click.IntRange(2), help="Width of the model.")
@click.option("--heads", default=6, type=click.IntRange(1), help="Attention heads.")
@click.option("--context", default=128, type=click.IntRange(2, 8192), help="Context length in bytes.")
@click.option("--lr", default=2e-3, type=click.FloatRange(0), help="Highest learning rate.")
@click.option("--seed", default=0, type=click.IntRange(0, 2**32), help="Seed of weights, data order and sampling.")
@click.option("--stage", type=click.IntRange(0, 3), help="ZeRO stage.  [default: 3]")
@click.option("--policy", type=FILE, help="Policy file, instead of --stage.")
@click.option(
    "--precision", default="fp32", type=click.Choice(["fp32", "bf16", "fp16"]), help="Compute dtype; masters stay in fp32."
)
@click.option("--plain", is_flag=True, help="One process without zhooks, on the same batches.")
@click.option("--check-plain", default=0, type=click.IntRange(0), help="Compare this many losses with a plain run.")
@click.option(
    "--device", default="auto", type=click.Choice(["auto", "cpu", "cuda"]), help="auto: one GPU per rank, else CPU."
)
@click.option("--source", default=standard_library, show_default="standard library", type=FOLDER, help="Folder of *.py files.")
@click.option("--out", default="out/gpt.safetensors", type=FILE, help="Where to write the trained weights.")
@click.option("--json", type=FILE, help="Where to write losses and results.")
def main(**options: Any) -> None:
    """Train a byte-level GPT on the Python standard library's own source."""
    job = Job(**options)
    try:
        check_options(job)
        with open_ranks(job.device) as ranks:
            console = Console(quiet=ranks.rank != 0, markup=False, highlight=False, soft_wrap=True)
            result = run(job, ranks, console)
        report(job, result, console)
        result.check(job)
    except (CorpusError, zhooks.ZhooksError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
