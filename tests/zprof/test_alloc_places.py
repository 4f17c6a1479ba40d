"""The tracker of storages: what one is held for and by whose module, and what it leaves behind when things go wrong."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.live_storages import storages_in_python
from tests.support.torches import not_with_2_8
from tests.support.zprof_ledgers import Alive, Ledger, track, two_layers
from zprof.recording.tracker import Tracker
from zprof.rows import BEFORE_STACK

pytestmark = pytest.mark.usefixtures("alone")


def test_a_small_model_is_held_by_known_sums() -> None:
    model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.ReLU())
    x = torch.randn(3, 100)
    loss: list[Tensor] = []
    ledger = track(lambda: loss.append(model(x).sum()))
    # The product is saved for no one: relu saves its result.
    assert ledger.alive() == {
        ("parameter", "0"): 4000,
        ("activation", "1"): 120,
        ("activation", "(outside modules)"): 4,
        ("other", "(before the recording)"): x.numel() * 4,
    } | {key: value for key, value in ledger.alive().items() if key[1] == "(before the recording)"}
    assert ("activation", "0") in ledger.made()


# ---- by category and module


def parts_of_a_step() -> tuple[Alive, Alive, Alive]:
    """What is alive after forward, after backward and after a step of Adam."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.BatchNorm1d(32))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 16)
    held: list[Tensor] = []
    forward = track(lambda: held.append(model(x).sum())).alive()
    backward = track(lambda: held[0].backward()).alive()
    return forward, backward, track(lambda: optimizer.step()).alive()


def test_every_part_of_a_step_has_its_category_and_its_module() -> None:
    forward, backward, step = parts_of_a_step()
    weights = {"0": 16 * 32 + 32, "1.0": 32 * 32 + 32, "2": 64}
    for path, numel in weights.items():
        assert forward["parameter", path] == 4 * numel
        assert backward["gradient", path] == 4 * numel
    assert forward["other", "2"] == 4 * (32 + 32) + 8
    assert forward["activation", "0"] == forward["activation", "1.1"] == 4 * 4 * 32
    tensors = {"0": 2, "1.0": 2, "2": 2}
    assert {path: step["optimizer", path] for path in weights} == {
        path: 2 * 4 * numel + 4 * tensors[path] for path, numel in weights.items()
    }
    assert not any(category == "temporary" for category, _ in (*forward, *backward, *step))


def test_backward_says_whose_forward_it_belongs_to() -> None:
    model = two_layers()

    def step() -> None:
        model(torch.randn(4, 8)).square().mean().backward()

    made = track(step).made()
    assert {("temporary", "0"), ("temporary", "1"), ("temporary", "2"), ("gradient", "0"), ("gradient", "2")} <= made
    assert ("temporary", "(backward)") not in made


def test_gradients_are_gradients_while_backward_still_runs() -> None:
    model = two_layers()
    seen: list[dict[tuple[str, str], int]] = []
    ledger = Ledger()
    first: Any = model[0]
    first.register_full_backward_hook(lambda *_: seen.append(ledger.alive()))
    tracker = Tracker(ledger.storages)
    tracker.start()
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    tracker.close()
    assert seen[0]["gradient", "2"] == 4 * (64 + 8)


def test_a_recomputed_forward_makes_activations_of_its_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = two_layers()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    model, x = Outer(), torch.randn(4, 8, requires_grad=True)
    ledger = Ledger()
    tracker = Tracker(ledger.storages)
    tracker.start()
    loss = model(x).sum()
    count = len(ledger.rows)
    loss.backward()
    tracker.close()
    made = {(row[1].partition(" ")[0], row[2]) for row in ledger.rows[count:]}
    assert ("activation", "inner.0") in made and ("temporary", "inner.2") in made


def test_two_roots_do_not_share_names() -> None:
    class Critic(nn.Sequential):
        pass

    maker, critic = nn.Sequential(nn.Linear(4, 4)), Critic(nn.Linear(4, 1))
    made = track(lambda: critic(maker(torch.randn(2, 4))).mean().backward()).made()
    paths = {path for category, path in made if category == "gradient"}
    assert len(paths) == 2 and any("." in path for path in paths)


def test_parts_called_alone_are_named_from_the_model_they_belong_to() -> None:
    model = nn.ModuleDict({"encoder": two_layers(), "decoder": two_layers()})
    made = track(lambda: model["decoder"](model["encoder"](torch.randn(2, 8))).sum().backward()).made()
    assert {("activation", "encoder.0"), ("gradient", "decoder.2")} <= made


