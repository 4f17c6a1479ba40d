"""[optimizer] overlap = true: updates in backward have the same bits as updates in the step, and what comes in between
is refused.

pytest runs it on ranks over Gloo. It never looks at a clock.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import CapabilityError, ShardedOpError, TierError
from offload.events import Event
from tests.support.inside import stepper_of, units_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow

STEPS = 4


def build() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def policy(tier: str, *, overlap: bool, param: str | None = None, **optimizer: str) -> dict[str, Any]:
    cell = {"tier": tier}
    chosen = {"parameter": cell, "gradient": cell, "optimizer": {"tier": tier, "overlap": overlap, **optimizer}}
    return {**chosen, "units": {"min_numel": 0}, **({} if param is None else {"precision": {"param": param}})}


def loss_of(model: nn.Module, step: int) -> Tensor:
    rank, _ = place()
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


class Training:
    """A model under overlapped updates, with what it did written down."""

    def __init__(
        self,
        tier: str = "host",
        *,
        overlap: bool = True,
        make: Callable[[Any], torch.optim.Optimizer] = adamw,
        **chosen: str,
    ) -> None:
        self.model = build()
        if chosen.get("rounding") == "stochastic":
            self.model.bfloat16()
        self.attachment = zhooks.attach(self.model, policy=policy(tier, overlap=overlap, **chosen))
        self.optimizer = make(self.model.parameters())
        self.log = zhooks.Recorder()
        self.attachment.observe(self.log)

    def step(self, number: int) -> None:
        loss_of(self.model, number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm(self) -> Training:
        self.step(0)
        self.log.clear()
        return self

    def state(self) -> dict[str, Tensor]:
        self.attachment.detach()
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_early_updates_have_the_bits_of_late_ones(tier: str) -> None:
    states = []
    for overlap in (True, False):
        training = Training(tier, overlap=overlap)
        for number in range(STEPS):
            training.step(number)
        states.append(training.state())
    early, late = states
    assert all(torch.equal(early[name], late[name]) for name in late)


@on_ranks(1, 2, tier=("device", "host"))
def test_updates_happen_in_backward_from_the_second_step_on(tier: str) -> None:
    training = Training(tier).warm()
    training.step(1)
    names = [name for name in training.log.names() if "update" in name or "backward of" in name]
    end = next(place for place, name in enumerate(names) if name.startswith("end backward"))
    assert [name for name in names[:end] if name.startswith("begin update")] == [f"begin update {n}" for n in (4, 2, 0)]
    assert not [name for name in names[end:] if "update" in name]


@on_ranks(1, 2)
def test_a_clip_before_the_step_is_refused_and_the_next_step_works() -> None:
    training = Training().warm()
    loss_of(training.model, 1).backward()
    with pytest.raises(ShardedOpError, match=r"overlap = true updates in backward, found a use of the gradient"):
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    training.step(2)


@on_ranks(1, 2)
def test_a_new_learning_rate_before_the_step_is_refused() -> None:
    training = Training().warm()
    loss_of(training.model, 1).backward()
    training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ShardedOpError, match="a learning rate"):
        training.optimizer.step()
    training.step(2)


@on_ranks(1, 2)
def test_a_learning_rate_changed_after_the_step_is_used_in_the_next() -> None:
    states = []
    for overlap in (True, False):
        training = Training(overlap=overlap)
        for number in range(STEPS):
            training.step(number)
            training.optimizer.param_groups[0]["lr"] *= 0.5
        states.append(training.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@on_ranks(1)
def test_a_second_backward_before_the_step_is_refused_once() -> None:
    training = Training().warm()
    loss_of(training.model, 1).backward()
    with pytest.raises(ShardedOpError, match=r"forward expected AdamW.step\(\) after backward"):
        loss_of(training.model, 2).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step(3)


@on_ranks(1, 2)
def test_two_forwards_in_one_backward_are_left_to_the_step() -> None:
    states = []
    for overlap in (True, False):
        training = Training(overlap=overlap).warm()
        (loss_of(training.model, 1) + loss_of(training.model, 2)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(3)
        states.append(training.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


class Factored(torch.optim.AdamW):
    """Its step takes an argument, too."""

    def step(self, closure: Any = None, factor: float = 1.0) -> None:  # type: ignore[override]
        super().step()


@on_ranks(1)
def test_arguments_of_a_step_whose_updates_were_made_in_backward_are_refused() -> None:
    training = Training()
    training.optimizer = Factored(training.model.parameters(), lr=1e-2)
    training.warm()
    loss_of(training.model, 1).backward()
    with pytest.raises(ShardedOpError, match=r"Factored.step expected nothing between .* found arguments \(factor\)"):
        training.optimizer.step(factor=2.0)
    training.step(2)


# compute = "host": the arithmetic has a thread of its own.

HERE = "zhooks-update-0"


class Threads:
    """Which thread made each update."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_event(self, event: Event) -> None:
        if (event.kind, event.what) == ("begin", "update"):
            self.seen.append(threading.current_thread().name)


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == HERE]


