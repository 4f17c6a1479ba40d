"""Train the small GPT as a pipeline: its blocks in stages on different processes, each sharded over its data-parallel ranks.

Run it with torchrun; the model is in `gpt.py`, the data in `text.py`:

    torchrun --nproc-per-node 2 examples/train_pipeline.py
    torchrun --nproc-per-node 4 examples/train_pipeline.py --schedule interleaved --stage 2

Read `build` first, then `train`, the loop one would write for a pipeline without zhooks. This file never reduces a
gradient and never says which microbatch is the last.
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.optim import AdamW

import zhooks
from gpt import GPT, GPTConfig, rotation_angles
from text import Corpus, CorpusError, held_out_batch, read_corpus, share, standard_library, train_batch

MAX_CORPUS_NBYTES = 16 << 20
#: How far a loss may be from the plain run's, in nats per byte: the two add the same numbers in another order.
TOLERANCE = 1e-4
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


@dataclass(frozen=True, slots=True)
class Job:
    """The options of the command line, one field each; `--help` explains them."""

    steps: int
    batch: int
    microbatches: int
    pp: int
    schedule: str
    stage: int
    layers: int
    dim: int
    heads: int
    context: int
    lr: float
    seed: int
    check_plain: int
    source: Path

    @property
    def stages(self) -> int:
        """Two on each rank where they are interleaved."""
        return self.pp * (2 if self.schedule == "interleaved" else 1)

    def new_model(self) -> GPT:
        """The same numbers on every rank."""
        torch.manual_seed(self.seed)
        return GPT(GPTConfig(self.layers, self.dim, self.heads, self.context))


class Stage(nn.Module):
    """The `index`-th of equal parts of a GPT: its blocks, with the embedding in front or the head behind at the ends."""

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        super().__init__()
        each = model.config.layers // stages
        self.width = model.config.dim // model.config.heads
        self.token = model.token if index == 0 else None
        self.blocks = nn.ModuleList(model.blocks[index * each : (index + 1) * each])
        self.head = nn.Sequential(model.norm, model.head) if index == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = self.token(x)
        angles = rotation_angles(x.shape[1], self.width, device=x.device)
        for block in self.blocks:
            x = block(x, angles)
        return x if self.head is None else self.head(x)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte, averaged over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """This rank's stages, attached, in their schedule."""

    def __init__(self, job: Job, mesh: DeviceMesh) -> None:
        self.job, self.mesh = job, mesh
        model, rank = job.new_model(), mesh["pp"].get_local_rank()
        mine = {index: Stage(model, index, job.stages) for index in range(rank, job.stages, job.pp)}
        self.first, self.last = 0 in mine, job.stages - 1 in mine
        # The one line: each stage over its data ranks. Every rank attaches as many, in the same order.
        self.attachments = [zhooks.attach(stage, mesh=mesh, policy={"stage": job.stage}) for stage in mine.values()]
        self.parameters = [parameter for stage in mine.values() for parameter in stage.parameters()]
        group, device = mesh["pp"].get_group(), torch.device("cpu")
        made = [PipelineStage(stage, index, job.stages, device, group=group) for index, stage in mine.items()]
        multi = job.schedule == "interleaved"
        self.schedule = SCHEDULES[job.schedule](made if multi else made[0], job.microbatches, loss_fn=cross_entropy)

    def run(self, batch: tuple[Tensor, Tensor], *, training: bool) -> float:
        """One step of the schedule, or an evaluation, on this data rank's share; the mean loss, on every rank."""
        inputs, targets = share(batch, rank=self.mesh["dp"].get_local_rank(), world=self.mesh["dp"].size())
        losses: list[Tensor] = []
        call = self.schedule.step if training else self.schedule.eval
        call(*((inputs,) if self.first else ()), **({"target": targets, "losses": losses} if self.last else {}))
        total = torch.stack(losses).detach().mean() if self.last else torch.zeros(())
        dist.all_reduce(total)
        return float(total) / self.mesh["dp"].size()


def train(pipeline: Pipeline, corpus: Corpus, *, chief: bool) -> list[float]:
    """Train for the job's steps and return the loss of each."""
    job, losses, began = pipeline.job, [], time.monotonic()
    optimizer = AdamW(pipeline.parameters, lr=job.lr, betas=(0.9, 0.95))
    for step in range(job.steps):
        batch = train_batch(corpus.train, seed=job.seed, step=step, rows=job.batch, context=job.context)
        losses.append(pipeline.run(batch, training=True))
        optimizer.step()
        optimizer.zero_grad()
        if chief and (step + 1) % 10 == 0:
            click.echo(f"step {step + 1}, {time.monotonic() - began:.0f} s: loss {losses[-1]:.3f}")
    return losses


