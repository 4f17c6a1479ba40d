"""A gradient longer than any buffer is put together at a cost that does not grow with the number of ranks."""

from __future__ import annotations

import torch
from torch import nn

import zhooks
from offload.virtual import Happening, Moment
from tests.support.virtual import machine, on_virtual


class Work:
    """What the compute stream and the host were given, beside collectives."""

    def __init__(self) -> None:
        self.count = 0

    def happened(self, happening: Happening) -> None:
        self.count += 1

    def recorded(self, moment: Moment, stream: object) -> None: ...
    def awaited(self, moment: Moment, stream: object) -> None: ...
    def kept(self, access: object, stream: object) -> None: ...
    def allocated(self, address: int, nbytes: int, index: int, stream: object) -> None: ...
    def freed(self, address: int, nbytes: int, index: int) -> None: ...


def work_of_a_backward(world: int) -> int:
    with machine(world=world) as made:
        with torch.device("virtual"):
            model = nn.Linear(1024, 1024, bias=False)
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, "comm": {"buffer": "1 MiB"}})
        for _ in range(2):
            work = Work()
            made.listeners.append(work)
            model(torch.empty(8, 1024, device="virtual")).sum().backward()
            made.listeners.remove(work)
        attachment.detach()
    return work.count


@on_virtual()
def test_a_backward_on_many_ranks_starts_as_many_operations_as_on_few() -> None:
    assert work_of_a_backward(128) <= work_of_a_backward(4) + 4
