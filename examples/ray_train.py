"""Train the small GPT with Ray Train: its TorchTrainer starts the workers, zhooks shards the model over them.

    pip install '.[ray]'
    python examples/ray_train.py --workers 2

`zhooks.attach` replaces Ray's `prepare_model`, which would wrap the model in DistributedDataParallel.
Ray keeps reported checkpoints: after a worker fails, or with more `--steps`, the same command continues from there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer

import zhooks
from gpt import GPT, GPTConfig
from text import read_corpus, share, standard_library, train_batch

CONTEXT = 64


def train(job: dict[str, Any]) -> None:
    """What each worker runs, inside the process group that Ray has made."""
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = GPT(GPTConfig(job["layers"], job["dim"], 4, CONTEXT)).to(device)
    attachment = zhooks.attach(model, policy={"stage": 3})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    shards, kept, done = Path(job["out"], "shards"), ray.train.get_checkpoint(), 0
    if kept is not None:
        with kept.as_directory() as folder:
            done = attachment.load(folder, optimizer)["step"]
    corpus = read_corpus(Path(job["source"]), max_nbytes=16 << 20, min_nbytes=job["batch"] + CONTEXT)
    for step in range(done + 1, job["steps"] + 1):
        batch = train_batch(corpus.train, seed=0, step=step, rows=job["batch"], context=CONTEXT)
        inputs, targets = (part.to(device) for part in share(batch, rank=rank, world=world))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % job["every"] == 0 or step == job["steps"]:
            # Each rank writes its shards; Ray copies the folder once, and every worker waits in `report` until it has.
            attachment.save(shards, optimizer, extra={"step": step})
            copied = ray.train.Checkpoint.from_directory(shards) if rank == 0 else None
            ray.train.report({"step": step, "loss": loss.item()}, checkpoint=copied)


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=2, type=click.IntRange(1), help="Processes, each with a GPU, or a core without GPUs.")
@click.option("--steps", default=100, type=click.IntRange(1), help="Training steps, including those of earlier runs.")
@click.option("--every", default=50, type=click.IntRange(1), help="Steps between reports with a checkpoint.")
@click.option("--batch", default=16, type=click.IntRange(1), help="Windows per step, over all workers.")
@click.option("--layers", default=4, type=click.IntRange(1), help="Transformer blocks.")
@click.option("--dim", default=96, type=click.IntRange(8), help="Width of the model, a multiple of 8.")
@click.option("--source", default=standard_library(), type=click.Path(exists=True, resolve_path=True), help="Sources.")
@click.option("--out", default="ray", type=click.Path(resolve_path=True), help="Folder that all workers see, for checkpoints.")
def main(workers: int, **job: Any) -> None:
    """Train, and say what the loss of the last step was on rank 0."""
    if job["batch"] % workers:
        raise click.UsageError(f"--batch: expected a multiple of the {workers} workers, found {job['batch']}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False)
    scaling = ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available())
    failures, newest = ray.train.FailureConfig(max_failures=1), ray.train.CheckpointConfig(num_to_keep=1)
    run = ray.train.RunConfig("gpt", storage_path=job["out"], failure_config=failures, checkpoint_config=newest)
    last = TorchTrainer(train, train_loop_config=job, scaling_config=scaling, run_config=run).fit().metrics or {}
    click.echo(f"step {last['step']}: loss {last['loss']:.4f} on rank 0 of {workers} workers")


if __name__ == "__main__":
    main()
