"""What steps compute is counted by module and pass as torch's own counter does, and set beside what the hardware could do."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as registry
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zhooks
import zprof
from offload.errors import HardwareError
from offload.hardware import Hardware
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.analysis.compute import Computed, Row
from zprof.cli import main

BATCH, WIDTH = 16, 32
#: Of one product of a batch with a square matrix.
PRODUCT = 2 * BATCH * WIDTH * WIDTH

Step = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        # Of other tests of this process: where a function was compiled nothing is counted.
        monkeypatch.setattr(dynamo, "counters", defaultdict(Counter))
    return tmp_path


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def recorded(model: nn.Module, step: Step, *, level: str = "events", steps: int = 6) -> zprof.Run:
    """A recorded loop whose loss is what ``step`` returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zprof.record("run.zprof", level=level, force=True, nvml="off"):  # type: ignore[arg-type]
        for _ in range(steps):
            step().backward()
            optimizer.step()
            optimizer.zero_grad()
    return zprof.open("run.zprof")


def found_in(run: zprof.Run) -> Computed:
    found = run.computed()
    assert found is not None, run.unseen["flops.per_step"]
    return found


def torchs(step: Step) -> int:
    with FlopCounterMode(display=False) as counter:
        step().backward()
    return counter.get_total_flops()


