"""Models that compute on two streams of the virtual device or the accelerator, and what takes autograd from one to the other.

Tests of races train it as users of CUDA streams would: a stream that begins waits for the one it was begun on, and is joined.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from offload.virtual import running
from tests.support.zoo import Specimen, draw_vectors, squared


class Streams:
    """Those of the asynchronous accelerator (tests/accelerator), by the names that the virtual device has for the same."""

    @property
    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream()

    def stream(self, name: str) -> torch.Stream:
        return torch.Stream(torch.device("accel"))

    def use(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def using(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def order(self, stream: torch.Stream, after: torch.Stream) -> None:
        stream.wait_stream(after)

    def keep(self, tensor: Tensor, stream: torch.Stream) -> None:
        tensor.record_stream(stream)


def streams() -> Any:
    """Those of the device that this process has."""
    return Streams() if on_accelerator() else running()


def on_accelerator() -> bool:
    """This process has the accelerator, whose autograd runs each node on the stream of its forward, and orders them."""
    return hasattr(torch, "accel")


class Branches(nn.Module):
    """Two branches that nothing orders, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 5)
        self.left, self.right = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(2))
        self.second: Any = None

    def forward(self, x: Tensor) -> Tensor:
        here = streams()
        first = here.current
        self.second = second = self.second or here.stream("second")
        right = self.enter(x)
        left = Switch.apply(right, first, second)
        for layer in self.left:
            left = layer(left)
        here.use(first)
        for layer in self.right:
            right = layer(right)
        # The second stream has gone on beside, and is joined here.
        left = Switch.apply(left, second, first)
        return self.leave(left + right)


class Towers(nn.Module):
    """Two towers on two streams, whose layers are issued in turn, in backward too: neither stream waits for the other before
    the end. One layer is used on both.

    Args:
        skipping: one layer of each gets no gradient.
    """

    def __init__(self, *, skipping: bool = False) -> None:
        super().__init__()
        self.skipping = skipping
        self.enter, self.both, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.left, self.right = (nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(2))
        self.second: Any = None

    def forward(self, x: Tensor) -> Tensor:
        here = streams()
        first = here.current
        self.second = second = self.second or here.stream("second")
        right = self.enter(x)
        left = Switch.apply(right, first, second)
        for number, (one, other) in enumerate(zip(self.left, self.right, strict=True)):
            here.use(second)
            left = Turn.apply(torch.tanh(_through(one, left, skipped=self.skipping and number == 1)), second)
            here.use(first)
            right = Turn.apply(torch.tanh(_through(other, right, skipped=self.skipping and number == 2)), first)
        right = Turn.apply(self.both(right), first)
        here.use(second)
        # Without a gradient: the virtual device does not order autograd's sums of gradients of two streams, as CUDA has it.
        with torch.no_grad():
            seen = self.both(left)
        left = Turn.apply(left + seen, second)
        left = Switch.apply(left, second, first)
        return self.leave(left * right)


def _through(layer: nn.Module, x: Tensor, *, skipped: bool) -> Tensor:
    out: Tensor = layer(x)
    return x + out.detach() if skipped else out


class Turn(torch.autograd.Function):
    """In backward what came before it runs on this stream, as autograd has it of a node whose forward ran there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stream: Any) -> Tensor:
        ctx.stream = stream
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, tensor: Tensor) -> tuple[Tensor, None]:
        if not on_accelerator():
            running().use(ctx.stream)
        return tensor, None


class Switch(torch.autograd.Function):
    """What follows runs on another stream, in backward too: there autograd runs a node where its forward ran."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, before: Any, after: Any) -> Tensor:
        ctx.streams = before, after
        return _switched(tensor, before, after)

    @staticmethod
    def backward(ctx: Any, tensor: Tensor) -> tuple[Tensor, None, None]:
        before, after = ctx.streams
        return tensor if on_accelerator() else _switched(tensor, after, before), None, None


def _switched(tensor: Tensor, before: Any, after: Any) -> Tensor:
    here = streams()
    here.order(after, before)
    here.keep(tensor, after)
    here.use(after)
    return tensor.view_as(tensor)


BRANCHES = Specimen("branches", Branches, draw_vectors(8, 5), squared)
TOWERS = Specimen("towers", Towers, draw_vectors(8, 5), squared)
SKIPPING = Specimen("skipping", lambda: Towers(skipping=True), draw_vectors(8, 5), squared)