def test_a_model_built_and_moved_while_recording_is_all_parameters() -> None:
    kept: list[nn.Module] = []

    def build() -> None:
        kept.append(two_layers().double())
        kept[0](torch.randn(2, 8, dtype=torch.float64))

    alive = track(build).alive()
    assert {key: size for key, size in alive.items() if key[0] == "parameter"} == {
        ("parameter", "0"): 8 * 72, ("parameter", "2"): 8 * 72,
    }  # fmt: skip


def test_what_somebody_who_knows_has_said_stands() -> None:
    ledger = Ledger()
    tracker = Tracker(ledger.storages)
    tracker.start()
    model = two_layers()
    first: Any = model[0]
    ledger.storages.hold("communication on device", "unit", first.weight.untyped_storage())
    model(torch.randn(2, 8)).sum().backward()
    tracker.close()
    assert ledger.alive()["communication", "unit"] == 4 * 64


def test_an_optimizers_loaded_state_is_recognised() -> None:
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())

    def load() -> None:
        optimizer.load_state_dict(state)
        optimizer.step()

    assert track(load).alive()["optimizer", "0"] == 2 * 4 * 72 + 8


# ---- what goes wrong


def test_an_exception_in_a_forward_or_a_step_leaves_no_place_behind() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt if self.training else ValueError

    class BrokenStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError

    broken, model = Broken(), two_layers()
    optimizer = BrokenStep(model.parameters(), lr=0.1)

    def body() -> None:
        for train in (True, True, False):
            with pytest.raises((KeyboardInterrupt, ValueError)):
                broken.train(train)(torch.randn(2, 8))
        with pytest.raises(RuntimeError):
            optimizer.step()
        model(torch.randn(2, 8)).sum().backward()

    made = track(body).made()
    assert not any("(optimizer)." in path or "Broken.Sequential" in path for _, path in made)
    assert any(category == "activation" and path.endswith("0") for category, path in made)


def test_storages_of_threads_that_ran_before_are_taken_when_they_come_in() -> None:
    made: list[Tensor] = []
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), made.append(torch.ones(1000))))

    def body() -> None:
        go.set()
        thread.join()
        made.append(made[0][1:] + 1)

    thread.start()
    assert track(body).alive()["other", "(made elsewhere)"] == 4000


def test_storages_of_threads_that_begin_meanwhile_are_seen_when_made_each_with_its_own_place() -> None:
    model, kept = two_layers(), []
    before = threading.getprofile(), sys.getprofile()

    def work() -> None:
        kept.append(torch.ones(1000))
        model(torch.randn(2, 8)).sum().backward()

    def body() -> None:
        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ledger = track(body)
    assert (threading.getprofile(), sys.getprofile()) == before
    assert ledger.alive()["other", "(outside modules)"] == 20 * 4000
    assert ledger.alive()["gradient", "0"] and ("activation", "0") in ledger.made()
    # Nodes of such a thread have numbers of their own, which say nothing of the modules of another.
    assert {path for category, path in ledger.made() if category == "temporary"} <= {"(backward)", "0", "2"}


def test_the_profiler_that_threads_have_already_stays_and_sees_their_first_event() -> None:
    seen: list[str] = []

    def profiler(frame: Any, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    def body() -> None:
        thread = threading.Thread(target=torch.ones, args=(1000,))
        thread.start()
        thread.join()

    threading.setprofile(profiler)
    try:
        track(body)
        assert threading.getprofile() is profiler and "run" in seen
    finally:
        threading.setprofile(None)


def test_nothing_is_kept_alive() -> None:
    def body() -> None:
        model = two_layers()
        model(torch.randn(2, 8)).sum().backward()
        gone.extend((weakref.ref(model), weakref.ref(model[0].weight)))

    gone: list[weakref.ref[Any]] = []
    ledger = Ledger()
    tracker = Tracker(ledger.storages)
    before = len(storages_in_python())
    tracker.start()
    body()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(storages_in_python()) == before
    tracker.close()


def hooks_of_torch() -> tuple[Any, ...]:
    from torch.optim import optimizer

    names = [name for name in vars(registry) if name.startswith("_global_")]
    tables = [dict(getattr(registry, name)) if isinstance(getattr(registry, name), dict) else None for name in names]
    steps = dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)
    resize = torch.UntypedStorage.__dict__.get("resize_")
    return *tables, steps, resize, torch._C._len_torch_dispatch_stack(), list(warnings.filters)


def test_closing_leaves_torch_as_it_was() -> None:
    before = hooks_of_torch()
    model = two_layers()
    track(lambda: model(torch.randn(2, 8)).sum().backward())
    assert hooks_of_torch() == before
    first: Any = model[0]
    assert not first.weight._post_accumulate_grad_hooks


