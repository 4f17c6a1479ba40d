"""Where all ranks of the process group meet before an attachment opens its transports, each as often as every other.

``comm.py`` calls it first: making groups is collective over the whole process group, and a rank that attaches fewer models
(stages of a pipeline) than another would let that one wait for ever.  It moves no tensor.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from offload.errors import DivergenceError

__all__ = ["meet"]


def meet(timeout_s: float) -> None:
    """Return once every rank has come here as often as this one.  Collective over the process group.

    Raises:
        DivergenceError: one has not, within ``timeout_s``; names it, and how many models it has attached.
    """
    store = distributed_c10d._get_default_store()
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1 or dist.get_backend() == "fake":
        return
    count = store.add(f"zhooks/attached/{rank}", 1)
    everybody = f"zhooks/attach/{count}"
    if store.add(f"{everybody}/arrived", 1) == world:
        store.set(everybody, "here")
    try:
        store.wait([everybody], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        attached = {other: store.add(f"zhooks/attached/{other}", 0) for other in range(world)}
        missing = ", ".join(f"rank {other} {number}" for other, number in attached.items() if number < count)
        raise DivergenceError(
            f"rank {rank} in attach: expected every rank to attach model {count} of its process within {timeout_s} s, found "
            f"that some have attached fewer ({missing}). Attach as many models on every rank, pipeline stages included, in "
            "the same order, or raise [comm] timeout_s."
        ) from error