@on_ranks(1, 2)
def test_an_update_on_the_host_in_backward_has_a_thread_of_its_own() -> None:
    training, threads = Training(compute="host").warm(), Threads()
    training.attachment.observe(threads)
    training.step(1)
    assert threads.seen == [HERE] * 3
    names = training.log.names()
    end = next(place for place, name in enumerate(names) if name.startswith("end backward"))
    assert not [name for name in names[end:] if "update" in name]
    training.attachment.apply(policy("host", overlap=False))
    assert not workers()
    training.step(2)
    assert threads.seen[3:] == [threading.current_thread().name] * 3
    training.attachment.apply(policy("host", overlap=True, compute="host"))
    assert workers()
    training.attachment.detach()
    assert not workers()


class HeldUp:
    """Holds up the first update until backward has come to another unit."""

    def __init__(self) -> None:
        self.came, self.in_time = threading.Event(), False

    def on_event(self, event: Event) -> None:
        if (event.kind, event.what, event.key) == ("begin", "update", "4"):
            self.in_time = self.came.wait(60)
        if (event.kind, event.what, event.key) == ("begin", "reduce", "2"):
            self.came.set()


@on_ranks(1, 2)
def test_backward_goes_on_while_an_update_is_made() -> None:
    training, held = Training(compute="host").warm(), HeldUp()
    training.attachment.observe(held)
    training.step(1)
    assert held.in_time


CELLS: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"tier": "disk"},
    "copies": {"param": "bf16"},
    "copies on disk": {"tier": "disk", "param": "bf16"},
    "kernels": {"kernel": "numba", "param": "bf16"},
    "kernels on disk": {"kernel": "numba", "param": "bf16", "tier": "disk"},
    "rounded": {"rounding": "stochastic"},
}


@on_ranks(1, 2, cell=(*slow("host", "disk", "copies", "kernels"), "copies on disk", "kernels on disk", "rounded"))
def test_updates_beside_backward_have_the_bits_of_updates_in_the_step(cell: str) -> None:
    states = []
    for overlap in (True, False):
        training = Training(overlap=overlap, compute="host", **CELLS[cell])
        for number in range(STEPS):
            training.step(number)
        states.append(training.state())
    early, late = states
    assert all(torch.equal(early[name], late[name]) for name in late)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": partial(torch.optim.ASGD, lr=0.02, t0=2),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02),
    "Adam": partial(torch.optim.Adam, lr=torch.tensor(0.01), amsgrad=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003, centered=True, momentum=0.5),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.slow
@on_ranks(2)
def test_every_optimizer_of_torch_that_updates_by_element_runs_beside_backward() -> None:
    for name, make in MAKE.items():
        states = []
        for overlap in (True, False):
            training, threads = Training(overlap=overlap, compute="host", make=make).warm(), Threads()
            training.attachment.observe(threads)
            for number in (1, 2):
                training.step(number)
            assert (set(threads.seen) == {HERE}) is overlap, name
            states.append(training.state())
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[1]), name


class Own(torch.optim.AdamW):
    """An optimizer of the user's, whose step may do anything."""


@on_ranks(1, 2)
def test_an_optimizer_of_the_users_own_is_stepped_on_the_thread_of_backward() -> None:
    training, threads = Training(compute="host", make=partial(Own, lr=1e-2)).warm(), Threads()
    training.attachment.observe(threads)
    training.step(1)
    assert threads.seen == [threading.current_thread().name] * 3