def test_a_start_that_fails_half_way_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooks_of_torch()

    def refuse(mode: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("zprof.recording.tracker.push", refuse)
    with pytest.raises(RuntimeError, match="no"):
        Tracker(Ledger().storages).start()
    assert hooks_of_torch() == before


def test_a_mistake_of_ours_ends_the_tracking_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Tracker, "_hold", fail)
    with pytest.warns(RuntimeWarning, match="expected to follow every storage, found ZeroDivisionError"):
        track(lambda: torch.ones(3) + torch.ones(3))


def test_closing_under_somebody_elses_mode_leaves_theirs() -> None:
    class Theirs(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Theirs.calls += 1
            return func(*args, **(kwargs or {}))

    ledger = Ledger()
    tracker = Tracker(ledger.storages)
    tracker.start()
    with Theirs():
        one = torch.ones(3)
        tracker.close()
        rows, calls = len(ledger.rows), Theirs.calls
        two = torch.ones(3)
        assert (len(ledger.rows), Theirs.calls) == (rows, calls + 1)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.equal(one, two)


def test_fake_and_meta_tensors_are_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def body() -> None:
        with FakeTensorMode():
            two_layers()(torch.randn(4, 8)).sum().backward()
        with torch.device("meta"):
            two_layers()(torch.randn(4, 8))

    ledger = track(body)
    assert not ledger.made() - {key for key in ledger.made() if key[1] == "(before the recording)"}


@not_with_2_8("it compiles again whenever a recording looks on")
def test_compiled_code_runs_compiled_and_whole() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def scaled(x: Tensor) -> Tensor:
        return (x * 2).relu()

    function = torch.compile(scaled, backend=backend, fullgraph=True)
    ledger = track(lambda: (function(torch.randn(1000)), function(torch.randn(1000))))
    assert len(graphs) == 1
    assert max(ledger.levels) - ledger.levels[-1] >= 8000
    torch._dynamo.reset()


# ---- stacks


def test_stacks_name_the_users_lines_that_made_a_storage() -> None:
    kept: list[Tensor] = []
    made = track(lambda: kept.append(torch.ones(5)), stacks=True).made()
    keys = [key for category, key in made if category == "other" and BEFORE_STACK in key]
    assert keys and all("test_alloc_places.py:" in key and "/torch/" not in key for key in keys)
    path, inner, *_ = keys[0].split(BEFORE_STACK)
    assert path == "(outside modules)" and inner.endswith(".<lambda>")


def test_the_lines_that_made_a_storage_stay_with_it_whatever_it_becomes() -> None:
    def body() -> None:
        model = two_layers()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()

    made = track(body, stacks=True).made()
    for category in ("parameter", "gradient", "optimizer"):
        keys = [key for of, key in made if of == category and key.startswith(("0 ", "(optimizer) "))]
        assert keys and all(f"{BEFORE_STACK}zprof/test_alloc_places.py:" in key for key in keys), category
    assert all("two_layers" in key for of, key in made if of == "parameter" and BEFORE_STACK in key)


def test_code_of_two_files_that_is_the_same_is_told_apart(tmp_path: Path) -> None:
    kept: list[Tensor] = []
    modules = []
    for folder in ("first/pkg", "second/pkg"):
        file = tmp_path / folder / "made.py"
        file.parent.mkdir(parents=True)
        file.write_text("import torch\ndef made():\n    return torch.ones(7)\n")
        names: dict[str, Any] = {}
        exec(compile(file.read_text(), str(file), "exec"), names)
        modules.append(names["made"])
    keys = track(lambda: kept.extend(made() for made in modules), stacks=True).made()
    lines = {key.split(BEFORE_STACK)[1] for _, key in keys if "pkg/made.py" in key}
    assert lines == {"pkg/made.py:3:made", "second/pkg/made.py:3:made"}


def test_the_interpreters_own_code_is_no_line_of_the_users() -> None:
    kept: list[Any] = []
    made = track(lambda: kept.append(copy.deepcopy([torch.ones(5), torch.ones(6)])), stacks=True).made()
    keys = [key for _, key in made if BEFORE_STACK in key]
    assert keys and all("test_alloc_places.py:" in key.split(BEFORE_STACK)[1] for key in keys)


def test_stacks_say_the_module_first() -> None:
    model = two_layers()
    made = track(lambda: model(torch.randn(2, 8)).sum().backward(), stacks=True).made()
    assert any(key.startswith(f"0{BEFORE_STACK}") for category, key in made if category == "activation")
    assert any(of == "gradient" and key.startswith(f"0{BEFORE_STACK}") for of, key in made)
