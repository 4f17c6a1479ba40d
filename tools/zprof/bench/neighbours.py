"""Owns the processes that keep a machine's other cores busy while one of them is measured: ``neighbours(count)``.

`bench/profile.py` starts them around what a rank does while other ranks compute beside it, for they share caches, memory and
clocks.  ``-m zprof.bench.neighbours`` is one of them; it measures nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["neighbours"]

_WIDTH, _NUMEL = 512, 1 << 21


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes compute until this ends."""
    command = [sys.executable, "-m", "zprof.bench.neighbours", str(os.getpid())]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        for each in started:
            assert each.stdout is not None
            each.stdout.read(1)  # it has begun
        yield
    finally:
        for each in started:
            each.kill()
            each.communicate()


def main(parent: int) -> None:
    """Products and passes over memory in turn, as a training step has them, while the parent lives."""
    import torch

    torch.set_num_threads(1)
    a, b, x = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH), torch.ones(_NUMEL)
    click.echo()
    while os.getppid() == parent:
        for _ in range(4):
            torch.mm(a, b)
        torch.add(x, x)


if __name__ == "__main__":
    main(int(sys.argv[1]))
