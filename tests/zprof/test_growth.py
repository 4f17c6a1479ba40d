"""Leaks are found by the line that made what is kept, and a loop that keeps nothing, or keeps it once, has none."""

from __future__ import annotations

import gc
import inspect
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zprof
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof.cli import main
from zprof.rows import Row, RowKind, TraceError, placed

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], object]
STEPS, BATCH, WIDTH = 8, 64, 32
OUTPUT = BATCH * WIDTH * 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    gc.enable()
    gc.collect()


def trained(
    make: Callable[[], Step], *, level: str = "stack", steps: int = STEPS, batches: list[int] | None = None
) -> zprof.Run:
    """A recorded loop; what ``make`` gives is called where a script would compute its loss."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = make()
    with zprof.record("run.zprof", level=level, force=True):  # type: ignore[arg-type]
        for number in range(steps):
            kept = step(model, optimizer, torch.ones(batches[number] if batches else BATCH, WIDTH))
            if kept is None:
                model(torch.ones(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return zprof.open("run.zprof")


def a_list_of_outputs() -> Step:
    kept: list[Tensor] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        kept.append(model(x).detach().clone())  # leaks

    return step


def a_sum_of_losses_with_their_graphs() -> Step:
    total: list[Tensor] = [torch.zeros(())]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> bool:
        loss = model(x).square().mean()  # leaks
        loss.backward(retain_graph=True)
        total[0] = total[0] + loss
        return True

    return step


def a_hook_that_stores_activations() -> Step:
    kept: list[Tensor] = []
    hooked: list[object] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> bool:
        if not hooked:
            hooked.append(model[0].register_forward_hook(lambda _, __, out: kept.append(out.detach())))  # type: ignore[index]
        model(x).square().mean().backward()  # leaks
        return True

    return step


def averages_by_step() -> Step:
    averages: dict[int, list[Tensor]] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        averages[len(averages)] = [parameter.detach().clone() for parameter in model.parameters()]  # leaks

    return step


def gradients_with_their_graph() -> Step:
    kept: list[tuple[Tensor, ...]] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        loss = model(x).square().mean()
        kept.append(torch.autograd.grad(loss, [*model.parameters()], create_graph=True))  # leaks

    return step


def a_cache_of_each_length() -> Step:
    @cache
    def mask(number: int) -> Tensor:
        return torch.ones(256, 256).tril()  # leaks

    number = iter(range(STEPS))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        mask(next(number))

    return step


def a_callback_that_holds_what_it_needs() -> Step:
    callbacks: list[Callable[[], float]] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        shown = torch.softmax(x, -1)  # leaks
        callbacks.append(lambda: float(shown.sum()))

    return step


def a_thread_whose_queue_nobody_empties() -> Step:
    queue: deque[Tensor] = deque()

    def load() -> None:
        queue.append(torch.randn(BATCH, WIDTH))  # leaks

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        loader = threading.Thread(target=load)
        loader.start()
        loader.join()

    return step


def parameters_added_again_and_again() -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(BATCH, WIDTH))]})  # leaks

    return step


def keys_and_values_that_are_never_cut() -> Step:
    cache = [torch.zeros(0, WIDTH)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        cache[0] = torch.cat([cache[0], x])  # leaks

    return step


def cycles_that_nobody_collects() -> Step:
    class Node:
        def __init__(self) -> None:
            self.me, self.held = self, torch.full((BATCH, WIDTH), 1.0)  # leaks

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        gc.disable()
        Node()

    return step


LEAKS = [
    a_list_of_outputs,
    a_sum_of_losses_with_their_graphs,
    a_hook_that_stores_activations,
    averages_by_step,
    gradients_with_their_graph,
    a_cache_of_each_length,
    a_callback_that_holds_what_it_needs,
    a_thread_whose_queue_nobody_empties,
    parameters_added_again_and_again,
    keys_and_values_that_are_never_cut,
    cycles_that_nobody_collects,
]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_a_leak_is_found_by_the_line_that_makes_what_is_kept(leak: Callable[[], Step]) -> None:
    lines, start = inspect.getsourcelines(leak)
    line = next(number for number, text in enumerate(lines, start) if text.rstrip().endswith("# leaks"))
    growth = trained(leak).growth()
    assert growth is not None and growth, "nothing was found to grow"
    assert f"test_growth.py:{line}:" in growth[0].name
    assert growth[0].nbytes >= (growth[0].last - growth[0].first) * 512
    assert (growth[0].tier, growth[0].first, growth[0].last) == ("device", 1, STEPS - 1)
    assert any("trained" in caller for caller in growth[0].callers) or leak is a_thread_whose_queue_nobody_empties


def test_a_leak_is_as_large_as_what_is_kept() -> None:
    run = trained(a_list_of_outputs)
    (grown,) = run.growth() or ()
    assert (grown.per_step, grown.nbytes) == (OUTPUT, OUTPUT * (STEPS - 2))
    assert run.measures["growth.bytes_per_step"] == OUTPUT


def test_without_lines_it_is_found_by_module() -> None:
    growth = trained(a_hook_that_stores_activations, level="alloc").growth()
    assert growth is not None and [(grown.name, grown.callers) for grown in growth] == [("0", ())]


def keeps_nothing() -> Step:
    return lambda model, optimizer, x: model(x).square().mean().backward()


def keeps_the_last() -> Step:
    last: list[Tensor] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        last[:] = [model(x)]

    return step


def fills_a_cache() -> Step:
    @cache
    def mask(number: int) -> Tensor:
        return torch.ones(256, 256).tril()

    number = iter(range(STEPS))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        mask(min(next(number), 3))

    return step


@pytest.mark.parametrize("make", [keeps_nothing, keeps_the_last, fills_a_cache], ids=lambda make: make.__name__)
def test_a_loop_that_does_not_leak_does_not_grow(make: Callable[[], Step]) -> None:
    run = trained(make)
    assert run.growth() == ()
    assert run.measures["growth.bytes_per_step"] == 0


def test_batches_of_different_lengths_are_no_leak() -> None:
    lengths = [3, 50, 20, 64, 10, 41, 7, 33, 60, 28, 15, 48]
    assert trained(keeps_the_last, steps=len(lengths), batches=lengths).growth() == ()


def test_growth_that_was_not_seen_is_none_and_says_why() -> None:
    short = trained(a_list_of_outputs, steps=4)
    assert short.growth() is None
    assert short.unseen["growth.bytes_per_step"] == "4 optimizer steps recorded: growth is seen from 5 on"
    coarse = trained(a_list_of_outputs, level="events")
    assert coarse.growth() is None and "record with --level alloc" in coarse.unseen["growth.bytes_per_step"]


def leaking(level: str) -> Iterator[Row]:
    """A run whose every step keeps 1 MiB more in one place."""
    number = 1 << 20
    for row in sample_rows(level="alloc", steps=6):
        yield row
        if row.kind == RowKind.BEGIN and row.what == "forward":
            number += 1
            key = "model.head" + " <- app/train.py:7:keep\x1b[2J <- app/train.py:20:main" * (level == "stack")
            yield Row(RowKind.ALLOC, placed("other", "device"), key, MIB, row.time_ns, row.thread, number)


@pytest.mark.parametrize(("level", "name"), [("stack", "app/train.py:7:keep\x1b[2J"), ("alloc", "model.head")])
def test_the_report_shows_what_grew(level: str, name: str) -> None:
    write_trace(Path("run.zprof"), leaking(level), level=level)
    told = json.loads(CliRunner().invoke(main, ["report", "run.zprof", "--json"], catch_exceptions=False).stdout)["runs"][0]
    (grown,) = told["growth"]
    assert (grown["name"], grown["per_step"], grown["nbytes"], grown["category"]) == (name, MIB, 4 * MIB, "other")
    text = CliRunner().invoke(main, ["report", "run.zprof"]).stdout
    part = text.partition("grew from step to step")[2].partition("residual states")[0]
    assert "1 MiB" in part and "4 MiB" in part and "from the end of step 1 to the end of step 5" in part
    assert ("app/train.py:20:main" in part) == (level == "stack") == ("--level stack shows" not in part)
    assert "\x1b" not in text


def test_a_run_that_does_not_grow_says_nothing_and_limits_hold_it() -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc", steps=6), level="alloc")
    assert "grew" not in CliRunner().invoke(main, ["report", "run.zprof"]).stdout
    assert CliRunner().invoke(main, ["check", "run.zprof", "--max", "growth.bytes_per_step=0"]).exit_code == 0
    write_trace(Path("leaks.zprof"), leaking("alloc"), level="alloc")
    assert CliRunner().invoke(main, ["check", "leaks.zprof", "--max", "growth.bytes_per_step=1KiB"]).exit_code == 3


def test_bytes_are_grouped_by_the_line_that_made_them() -> None:
    run = trained(a_list_of_outputs)
    held = run.held(by="line")
    lines, start = inspect.getsourcelines(a_list_of_outputs)
    line = next(number for number, text in enumerate(lines, start) if text.rstrip().endswith("# leaks"))
    assert sum(held.values()) == sum(run.held().values())
    assert any(f"test_growth.py:{line}:" in name for name in held)
    told = CliRunner().invoke(main, ["report", "run.zprof", "--by", "line", "--json"], catch_exceptions=False)
    assert json.loads(told.stdout)["runs"][0]["tiers"]["device"]["groups"] == held
    drawn = CliRunner().invoke(main, ["flamegraph", "run.zprof", "--by", "line"], catch_exceptions=False)
    assert drawn.exit_code == 0


def test_lines_that_were_not_recorded_are_refused() -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    for command in ("report", "flamegraph"):
        refused = CliRunner().invoke(main, [command, "run.zprof", "--by", "line"])
        assert refused.exit_code == 1
        found = "expected a run recorded at --level stack, found alloc; record it again"
        assert refused.stderr == f"run.zprof: --by line: {found}\n"
    with pytest.raises(TraceError, match="--level stack"):
        zprof.open("run.zprof").held(by="line")
