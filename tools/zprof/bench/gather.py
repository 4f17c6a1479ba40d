"""Owns one rank of the all-gather that ``zprof bench gather`` measures; torchrun starts it: ``-m zprof.bench.gather NBYTES``.

Rank 0 prints one line, the rate of the slowest rank after `PREFIX`. It is no command of its own.
"""

from __future__ import annotations

import sys

import click
import torch
import torch.distributed as dist

from zprof.bench.trials import gather

__all__ = ["PREFIX"]

PREFIX = "zprof-bench-gather "


def main(nbytes: int) -> None:
    """Join, measure, and let rank 0 say the least of all ranks' rates."""
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        rate = torch.tensor([gather(nbytes)], dtype=torch.float64, device="cuda" if cuda else "cpu")
        dist.all_reduce(rate, dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            click.echo(f"{PREFIX}{dist.get_backend()} {rate.item()}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
