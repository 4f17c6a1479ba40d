"""Three steps of training of one subject: plain, and attached in every mode asked for; what is not equal, in words.

``sweep.py`` and the tests send ``compare`` to a pool of ranks.  It never chooses subjects, and keeps nothing between two calls.

Note: [Equal]
Every rank has a batch of its own.  Plain training has one model for each, which share parameters and nothing else: one may keep
more from its first forward on than buffers.  Their gradients are added up in the order of ranks and divided by how many there
are, as ranks do it.  So losses and parameters should be equal bit for bit; what is off by the rounding of a sum alone is called
"rounded", and never passes for equal.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.subject import Skipped, Subject
from tests.support.on_ranks import from_first, place

JOB = "tests.architectures.train:compare"
STEPS = 3
#: What is attached with, by the name the command line takes.
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "recomputed": {"activation": {"checkpoint": "unit"}},
    "host": {"parameter": {"tier": "host"}},
    "host-recomputed": {"parameter": {"tier": "host"}, "activation": {"checkpoint": "unit"}},
}
#: Tiny blocks are units of their own, as the large ones they stand for would be.
_UNITS = {"min_numel": 1000}
_LIBRARIES = {
    "transformers": "tests.architectures.of_transformers",
    "diffusers": "tests.architectures.of_diffusers",
    "geometric": "tests.architectures.of_geometric",
}


@dataclass(slots=True)
class Trained:
    """Losses of this rank, or of all of them for plain training, and what they led to."""

    losses: list[list[float]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one mode ended: "equal", "rounded", "differs", "raised", "skipped" or "not reproducible", and why."""

    mode: str
    ended: str
    why: str = ""
    seconds: float = 0.0
    units: int = 0


def find(name: str) -> Subject:
    """The subject of that name, "library/type".

    Raises:
        Skipped: it cannot be made small, built, or trained in plain PyTorch.
    """
    library, _, kind = name.partition("/")
    subject: Subject = importlib.import_module(_LIBRARIES[library]).subject(kind)
    return subject


def compare(name: str, modes: list[str]) -> tuple[str, list[Verdict]]:
    """What was built, and each mode's verdict.  Collective: every rank returns the same."""
    with _quiet():
        rank, world = place()
        subject = _found(name, rank)
        if isinstance(subject, str):
            return "", [Verdict(mode, "skipped", subject) for mode in modes]
        expected = from_first(_plain(subject, world) if rank == 0 else None)
        if isinstance(expected, str):
            return subject.built, [Verdict(mode, "skipped", expected) for mode in modes]
        return subject.built, [_verdict(subject, mode, expected, rank, world) for mode in modes]


def _found(name: str, rank: int) -> Subject | str:
    """The subject, or why there is none: the first rank looks for it, others find by themselves what takes no trying."""
    found: Subject | str | None = None
    if rank == 0:
        try:
            found = find(name)
        except Skipped as skipped:
            found = str(skipped)
    sent = from_first(None if isinstance(found, Subject) and not found.searched else found)
    if found is None:
        found = find(name) if sent is None else sent
    assert found is not None
    return found


def _plain(subject: Subject, world: int) -> Trained | str:
    """Plain training, or why it does not work."""
    try:
        return plain(subject, world)
    except Exception as error:
        return f"plain training: {type(error).__name__}: {error}"


def _verdict(subject: Subject, mode: str, expected: Trained, rank: int, world: int) -> Verdict:
    began = time.perf_counter()
    why, ended, units, near = "", "equal", 0, False
    try:
        found, units = attached(subject, mode, rank)
        why = differences(found, expected, rank)
        near = close(found, expected, rank)
    except Exception as error:
        if world > 1:
            # The others may wait for this rank: the pool ends them, and the error is in its outcome.
            raise
        ended, why = "raised", f"{type(error).__name__}: {error}"
    facts = from_all(why)
    if any(facts) and ended == "equal":
        far = any(from_all("" if near else "far"))
        ended, why = "differs" if far else "rounded", next(fact for fact in facts if fact)
        again = from_first(differences(plain(subject, world), expected, None) if rank == 0 else "")
        if again:
            ended, why = "not reproducible", f"plain training differs from itself: {again}"
    return Verdict(mode, ended, why, time.perf_counter() - began, units)