@on_ranks(1)
def test_whoever_looks_in_backward_finds_whole_groups_and_values_after_the_update() -> None:
    training, seen = Training(compute="host").warm(), []
    whole, last = list(training.model.parameters()), training.model[4].weight

    def look(*_: Any) -> None:
        groups = training.optimizer.param_groups
        same = len(groups) == 1 and all(one is two for one, two in zip(groups[0]["params"], whole, strict=True))
        seen.append((same, last.to_local().clone()))

    before = last.to_local().clone()
    handle = training.model[1].register_full_backward_pre_hook(look)
    loss_of(training.model, 1).backward()
    handle.remove()
    training.optimizer.step()
    (same, value), = seen
    assert same
    assert not torch.equal(value, before)
    assert torch.equal(value, last.to_local())


@on_ranks(1, kernel=("torch", "numba"))
def test_whoever_gathers_in_backward_gathers_after_the_update(kernel: str) -> None:
    training, seen = Training("disk", compute="host", param="bf16", kernel=kernel).warm(), []
    overlap: Any = stepper_of(training.attachment).overlap
    kept = units_of(training.attachment)[-1].flats[0].storage
    copy = kept.copy
    assert copy is not None
    wait, overlap._wait = overlap._wait, lambda most=0: None  # what is under way stays so until somebody asks

    def look(*_: Any) -> None:
        overlap._wait = wait
        assert kept.lent
        full = torch.empty(copy.numel, dtype=copy.dtype)
        kept.fill(full).wait()
        seen.append((kept.lent, torch.equal(full, kept.values().bfloat16())))

    handle = training.model[1].register_full_backward_pre_hook(look)
    loss_of(training.model, 1).backward()
    handle.remove()
    assert seen == [(False, True)]
    training.optimizer.step()


@on_ranks(1, 2)
def test_an_update_beside_backward_that_fails_is_raised_in_the_step_with_its_unit_and_rank() -> None:
    training = Training(compute="host").warm()
    kernel: Any = stepper_of(training.attachment).updater.kernel_of(units_of(training.attachment)[0].flats[0])
    update = kernel.update

    def fail(optimizer: Any, job: Any, arguments: Any) -> None:
        if job.flat.name == "2":
            raise TierError("no luck")
        update(optimizer, job, arguments)

    kernel.update = fail
    loss_of(training.model, 1).backward()
    with pytest.raises(TierError, match=rf"no luck. Raised while unit 2 .* on rank {place()[0]}\."):
        training.optimizer.step()
    kernel.update = update
    training.optimizer.zero_grad()
    training.step(2)
    training.step(3)


class Broken(Exception):
    pass


@on_ranks(1)
def test_updates_of_a_backward_that_raised_are_over_before_the_next_entry() -> None:
    training = Training(compute="host").warm()

    def fail(*_: Any) -> None:
        raise Broken

    handle = training.model[1].register_full_backward_pre_hook(fail)
    with pytest.raises(Broken):
        loss_of(training.model, 1).backward()
    handle.remove()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step(2)
    names = training.log.names("update")
    assert names == [f"{kind} update {unit}" for unit in (4, 2, 4, 2, 0) for kind in ("begin", "end")]


@on_ranks(1)
def test_a_thread_that_cannot_be_had_is_said_in_attach() -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == HERE:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refused  # type: ignore[method-assign, assignment]
    try:
        model = build()
        with pytest.raises(CapabilityError, match=f"cannot start thread {HERE}"):
            zhooks.attach(model, policy=policy("host", overlap=True, compute="host"))
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    assert type(next(model.parameters())) is nn.Parameter


# Whose step comes.