def train_plainly(job: Job, corpus: Corpus) -> list[float]:
    """The first losses of the same training in one process, on whole batches."""
    model, losses = job.new_model(), []
    optimizer = AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95))
    for step in range(job.check_plain):
        inputs, targets = train_batch(corpus.train, seed=job.seed, step=step, rows=job.batch, context=job.context)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(job: Job) -> None:
    """The whole job: read, build, attach, train, validate."""
    mesh = init_device_mesh("cpu", (job.pp, dist.get_world_size() // job.pp), mesh_dim_names=("pp", "dp"))
    chief = dist.get_rank() == 0
    corpus = read_corpus(job.source, max_nbytes=MAX_CORPUS_NBYTES, min_nbytes=job.batch + job.context)
    pipeline = Pipeline(job, mesh)
    if chief:
        click.echo(f"{job.stages} stages on {job.pp} ranks, each over {mesh['dp'].size()} data ranks")
        click.echo(f"{pipeline.attachments[0].describe()}\n")
    losses = train(pipeline, corpus, chief=chief)
    held_out = held_out_batch(corpus.held_out, rows=job.batch, context=job.context)
    loss = pipeline.run(held_out, training=False)
    if chief:
        click.echo(f"validation loss {loss:.4f} nats per byte")
    plain = train_plainly(job, corpus) if chief else []
    dist.barrier()
    far = max((abs(a - b) for a, b in zip(losses, plain, strict=False)), default=0.0)
    if plain:
        click.echo(f"first {len(plain)} losses: at most {far:.1e} from the plain model's")
    if far > TOLERANCE:
        raise click.ClickException(f"losses: expected within {TOLERANCE} of the plain model's, found {far:.1e}")


def check_options(job: Job, world: int) -> None:
    """Raise a one-line error for options that contradict each other or the number of ranks."""
    if world % job.pp:
        raise click.UsageError(f"--pp: expected a divisor of the {world} ranks, found {job.pp}")
    if job.layers % job.stages:
        raise click.UsageError(f"--layers: expected a multiple of the {job.stages} stages, found {job.layers}")
    each = world // job.pp * job.microbatches
    if job.batch % each:
        raise click.UsageError(f"--batch: expected a multiple of data ranks times --microbatches, {each}, found {job.batch}")
    if job.dim % (2 * job.heads):
        raise click.UsageError(f"--dim: expected an even number for each of the {job.heads} heads, found {job.dim}")
    if job.check_plain > job.steps:
        raise click.UsageError(f"--check-plain: expected at most --steps, {job.steps}, found {job.check_plain}")


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=200, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=16, type=click.IntRange(1), help="Windows per step, over all data-parallel ranks.")
@click.option("--microbatches", default=4, type=click.IntRange(1), help="Microbatches per step and data-parallel rank.")
@click.option("--pp", default=2, type=click.IntRange(1), help="Pipeline-parallel ranks.")
@click.option("--schedule", default="1f1b", type=click.Choice(list(SCHEDULES)), help="Order of the microbatches.")
@click.option("--stage", default=3, type=click.IntRange(0, 3), help="ZeRO stage.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--dim", default=96, type=click.IntRange(2), help="Width of the model.")
@click.option("--heads", default=6, type=click.IntRange(1), help="Attention heads.")
@click.option("--context", default=64, type=click.IntRange(2, 8192), help="Context length in bytes.")
@click.option("--lr", default=2e-3, type=click.FloatRange(0), help="Learning rate.")
@click.option("--seed", default=0, type=click.IntRange(0, 2**32), help="Seed of weights and data order.")
@click.option("--check-plain", default=0, type=click.IntRange(0), help="Compare this many losses with a plain model.")
@click.option(
    "--source",
    default=standard_library,
    show_default="standard library",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="*.py files.",
)
def main(**options: Any) -> None:
    """Train a byte-level GPT on the Python standard library's own source, as a pipeline under ZeRO."""
    if not dist.is_torchelastic_launched():
        raise click.UsageError("expected torchrun: torchrun --nproc-per-node 2 examples/train_pipeline.py")
    job = Job(**options)
    dist.init_process_group("gloo")
    try:
        check_options(job, dist.get_world_size())
        run(job)
    except (CorpusError, zhooks.ZhooksError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
