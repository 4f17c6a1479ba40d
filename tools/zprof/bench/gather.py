"""Owns one rank of the all-gather that ``zprof bench gather`` measures; torchrun starts it: ``-m zprof.bench.gather NBYTES``.

Rank 0 prints one line, the rate of the slowest rank after `PREFIX`. It is no command of its own.
"""

from __future__ import annotations

import sys

import click
import torch
import torch.distributed as dist

from offload.device import default_device
from zprof.bench.trials import gather

__all__ = ["PREFIX"]

PREFIX = "zprof-bench-gather "


def main(nbytes: int) -> None:
    """Join, measure, and let rank 0 say the least of all ranks' rates."""
    device = default_device()
    backend = dist.Backend.default_device_backend_map.get(device.type, "")
    if device.type == "cpu" or not dist.is_backend_available(backend):
        device, backend = torch.device("cpu"), "gloo"
    else:
        torch.accelerator.set_device_index(dist.get_node_local_rank())
        device = default_device()
    dist.init_process_group(backend)
    try:
        rate = torch.tensor([gather(device, nbytes)], dtype=torch.float64, device=device)
        dist.all_reduce(rate, dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            click.echo(f"{PREFIX}{dist.get_backend()} {rate.item()}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
