"""Makes a test of a function that every rank shall run: ``@on_ranks(1, 2)`` above it.

Test modules decorate with it; the assertions are the function's own, and a rank that fails fails the test.
It never compares ranks with each other: a function that must do so communicates.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.support.ranks import LIMIT_S, Pool

Job = Callable[..., Any]
#: What `pytest.param` makes.
_Param = type(pytest.param(None))


def on_ranks(*worlds: Any, limit_s: float = LIMIT_S, **choices: tuple[Any, ...]) -> Callable[[Job], Any]:
    """Run the function on every rank of each world, for each combination of ``choices``, given as keywords.

    A world or choice of `slow` is left to a run of the slow cases.
    ``limit_s`` is for what may take longer than others: no job is given less than ``LIMIT_S``.
    """

    def decorate(job: Job) -> Any:
        @pytest.mark.parametrize(("world", "chosen"), cases_of("world", worlds, choices, prefix="world"))
        def test(world: int, chosen: dict[str, Any], ranks: Callable[[int], Pool]) -> None:
            ranks(world).run(f"{job.__module__}:{job.__name__}.job", limit_s=max(limit_s, LIMIT_S), **chosen)

        return as_test(test, job)

    return decorate


def on_accelerators(*worlds: Any, limit_s: float = LIMIT_S, **choices: tuple[Any, ...]) -> Callable[[Job], Any]:
    """As `on_ranks`, on ranks that have the asynchronous accelerator: rank r its device r, under the lazy schedule."""

    def decorate(job: Job) -> Any:
        @pytest.mark.parametrize(("world", "chosen"), cases_of("world", worlds, choices, prefix="world"))
        def test(world: int, chosen: dict[str, Any], accelerators: Callable[[int], Pool]) -> None:
            accelerators(world).run(f"{job.__module__}:{job.__name__}.job", limit_s=max(limit_s, LIMIT_S), **chosen)

        return as_test(test, job)

    return decorate


def as_test(test: Any, job: Job) -> Any:
    """``test`` under the name of ``job``, which a rank finds as its attribute."""
    test.__name__ = test.__qualname__ = job.__name__
    test.__module__, test.__doc__ = job.__module__, job.__doc__
    test.job = job
    return test


def cases_of(first: str, values: tuple[Any, ...], choices: Mapping[str, tuple[Any, ...]], *, prefix: str = "") -> list[Any]:
    """Parameters of a test: a value of ``first``, and by name the other choices."""
    return [
        pytest.param(chosen.pop(first), chosen, id=prefix + "-".join(named), marks=marks)
        for chosen, named, marks in combinations({first: values, **choices})
    ]


def combinations(
    choices: Mapping[str, tuple[Any, ...]],
) -> Iterator[tuple[dict[str, Any], list[str], list[pytest.Mark | pytest.MarkDecorator]]]:
    """Each combination of ``choices``: the value of each, how each is named, and the marks of the whole."""
    for row in itertools.product(*choices.values()):
        params = [choice if isinstance(choice, _Param) else pytest.param(choice) for choice in row]
        values = [param.values[0] for param in params]
        marks = [mark for param in params for mark in param.marks]
        yield dict(zip(choices, values, strict=True)), list(map(str, values)), marks


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def hooks_left(model: nn.Module) -> list[str]:
    """Modules of ``model`` that carry a hook of any kind."""
    tables = (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    )  # fmt: skip
    return [name or "the root" for name, module in model.named_modules() if any(getattr(module, t) for t in tables)]


def from_first(value: Any) -> Any:
    """Rank 0's ``value`` on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def folder() -> Iterator[Path]:
    """One new folder for all ranks; it goes when all have left."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(from_first(own))
        if dist.is_initialized():
            dist.barrier()
