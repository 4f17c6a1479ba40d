"""What handing a rank's state to a replica that returns takes: MB/s beside a plain copy of the same bytes, and memory.

    python benchmarks/replica_transfer.py --mib 256 --rounds 5 --json transfer.json

Two processes on one machine, as two replicas of one rank: AdamW in fp32, whose states the one that returns has too, from its
own first step. Rounds alternate the transfer with a TCP copy of as many bytes from one buffer of memory to another, through the
same loopback, 8 MiB a send, and with Gloo's send and receive of the same. Medians; memory is the highest resident size of each
process above what it had before its first transfer. torchft's lighthouse has no part in it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zhooks
from zhooks.integrations.peer_transfer import Arriving, Asked, PeerTransfer
from zhooks.resilience import Replica

CHUNK = 8 << 20


def resident() -> int:
    """Bytes of memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Highest:
    """The most that this process has had while this was open, above what it began with."""

    def __enter__(self) -> Highest:
        self._over, self.before = threading.Event(), resident()
        self.most = self.before
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        return max(self.most, resident()) - self.before


def moved(peer: socket.socket, memory: torch.Tensor, sends: bool) -> None:
    """All bytes of ``memory``, from one of the two to the other; the one that receives says when it has them."""
    view = memory.numpy().data
    if sends:
        for start in range(0, len(view), CHUNK):
            peer.sendall(view[start : start + CHUNK])
        peer.recv(1)
        return
    done = 0
    while done < len(view):
        done += peer.recv_into(view[done:])
    peer.sendall(b".")


def run(rank: int, folder: str, mib: int, rounds: int, tier: str) -> None:
    torch.manual_seed(rank)
    width = 1024
    # Values and two states, 12 bytes a parameter.
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, mib * 2**20 // (12 * width * width)))))
    attachment = zhooks.attach(model, policy={"stage": 3, "optimizer": {"tier": tier}})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
    replica = Replica(attachment.session, [optimizer])
    replica.forget_gradients()
    # Each is a job of one rank; the group is the benchmark's own, to meet and to compare with.
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    nbytes = len(model) * width * width * 12

    transfer = PeerTransfer("127.0.0.1", [])
    where: list[Any] = [transfer.metadata()]
    dist.broadcast_object_list(where, 0)
    server = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    port: list[Any] = [server.getsockname()[1] if server else 0]
    dist.broadcast_object_list(port, 0)
    peer = server.accept()[0] if server else socket.create_connection(("127.0.0.1", port[0]))

    seconds: dict[str, list[float]] = {"transfer": [], "tcp": [], "gloo": []}
    memory = 0
    for _ in range(rounds):
        dist.barrier()
        with Highest() as highest:
            begun = time.perf_counter()
            if rank == 0:
                transfer.serve(replica.offered_state({}), Asked(1, 1, {}, 600.0))
            else:
                arriving = Arriving(where[0], 1, 600.0)
                replica.take_state(arriving.where, arriving.header, arriving.ask)
                arriving.close()
            dist.barrier()
            seconds["transfer"].append(time.perf_counter() - begun)
        memory = max(memory, highest.nbytes)
        plain = torch.ones(nbytes, dtype=torch.uint8)
        for name in ("tcp", "gloo"):
            dist.barrier()
            begun = time.perf_counter()
            if name == "tcp":
                moved(peer, plain, rank == 0)
            elif rank == 0:
                dist.send(plain, 1)
            else:
                dist.recv(plain, 0)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
        del plain
    same: list[Any] = [None, None]
    dist.all_gather_object(same, replica.offered_state({}).digest())
    memories: list[Any] = [None, None]
    dist.all_gather_object(memories, memory)
    if rank == 0:
        rates = {name: [nbytes / 1e6 / each for each in times] for name, times in seconds.items()}
        ratios = [a / b for a, b in zip(seconds["tcp"], seconds["transfer"], strict=True)]
        found = {
            "nbytes": nbytes,
            "rounds": rounds,
            "tier": tier,
            "mb_per_s": {name: round(statistics.median(each), 1) for name, each in rates.items()},
            "of_tcp": round(statistics.median(ratios), 3),
            "highest_nbytes": {"sender": memories[0], "receiver": memories[1]},
            "same_values": same[0] == same[1],
            "load": os.getloadavg()[0],
        }
        Path(folder, "found.json").write_text(json.dumps(found))
    attachment.detach()
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--mib", default=256, type=click.IntRange(12), help="MiB of state a rank.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Transfers; between them as many plain copies.")
@click.option("--tier", default="device", type=click.Choice(["device", "host", "disk"]), help="Of the optimizer's states.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures there.")
def main(mib: int, rounds: int, tier: str, out: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, mib, rounds, tier), nprocs=2)
        found = json.loads(Path(folder, "found.json").read_text())
    for name, value in found.items():
        print(f"{name}: {value}")
    if out:
        out.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(0 if found["same_values"] else 1)


if __name__ == "__main__":
    main()
