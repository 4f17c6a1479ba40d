"""The side under test: on each rank, the cell's model attached to zhooks and trained by an ordinary loop.

The matrix sends ``train`` to a pool of ranks; ``gather`` then joins what the ranks returned into one record.
It never reaches below the public interface of zhooks, and never imports it before a job asks for it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from tests.parity.cells import Cell
from tests.parity.oracle import CLIP_NORM, OPTIMIZERS, SEED, STEPS, Record, build_scaler, device_of, on_host
from tests.support.zoo import ZOO

JOB = "tests.parity.run:train"


def train(name: str) -> Record:
    """Train the cell of that name as this rank; losses hold this rank's column alone, states are rank 0's."""
    import zhooks

    cell = Cell.parse(name)
    rank = dist.get_rank() if dist.is_initialized() else 0
    specimen = ZOO[cell.model]
    device = device_of(cell, rank)
    # Ranks other than 0 start from other weights: attach makes them equal to rank 0's.
    model = specimen.build(SEED + rank).to(device)
    attachment = zhooks.attach(model, policy=cell.policy())
    optimizer = OPTIMIZERS[cell.optimizer](model.parameters())
    scaler = build_scaler(cell)
    record = Record(start=on_host(attachment.state_dict().get("model", {})))
    for step in range(STEPS):
        for micro in range(cell.micro_steps):
            last = micro == cell.micro_steps - 1
            with attachment.no_sync() if cell.quiet and not last else nullcontext():
                batch = specimen.batch(step * cell.micro_steps + micro, rank, cell.world)
                loss = specimen.loss(model, tuple(tensor.to(device) for tensor in batch))
                scaler.scale(loss / cell.micro_steps).backward()
            record.losses.append([loss.item()])
        if cell.clip == "clipped":
            scaler.unscale_(optimizer)
            record.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    record.final = on_host(attachment.state_dict().get("model", {}))
    attachment.detach()
    return record


def gather(records: list[Record]) -> Record:
    """One record of all ranks: losses side by side, the states of rank 0.

    Raises:
        AssertionError: the ranks saw different gradient norms, or a rank other than 0 holds a full state.
    """
    first, *others = records
    for rank, other in enumerate(others, start=1):
        assert other.norms == first.norms, f"norms: rank 0 saw {first.norms}, rank {rank} saw {other.norms}"
        assert not other.final, f"rank {rank} was given a full state dict"
    losses = [[row[0] for row in step] for step in zip(*(record.losses for record in records), strict=True)]
    return Record(losses=losses, norms=first.norms, start=first.start, final=first.final)