def from_all(fact: str) -> list[str]:
    """Every rank's ``fact``."""
    import torch.distributed as dist

    facts = [fact]
    if dist.is_initialized():
        facts = [""] * dist.get_world_size()
        dist.all_gather_object(facts, fact)
    return facts


def plain(subject: Subject, world: int) -> Trained:
    """Training in plain PyTorch on all ranks' batches.

    Raises:
        Skipped: a loss or a parameter is not finite, or nothing changes.
    """
    models = [subject.build() for _ in range(world)]
    start = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    for other in models[1:]:
        for param, first in zip(other.parameters(), models[0].parameters(), strict=True):
            param.data = first.data
    optimizer = _optimizer(models[0])
    trained = Trained()
    for step in range(STEPS):
        trained.losses.append([])
        for rank, model in enumerate(models):
            loss = subject.loss(model, step, rank)
            loss.backward()
            trained.losses[-1].append(loss.item())
        _average(models)
        optimizer.step()
        for model in models:
            model.zero_grad()
    trained.state = {name: value.detach() for name, value in models[0].named_parameters()}
    if not all(torch.isfinite(value).all() for value in [torch.tensor(trained.losses), *trained.state.values()]):
        raise Skipped(f"plain training does not stay finite: losses {trained.losses}")
    if all(torch.equal(value, start[name]) for name, value in trained.state.items()):
        raise Skipped("plain training changes no parameter")
    return trained


def _average(models: list[nn.Module]) -> None:
    """The mean of all gradients, summed in the order of ranks, becomes the first model's."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        grads = [param.grad for param in same if param.grad is not None]
        if grads:
            total = grads[0].clone()
            for grad in grads[1:]:
                total += grad
            same[0].grad = total / len(models)


def attached(subject: Subject, mode: str, rank: int) -> tuple[Trained, int]:
    """Training of this rank's batches, attached, and how many units there were; the state is rank 0's."""
    import zhooks

    model = subject.build()
    attachment = zhooks.attach(model, policy={"units": _UNITS, **MODES[mode]})
    optimizer = _optimizer(model)
    trained = Trained()
    for step in range(STEPS):
        loss = subject.loss(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.losses.append([loss.item()])
    units = int(attachment.describe().rpartition(" units, ")[0].rpartition("\n")[2])
    attachment.detach()
    trained.state = {name: value.detach() for name, value in model.named_parameters()}
    return trained, units


def differences(found: Trained, expected: Trained, rank: int | None) -> str:
    """The first thing that is not equal, in words; "" where all is.  ``rank``: whose losses ``found`` has, None for all."""
    for step, (row, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
        wanted = wanted if rank is None else [wanted[rank]]
        if row != wanted:
            return f"loss of step {step}: expected {wanted}, found {row}"
    if set(found.state) != set(expected.state):
        return f"names of parameters: {sorted(set(found.state) ^ set(expected.state))[:4]}"
    wrong = [name for name, value in expected.state.items() if not torch.equal(found.state[name], value)]
    if wrong:
        name = wrong[0]
        return (
            f"{len(wrong)} of {len(expected.state)} parameters; {name} by "
            f"{float((found.state[name] - expected.state[name]).abs().max()):.3g} at most"
        )
    return ""


def close(found: Trained, expected: Trained, rank: int) -> bool:
    """As close as sums taken in another order come."""
    if set(found.state) != set(expected.state):
        return False
    wanted = [row[rank] for row in expected.losses]
    losses = all(math.isclose(row[0], other, rel_tol=1e-6) for row, other in zip(found.losses, wanted, strict=True))
    same = [torch.allclose(found.state[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.state.items()]
    return losses and all(same)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@contextmanager
def _quiet() -> Iterator[None]:
    """Libraries' own warnings and logs say nothing of ours; ranks of tests make warnings errors."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
