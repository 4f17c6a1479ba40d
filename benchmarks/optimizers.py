"""What a step of Muon costs attached, beside AdamW's and beside plain Muon's, and how its states lie on the ranks.

A person runs it: `torchrun --nproc-per-node 2 benchmarks/optimizers.py`. It checks no result; the tests do.

Note: [The target]
    A step shall take at most 1.1 x of attached AdamW's and 1/N of the time of the plain Newton-Schulz iterations, which are
    the whole of a plain Muon step but for a few passes over memory. Steps of all kinds take turns, and the median of the
    slowest rank counts. Beside wall time there is the time that the process computed: on a machine whose cores are shared
    by more processes than it has, ranks wait for each other's turns, and wall time says nothing of an update.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import zhooks
from zhooks.optim import nbytes_of, tensors_in


def net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


class Stepped:
    """An optimizer of a model whose gradients are there."""

    def __init__(self, model: nn.Module, made: Callable[..., torch.optim.Optimizer]) -> None:
        self._model, self.optimizer = model, made(model.parameters())
        width: int = model[0].weight.shape[0]  # type: ignore[index]
        model(torch.randn(4, width)).square().mean().backward()
        self.optimizer.step()

    def time(self) -> tuple[float, float]:
        """Wall and computing seconds of one step."""
        wall, busy = time.perf_counter(), time.process_time()
        self.optimizer.step()
        return time.perf_counter() - wall, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    kinds: dict[str, Stepped] = {}
    for name, made in (("AdamW", torch.optim.AdamW), ("Muon", torch.optim.Muon)):
        model = net(chosen.width, chosen.layers)
        zhooks.attach(model, policy={"units": {"min_numel": 0}})
        kinds[name] = Stepped(model, made)
    plain = Stepped(net(chosen.width, chosen.layers), torch.optim.Muon) if rank == 0 else None
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*kinds, "plain Muon")}
    for _ in range(chosen.steps):
        for name, stepped in kinds.items():
            dist.barrier()
            times[name].append(stepped.time())
        dist.barrier()
        if plain is not None:
            times["plain Muon"].append(plain.time())
    held = torch.tensor(
        [float(sum(map(nbytes_of, tensors_in(dict(enumerate(kinds["Muon"].optimizer.state.values()))))))] * world
    )
    shares = [torch.zeros_like(held[:1]) for _ in range(world)]
    dist.all_gather(shares, held[:1])
    medians = torch.tensor(
        [[statistics.median(side) for side in zip(*(values or [(0.0, 0.0)]), strict=True)] for values in times.values()]
    )
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    if rank == 0:
        total = sum(float(share) for share in shares)
        for name, (wall, busy) in zip(times, medians.tolist(), strict=True):
            print(f"{name:<12}{1e3 * wall:9.1f} ms wall{1e3 * busy:9.1f} ms computing")
        for side, name in enumerate(("wall", "computing")):
            adamw, muon, plain_muon = medians[:, side].tolist()
            ratio = muon / (1.1 * adamw + plain_muon / world)
            print(f"Muon takes {ratio:.2f} x of 1.1 x AdamW's step and 1/{world} of plain Muon's ({name})")
        print(f"states: {', '.join(f'{float(share) / total:.3f}' for share in shares)} of {total / 2**20:.1f} MiB by rank")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