def by_pass(found: Computed) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for row in found.rows:
        sums[row.doing] += row.flops
    return {doing: flops // found.steps for doing, flops in sums.items() if flops}


@pytest.mark.parametrize("level", ["events", "alloc"])
def test_flops_are_those_of_torchs_own_counter(level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Conv2d(3, 8, 3)
            self.out = nn.Linear(8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.image(x).mean((2, 3)))

    model = Net()

    def step() -> Tensor:
        return model(torch.ones(BATCH, 3, 12, 12)).square().mean()

    run = recorded(model, step, level=level)
    found = found_in(run)
    assert found.flops == found.model_flops == torchs(step) == run.measures["flops.per_step"]
    modules = found.by_module()
    assert modules["image"]["forward"] == 2 * BATCH * 8 * 10 * 10 * 3 * 3 * 3
    assert modules["out"] == {"forward": 2 * BATCH * 8 * WIDTH, "backward": 4 * BATCH * 8 * WIDTH} | {
        "nbytes": modules["out"]["nbytes"]
    }
    assert (found.samples, found.tokens) == (BATCH, None)
    assert run.unseen["tokens.per_second"] and run.measures["samples.per_second"] == pytest.approx(BATCH / found.step_s)


def test_bytes_are_those_read_and_written() -> None:
    model = mlp()
    found = found_in(recorded(model, lambda: model(torch.ones(BATCH, WIDTH)).square().mean()))
    [product] = [row for row in found.rows if (row.module, row.doing, row.operation) == ("0", "forward", "addmm")]
    # Bias, input and matrix read, and the output written; the transposed view of the matrix moves nothing.
    assert product.nbytes // product.calls == 4 * (WIDTH + 2 * BATCH * WIDTH + WIDTH * WIDTH)
    [curve] = [row for row in found.rows if (row.module, row.doing) == ("1", "forward")]
    assert (curve.flops, curve.nbytes // found.steps) == (0, 2 * 4 * BATCH * WIDTH)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_flops_are_done_and_not_the_models(reentrant: bool) -> None:
    model = mlp()

    def step() -> Tensor:
        x = torch.ones(BATCH, WIDTH, requires_grad=True)
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    found = found_in(recorded(model, step))
    assert by_pass(found)["forward"] == 2 * PRODUCT
    # A forward without reentry stops at the last tensor that the backward wants, before the last product is needed again.
    assert by_pass(found)["recompute"] in (PRODUCT, 2 * PRODUCT)
    assert found.flops == found.model_flops + by_pass(found)["recompute"] == torchs(step)


def test_units_under_zhooks_compute_what_the_plain_model_does() -> None:
    plain, model = mlp(), mlp()

    def step_of(model: nn.Module) -> Step:
        return lambda: model(torch.ones(BATCH, WIDTH)).square().mean()

    expected = found_in(recorded(plain, step_of(plain)))
    zhooks.attach(model, policy={"stage": 3})
    found = found_in(recorded(model, step_of(model)))
    assert by_pass(found) == by_pass(expected)
    modules = found.by_module()
    assert {name: modules[name]["forward"] for name in modules if modules[name]["forward"]} == {"0": PRODUCT, "2": PRODUCT}


def test_a_step_of_several_batches_has_the_flops_and_samples_of_all() -> None:
    model = mlp()

    def step() -> Tensor:
        model(torch.ones(BATCH, WIDTH)).square().mean().backward()
        return model(torch.ones(2 * BATCH, WIDTH)).square().mean()

    found = found_in(recorded(model, step))
    assert (found.samples, by_pass(found)["forward"]) == (3 * BATCH, 3 * 2 * PRODUCT)


def test_of_two_optimizers_a_step_has_what_both_networks_compute() -> None:
    first, second = mlp(), mlp()
    optimizers = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters())
    with zprof.record("run.zprof", nvml="off"):
        for _ in range(6):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(torch.ones(BATCH, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    run = zprof.open("run.zprof")
    assert by_pass(found_in(run))["forward"] == 2 * 2 * PRODUCT


def test_tokens_are_seen_where_a_model_is_called_by_keyword() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)

        def forward(self, *, ids: Tensor) -> Tensor:
            return functional.cross_entropy(self.out(self.table(ids)).flatten(0, 1), ids.flatten())

    model = Words()
    run = recorded(model, lambda: model(ids=torch.zeros(4, 7, dtype=torch.int64)))
    found = found_in(run)
    assert (found.tokens, found.samples) == (28, 4)
    assert run.measures["tokens.per_second"] == pytest.approx(28 / found.step_s)


def test_an_evaluation_now_and_then_is_not_part_of_a_step_and_a_teacher_is() -> None:
    model, other = mlp(), mlp().eval()
    number = iter(range(100))

    def step(every: int) -> Tensor:
        if next(number) % every == every - 1:
            with torch.no_grad():
                other(torch.ones(BATCH, WIDTH))
        return model(torch.ones(BATCH, WIDTH)).square().mean()

    assert "evaluation" not in by_pass(found_in(recorded(model, lambda: step(2))))
    assert by_pass(found_in(recorded(model, lambda: step(1))))["evaluation"] == 2 * PRODUCT


def test_nothing_of_the_counting_is_left_behind() -> None:
    hooks = list(registry._global_forward_pre_hooks)
    model = mlp()
    step = lambda: model(torch.ones(BATCH, WIDTH)).square().mean()  # noqa: E731
    # After one step the next is being counted; after two it has been.
    for steps in (1, 2):
        recorded(model, step, steps=steps)
        assert torch._C._len_torch_dispatch_stack() == 0 and list(registry._global_forward_pre_hooks) == hooks


def test_a_compiled_function_ends_the_counting_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import utils

    monkeypatch.setattr(utils, "counters", defaultdict(Counter, frames=Counter(ok=1)))
    model = mlp()
    run = recorded(model, lambda: model(torch.ones(BATCH, WIDTH)).square().mean())
    assert run.computed() is None and "torch.compile" in run.unseen["flops.per_step"]
    assert "flops.per_step" not in run.measures
    said = CliRunner().invoke(main, ["report", "run.zprof"]).output
    assert "not counted: torch.compile has compiled part of it" in said


def test_an_operation_without_a_formula_is_named() -> None:
    @torch.library.custom_op("zprof_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_autograd(lambda ctx, grad: 2 * grad)
    model = mlp()
    found = found_in(recorded(model, lambda: twice(model(torch.ones(BATCH, WIDTH))).square().mean()))
    assert found.uncounted == ("zprof_tests::twice",)
    said = CliRunner().invoke(main, ["report", "run.zprof"]).output
    assert "not counted, because they have no formula: zprof_tests::twice" in said


def test_one_step_counts_nothing_and_says_why() -> None:
    model = mlp()
    run = recorded(model, lambda: model(torch.ones(BATCH, WIDTH)).square().mean(), steps=1)
    assert run.computed() is None and run.unseen["mfu.percent"]


# The hardware.


def on_gpu(*rows: Row, step_s: float = 1.0) -> Computed:
    return Computed(rows, 1, step_s, (("int64", (4, 1000), 1),), (), 8, "NVIDIA H100 80GB HBM3")


def test_utilisation_is_the_time_at_the_peak_of_each_dtype() -> None:
    h100 = Hardware.of("h100")
    done = on_gpu(
        Row("blocks.0", "forward", "mm", "cuda", "bfloat16", 10, 200 * 10**12, 0, 10**9),
        Row("blocks.0", "backward", "mm", "cuda", "bfloat16", 10, 400 * 10**12, 50 * 10**12, 10**9),
        Row("blocks.0", "recompute", "mm", "cuda", "bfloat16", 10, 200 * 10**12, 0, 10**9),
        Row("head", "forward", "mm", "cuda", "tf32", 1, 10**12, 0, 10**9),
        Row("", "step", "", "cuda", "float32", 1, 0, 0, 3 * 10**11),
        step_s=2.0,
    ).on(h100)
    bf16, tf32 = h100.peak.bf16, h100.peak.tf32
    assert bf16 and tf32
    assert done.mfu == pytest.approx((550e12 / bf16 + 1e12 / tf32) / 2)
    assert done.hfu == pytest.approx((800e12 / bf16 + 1e12 / tf32) / 2)
    # The optimizer's pass over memory, at the share of the bandwidth that so many bytes reach.
    assert done.memory_s == pytest.approx(3e11 / (h100.device.memory_bandwidth * 0.895), rel=1e-6)
    assert done.floor_s == done.compute_s + done.memory_s and 0.8 < done.floor_s < 1.5
    assert h100.price is None or done.price == pytest.approx(h100.price.device_hour * 2 / 3600)


def test_a_profile_of_other_hardware_is_refused_by_name() -> None:
    with pytest.raises(HardwareError, match=r"h100: expected a profile of kind cpu, .*found gpu"):
        Computed((Row("0", "forward", "mm", "cpu", "float32", 1, 1, 0, 1),), 1, 1.0, (), (), 1, "cpu").on(Hardware.of("h100"))
    with pytest.raises(HardwareError, match=r"\[peak\] has no rate for float8"):
        on_gpu(Row("0", "forward", "mm", "cuda", "float8_e4m3fn", 1, 1, 0, 1)).on(Hardware.of("v100-32"))


NOTE: dict[str, Any] = {
    "begin_ns": 0, "end_ns": 1 << 60, "optimizers": 1, "threads": 1, "device_name": "NVIDIA H100 80GB HBM3",
    "rows": [["blocks.0", "forward", "mm", "cuda", "bfloat16", 4, 4 * 10**12, 0, 10**9]],
    "inputs": [["GPT", "int64", [4, 1000], 1]], "uncounted": [],
}  # fmt: skip


def written(note: dict[str, Any]) -> Iterator[str]:
    Path("run.zprof").unlink(missing_ok=True)
    write_trace(Path("run.zprof"), sample_rows(), notes={"compute": note})
    said = CliRunner().invoke(main, ["report", "run.zprof"])
    assert said.exit_code == 0, said.output
    yield said.output
    yield CliRunner().invoke(main, ["report", "run.zprof", "--json"]).output


def test_a_gpu_whose_profile_is_shipped_needs_no_option() -> None:
    text, body = written(NOTE)
    assert "of h100: MFU" in text and "tokens/s on this rank" in text
    [run] = json.loads(body)["runs"]
    assert run["compute"]["reached"]["hardware"] == "h100" and run["measures"]["mfu.percent"] > 0
    _, body = written(NOTE | {"device_name": "NVIDIA H100 PCIe"})
    [run] = json.loads(body)["runs"]
    assert run["compute"]["reached"] is None and "no hardware profile of NVIDIA H100 PCIe" in run["unseen"]["mfu.percent"]


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": [["a", "forward"]]}, {"rows": 3}, {"rows": [["a", "sideways", "mm", "cuda", "bfloat16", 1, 1, 0, 1]]},
        {"rows": [["a", "forward", "mm", "cuda", "bfloat16", 0, 1, 0, 1]]}, {"rows": [[b"a", *["x"] * 4, 1, 1, 0, 1]]},
        {"rows": [["a", "forward", "mm", "cuda", "bfloat16", 1, -1, 0, 1]]}, {"inputs": [["GPT", "int64", "44", 1]]},
        {"inputs": [[]]}, {"threads": None}, {"begin_ns": "now"}, {"device_name": "x" * 2000}, {"uncounted": [["a"]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_note_that_no_recording_writes_is_passed_over(damage: dict[str, Any]) -> None:
    _, body = written(NOTE | damage)
    [run] = json.loads(body)["runs"]
    assert run["compute"] is None and run["measures"]["flops.per_step"] is None


def test_bad_hardware_is_one_line(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.zprof", sample_rows(), notes={"compute": NOTE})
    for value in ("nope", str(tmp_path / "gone.toml"), str(tmp_path)):
        said = CliRunner().invoke(main, ["report", str(tmp_path / "run.zprof"), "--hardware", value])
        assert said.exit_code == 1 and len(said.output.splitlines()) == 1, said.output
