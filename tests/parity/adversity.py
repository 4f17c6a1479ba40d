"""Adversities: loops that plain PyTorch allows and a sharded runtime may get wrong, each told once and played on two
sides.

``@adversity`` turns a story, a function of a ``Side``, into a pytest test; ``play`` is the job that runs the story on
a rank, first on plain replicas whose gradients are averaged by hand, then on zhooks. It never looks inside zhooks: a
side differs in ``attach``, ``settle`` and what it may refuse, and in nothing else.

Note: [A story]
A story builds its model, calls ``side.attach``, trains, and notes what must be equal on both sides: losses,
gradients, the final state. It calls ``side.settle(model)`` after its backwards, where plain replicas must average
their gradients and zhooks has already done so. At world 1 the notes are bit-equal. At world 2 they are too, unless
the story says that zhooks may add in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.closeness import EXACT, REORDERED, tensor_difference
from tests.parity.oracle import SEED
from tests.support.averaging import average_gradients
from tests.support.on_ranks import place
from tests.support.ranks import Pool, find
from tests.support.values import whole

Notes = list[tuple[str, Tensor]]


@dataclass(slots=True)
class Side:
    """Plain replicas: what a story may ask of the side it is played on. ``notes`` collects what must be equal."""

    rank: int
    world: int
    stage: int
    notes: Notes = field(default_factory=list)
    attachments: list[Any] = field(default_factory=list)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **policy: Any) -> Any:
        return self._keep(Replica(model))

    def settle(self, model: nn.Module) -> None:
        """Average the gradients of the replicas."""
        average_gradients(model, self.world)

    def note(self, name: str, value: Tensor | float) -> None:
        """Keep a value, the full one where it is sharded, to be compared with the other side's note at the same
        place.
        """
        self.notes.append((name, whole(value) if isinstance(value, Tensor) else torch.tensor(float(value))))

    def note_gradients(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.note(f"has gradient {name}", float(p.grad is not None))
            if p.grad is not None:
                self.note(f"gradient {name}", p.grad)

    def note_state(self, attachment: Any) -> None:
        """Note the full state, which rank 0 alone is given."""
        for name, tensor in sorted(attachment.state_dict().get("model", {}).items()):
            self.note(f"state {name}", tensor)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        """One ordinary step of a model that maps [rows, 6] to [rows, 3]."""
        x, y = batch(number, self.rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        self.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        self.note(f"loss {number}", loss)

    def _keep(self, attachment: Any) -> Any:
        self.attachments.append(attachment)
        return attachment


class ZhooksSide(Side):
    """The same, under zhooks: attached by policy, gradients averaged by the runtime."""

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **policy: Any) -> Any:
        import zhooks

        # Every block is a unit of its own, or a model this small would be one unit and nothing would be prefetched.
        written = {"stage": self.stage, "units": {"min_numel": 0}, "comm": {"timeout_s": 60.0}} | policy
        return self._keep(zhooks.attach(model, optimizer, policy=written))

    def settle(self, model: nn.Module) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Replica:
    """The plain side's attachment: the model as it is."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        if dist.is_initialized() and dist.get_rank() > 0:
            return {}
        return {"model": {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}}

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def detach(self) -> None:
        return None


def batch(step: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs [rows, 6] and targets [rows, 3] of that step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


class Block(nn.Module):
    """[rows, 8] to [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """[rows, 6] to [rows, 3] through ``blocks`` blocks: what a story trains unless it needs a model of its own."""

    #: A `torch.nn.ModuleList` of what the story made them of.
    blocks: Any

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose decay moves any parameter that is stepped, so a gradient of zeros and no gradient are told apart."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: a gradient that is too large by a factor shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_by(side: Side, model: nn.Module, loss_of: Callable[[int], Tensor]) -> None:
    """Attach, train by ``loss_of(step)``, note the losses and the state."""
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(3):
        loss = loss_of(step)
        loss.backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    side.note_state(attachment)


def rows(side: Side, step: int) -> Tensor:
    """Inputs [4, 8] of that step and rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + side.rank))


def train_noting_gradients(side: Side, model: nn.Module, loss_of: Callable[[int], Tensor]) -> None:
    """Train the attached ``model`` for two steps, note losses and gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(2):
        loss = loss_of(step)
        loss.backward()
        side.settle(model)
        side.note("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def loss_at(model: nn.Module, step: int, side: Side) -> Tensor:
    x, y = batch(step, side.rank)
    return F.mse_loss(model(x), y)


# ---- a story as a test

Story = Callable[[Side], None]


def adversity(
    *, stages: tuple[int, ...] = (3,), worlds: tuple[int, ...] = (1, 2), exact: bool = True
) -> Callable[[Story], Any]:
    """Make a test of a story; ``exact=False`` where zhooks may add in another order than the replicas at world 2."""

    def decorate(story: Story) -> Any:
        cases = [pytest.param(world, stage, id=f"world{world}-stage{stage}") for world in worlds for stage in stages]

        @pytest.mark.parametrize(("world", "stage"), cases)
        def test(world: int, stage: int, ranks: Callable[[int], Pool]) -> None:
            job = f"{story.__module__}:{story.__name__}"
            tolerance = EXACT if world == 1 or exact else REORDERED
            for rank, (plain, found) in enumerate(ranks(world).run(JOB, story=job, stage=stage)):
                lines = compare(plain, found, tolerance)
                assert not lines, "\n".join([f"rank {rank}: {len(lines)} notes differ from plain replicas", *lines])

        test.__name__ = test.__qualname__ = story.__name__
        test.__module__ = story.__module__
        test.__doc__ = story.__doc__
        test.story = story  # type: ignore[attr-defined]
        return test

    return decorate


JOB = "tests.parity.adversity:play"


def play(story: str, stage: int) -> tuple[Notes, Notes]:
    """Run a story on both sides, on this rank; the plain notes and those under zhooks."""
    sides = [side(*place(), stage) for side in (Side, ZhooksSide)]
    for side in sides:
        torch.manual_seed(SEED)
        find(story).story(side)
        for attachment in side.attachments:
            attachment.detach()
    plain, under_zhooks = sides
    return plain.notes, under_zhooks.notes


def compare(plain: Notes, found: Notes, tolerance: Any) -> list[str]:
    """One line for each note that differs."""
    if [name for name, _ in plain] != [name for name, _ in found]:
        return [f"notes: expected {[name for name, _ in plain]}, found {[name for name, _ in found]}"]
    lines = [
        tensor_difference(tensor, wanted, None, tolerance, name=name)
        for (name, wanted), (_, tensor) in zip(plain, found, strict=True)
    ]
    return [line for line in lines if line]


class Recomputed(Net):
    """Every block under torch's checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


class RecomputedReentrant(Recomputed):
    reentrant = True