class Pair:
    """The same steps of a plain model on one rank and of an attached one, whose updates may be made in backward."""

    def __init__(self, tier: str = "host", **chosen: str) -> None:
        self.plain, self.model = build(), build()
        self.attachment = zhooks.attach(self.model, policy=policy(tier, overlap=True, **chosen))

    def both(self, make: Callable[[nn.Sequential], torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        return [make(self.plain), make(self.model)]

    def step(self, number: int, *steps: list[torch.optim.Optimizer]) -> None:
        """One backward, then the step of each of these optimizers."""
        self.backward(number)
        for pair in steps:
            for optimizer in pair:
                optimizer.step()
        self.plain.zero_grad()
        self.model.zero_grad()

    def backward(self, number: int) -> None:
        loss_of(self.model, number).backward()
        loss_of(self.plain, number).backward()

    def same(self) -> bool:
        self.attachment.detach()
        return all(torch.equal(one, two) for one, two in zip(self.plain.parameters(), self.model.parameters(), strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@on_ranks(1, compute=("device", "host"))
def test_the_step_of_another_optimizer_than_the_one_that_stepped_before_is_refused_and_then_both_step_as_in_torch(
    compute: str,
) -> None:
    pair = Pair(compute=compute)
    first, second = pair.both(adam), pair.both(sgd)
    pair.step(0, first)
    loss_of(pair.model, 1).backward()
    with pytest.raises(ShardedOpError, match=r"SGD.step expected AdamW.step\(\) after .* the step of another optimizer"):
        second[1].step()
    # The update that was made is AdamW's; from here on nobody knows whose step comes.
    loss_of(pair.plain, 1).backward()
    first[0].step()
    pair.plain.zero_grad()
    pair.model.zero_grad()
    for number, steps in enumerate([(second,), (first,), (first, second), (second,), (first,)], start=2):
        pair.step(number, *steps)
    assert pair.same()


@on_ranks(1)
def test_an_optimizer_that_replaces_one_that_has_gone_steps_alone() -> None:
    pair = Pair()
    first = pair.both(adam)
    pair.step(0, first)
    first.clear()
    gc.collect()
    second = pair.both(sgd)
    for number in (1, 2, 3):
        pair.step(number, second)
    assert pair.same()


@on_ranks(1)
def test_two_optimizers_that_step_after_one_backward_update_as_in_torch() -> None:
    def half(model: nn.Module, *, bias: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for name, param in model.named_parameters() if name.endswith("bias") is bias], lr=0.1)

    pair = Pair()
    biases, weights = (pair.both(partial(half, bias=bias)) for bias in (True, False))
    # The first step of the second one finds gradients, though the first one's updates might have been made in backward.
    pair.step(0, biases)
    for number in (1, 2, 3):
        pair.step(number, biases, weights)
    assert pair.same()


def forward(training: Training) -> None:
    with torch.no_grad():
        loss_of(training.model, 9)


def no_gradients(training: Training) -> None:
    for param in training.model.parameters():
        param.grad = None


@on_ranks(1, 2)
def test_whatever_needs_values_before_the_step_is_refused_once() -> None:
    between: dict[str, Callable[[Training], Any]] = {
        "forward": forward,
        "state_dict": lambda training: training.attachment.state_dict(),
        "apply": lambda training: training.attachment.apply(policy("host", overlap=True)),
        "detach": lambda training: training.attachment.detach(),
    }
    training = Training().warm()
    for number, (name, act) in enumerate(between.items(), start=1):
        loss_of(training.model, number).backward()
        with pytest.raises(ShardedOpError, match=rf"{name} expected AdamW.step\(\) after backward"):
            act(training)
        training.optimizer.zero_grad()
        training.step(10 + number)
    loss_of(training.model, 5).backward()
    del training.optimizer
    gc.collect()
    with pytest.raises(ShardedOpError, match=r"forward expected AdamW.step\(\) after backward"):
        forward(training)
    forward(training)


def add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@on_ranks(1)
def test_whatever_changes_what_a_step_finds_is_refused_or_makes_no_difference() -> None:
    def load(training: Training) -> None:
        training.optimizer.load_state_dict(training.optimizer.state_dict())

    def drop(training: Training) -> None:
        training.optimizer.param_groups[0]["params"].pop()

    def write(training: Training) -> None:
        with torch.no_grad():
            training.model[0].weight.mul_(0.5)

    def schedule(training: Training) -> None:
        torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5).step()

    between = {"different states": load, "different parameters": drop, "a write to": write, "a learning rate": schedule}
    for tier in ("device", "host", "disk"):
        for found, act in between.items():
            training = Training(tier).warm()
            loss_of(training.model, 1).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                act(training)
            with pytest.raises(ShardedOpError, match=rf"expected nothing between backward and step.* found {found}|{found}"):
                training.optimizer.step()
        training = Training(tier).warm()
        loss_of(training.model, 1).backward()
        with pytest.raises(ShardedOpError, match="before the step"):
            no_gradients(training)
        training = Training(tier).warm()
        loss_of(training.model, 1).backward()
        add_group(training)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(2)


@on_ranks(1)
def test_states_that_a_load_replaces_go_at_once() -> None:
    training = Training("device").warm()
    known = [weakref.ref(value) for state in training.optimizer.state.values() for value in state.values()]
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    gc.collect()
    assert not [ref for ref in known if ref() is not None]
    training.step(1)
    training.step(2)
