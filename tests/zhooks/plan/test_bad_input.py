"""Bad input: one clear error each, naming subject, expected, found and what to do, and the model as it was before.

pytest runs it. Errors of the policy file's own are test_policy_errors.py's; errors in mid-step are the parity suite's.
"""

from __future__ import annotations

import copy
import math
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zhooks
from offload.events import Recorder
from tests.support.on_ranks import from_first, hooks_left, on_ranks, place
from tests.support.ranks import End, Pool
from tests.support.slow import slow
from tests.support.values import full, same


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 6) * torch.arange(4)[:, None]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(error: type[Exception], words: str, attempt: Callable[[], Any], model: nn.Module) -> None:
    """``attempt`` raises ``error`` with all ``words`` in order; ``model`` is as it was and trains on like its copy."""
    twin, before = copy.deepcopy(model), list(model.parameters())
    with pytest.raises(error, match="(?s)" + ".*".join(re.escape(word) for word in words.split(" ... "))) as raised:
        attempt()
    assert str(raised.value).count("\n") == 0, "one error, one line"
    assert [type(now) for now in model.parameters()] == [type(then) for then in twin.parameters()]
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert not hooks_left(model)
    state, wanted = model.state_dict(), twin.state_dict()
    assert list(state) == list(wanted) and all(torch.equal(state[name], wanted[name]) for name in state)
    if before:
        optimizers = [torch.optim.SGD(either.parameters(), lr=0.1) for either in (model, twin)]
        for either, optimizer in zip((model, twin), optimizers, strict=True):
            step(either, optimizer)
        state, wanted = model.state_dict(), twin.state_dict()
        assert all(torch.equal(state[name], wanted[name]) for name in state)


# ---- the policy


@on_ranks(2)
def test_an_unknown_policy_key_is_refused_with_its_nearest_neighbour() -> None:
    model = net()
    words = "[units] min_nummel ... unknown key ... did you mean min_numel?"
    refused(zhooks.PolicyError, words, lambda: zhooks.attach(model, policy={"units": {"min_nummel": 1}}), model)


@on_ranks(1)
def test_an_unknown_policy_value_is_refused() -> None:
    model = net()
    words = "stage ... expected 0, 1, 2 or 3, found 4"
    refused(zhooks.PolicyError, words, lambda: zhooks.attach(model, policy={"stage": 4}), model)
    words = 'reshard_after_forward ... expected true, false or "auto", found "sometimes"'
    bad = {"schedule": {"reshard_after_forward": "sometimes"}}
    refused(zhooks.PolicyError, words, lambda: zhooks.attach(model, policy=bad), model)


def test_a_policy_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path, model = tmp_path / "policy.toml", net()
    path.write_text("stage = 3\n\n[comm]\ntransprot = 'shm'\n", encoding="utf-8")
    words = "policy.toml:4: ... transprot ... unknown key; did you mean transport?"
    refused(zhooks.PolicyError, words, lambda: zhooks.attach(model, policy=path), model)
    missing = tmp_path / "missing.toml"
    refused(zhooks.PolicyError, "missing.toml", lambda: zhooks.attach(model, policy=missing), model)


@on_ranks(1)
def test_a_pattern_that_matches_no_module_is_refused() -> None:
    model = net()
    words = "[units] needs Block to match a module, found none ... BatchNorm1d, Linear"
    refused(zhooks.AttachError, words, lambda: zhooks.attach(model, policy={"units": {"classes": ["Block"]}}), model)


# ---- the mesh


@on_ranks(2)
def test_a_mesh_that_does_not_cover_the_group_is_refused() -> None:
    model = net()
    words = (
        "mesh ... needs every rank of the process group (0 to 1), found ranks [0] ... Build the mesh over the whole group"
    )
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("shard",))
    refused(zhooks.AttachError, words, lambda: zhooks.attach(model, mesh=mesh), model)


@on_ranks(2)
def test_a_mesh_of_unknown_axes_is_refused() -> None:
    model = net()
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    words = (
        "mesh ... needs axes named 'shard' or 'dp' or 'fsdp' or 'dp_shard', 'replicate' or 'dp_replicate', 'tp', 'pp' or "
        "'ep', each axis at most once, found ('cp',)"
    )
    refused(zhooks.AttachError, words, lambda: zhooks.attach(model, mesh=mesh), model)


# ---- the model


@on_ranks(1, 2)
def test_a_model_attached_twice_is_refused_and_goes_on_training() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model)
    words = "attach expected a plain model, found it attached already ... call apply() on that attachment ... detach()"
    for again in (model, nn.Sequential(model)):
        with pytest.raises(zhooks.AttachError, match=r"attached already|another attachment"):
            zhooks.attach(again)
    with pytest.raises(zhooks.AttachError, match=".*".join(re.escape(word) for word in words.split(" ... "))):
        zhooks.attach(model)
    for either in (model, plain):
        step(either, torch.optim.SGD(either.parameters(), lr=0.1))
    attachment.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@on_ranks(1)
def test_a_module_inside_an_attached_model_is_refused() -> None:
    model = net()
    zhooks.attach(model)
    with pytest.raises(zhooks.AttachError, match=r"attach|another attachment"):
        zhooks.attach(model[0])


@on_ranks(1)
def test_a_module_without_parameters_is_refused() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
    words = "attach expected Sequential to have parameters, found none"
    refused(zhooks.AttachError, words, lambda: zhooks.attach(model), model)


@on_ranks(1)
def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(zhooks.AttachError, match=r"expected a torch\.nn\.Module, found dict"):
        zhooks.attach({})  # type: ignore[arg-type]


@on_ranks(1)
def test_parameters_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(zhooks.AttachError, match=r"expected all parameters on one device, found cpu, meta\. Call model\.to\("):
        zhooks.attach(model)
    assert not hooks_left(model) and type(model[0].weight) is nn.Parameter


@on_ranks(1, kind=("lazy", "sparse", "subclass", "weak reference"))
def test_parameters_that_cannot_be_sharded_are_refused_by_name(kind: str) -> None:
    import weakref

    class Special(nn.Parameter):
        pass

    model = net()
    kept: Any = None
    if kind == "lazy":
        model.add_module("more", nn.LazyLinear(3))
        words = "more.weight ... lazy ... Run one forward"
    elif kind == "sparse":
        model.add_module("more", nn.Embedding(4, 2, sparse=True))
        words = "more ... sparse=True ... sparse=False"
    elif kind == "subclass":
        model[3].weight = Special(torch.ones(3, 8))
        words = "3.weight ... Expected torch.nn.Parameter, found ... Special ... plain parameters"
    else:
        kept = weakref.ref(model[3].weight)
        words = "3.weight ... no weak references ... found 1"
    hooked = hooks_left(model)
    with pytest.raises(zhooks.AttachError, match=".*".join(re.escape(word) for word in words.split(" ... "))):
        zhooks.attach(model)
    assert hooks_left(model) == hooked
    assert not any(isinstance(param, zhooks.ShardedTensor) for param in model.parameters())
    assert kept is None or kept() is model[3].weight


@on_ranks(1, 2)
def test_a_graph_that_still_holds_a_parameter_is_refused_and_everything_put_back() -> None:
    model = net()
    model[2].weight.register_hook(lambda grad: grad * 2)
    loss = model(torch.ones(4, 6)).sum()
    words = "parameter ... Expected nothing else to refer to its memory ... Drop graphs"
    with pytest.raises(zhooks.AttachError, match=".*".join(words.split(" ... "))):
        zhooks.attach(model)
    assert not hooks_left(model)
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * 6
    assert len(model[2].weight._backward_hooks) == 1
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(1)
def test_a_meta_model_nothing_can_initialise_is_refused_and_stays_on_meta() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, device="meta"))

    model = nn.Sequential(nn.Linear(2, 2, device="meta"), Bare())
    with pytest.raises(zhooks.AttachError, match=r"reset_parameters, or the root _init_weights; found none for 1\. Pass init="):
        zhooks.attach(model)
    assert {param.device.type for param in model.parameters()} == {"meta"}


# ---- the optimizer


@on_ranks(1)
def test_an_optimizer_of_another_model_is_refused() -> None:
    model = net()
    stranger = torch.optim.SGD(net().parameters(), lr=0.1)
    words = "attach expected SGD to hold parameters of Sequential, found none of them. Build it from model.parameters()"
    refused(zhooks.AttachError, words, lambda: zhooks.attach(model, stranger), model)


@on_ranks(1, 2)
def test_an_optimizer_with_state_that_was_not_passed_is_refused_and_accepted_when_passed() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    words = (
        "attach expected an optimizer without state, found AdamW with state for this model. Pass it: attach(model, optimizer)"
    )
    refused(zhooks.AttachError, words, lambda: zhooks.attach(model), model)
    zhooks.attach(model, optimizer).detach()
    with pytest.raises(zhooks.AttachError, match="if a new one replaces it, delete it and its schedulers before attach"):
        zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zhooks.attach(model)
    step(model, optimizer)


# ---- ranks that differ


@on_ranks(2)
def test_ranks_that_differ_are_named_when_they_are_not_to_be_made_equal() -> None:
    model = net()
    if place()[0] == 1:
        with torch.no_grad():
            model[3].bias.add_(1.0)
    with pytest.raises(zhooks.AttachError, match=r"sync=False.*found that 3\.bias differ.*Use sync=True"):
        zhooks.attach(model, sync=False)
    assert not hooks_left(model)
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * 6


@on_ranks(2)
def test_ranks_of_other_architectures_are_refused_without_a_hang() -> None:
    model = nn.Linear(6, 3 + place()[0])
    with pytest.raises(zhooks.ZhooksError, match="rank"):
        zhooks.attach(model, policy={"comm": {"timeout_s": 3}})


def run_alone(transport: str) -> str:
    """The first rank trains; the second never comes to the second forward."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    zhooks.attach(model, policy={"units": {"min_numel": 0}, "comm": {"transport": transport, "timeout_s": 5}})
    model(torch.ones(2, 8)).sum().backward()
    assert model[0][0].weight.grad is not None
    dist.barrier()
    said = ""
    if place()[0] == 0:
        try:
            model(torch.ones(2, 8)).sum().backward()
            said = f"no error; {model[0][0].weight.grad}"
        except zhooks.DivergenceError as error:
            said = str(error)
    everybody = [said, ""]
    dist.broadcast_object_list(everybody, src=0)
    return everybody[0]


@pytest.mark.parametrize("transport", ["shm", *slow("p2p", "stock")])
def test_a_rank_that_never_makes_a_call_the_others_make_is_an_error_in_time(transport: str, ranks2: Pool) -> None:
    outcomes = ranks2.attempt(f"{__name__}:run_alone", transport=transport)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED] * 2, outcomes[0].text
    said = outcomes[0].value
    assert re.match(r"Rank 1 is late\. Expected every rank in \w+", said), said
    assert "within 5" in said and ("gather 0" in said or "gather" in said) and "timeout_s" in said, said


# ---- NaN


@on_ranks(2, stage=(1, 3))
def test_nan_gradients_raise_where_the_user_asks_for_it_and_else_pass_as_in_plain_torch(stage: int) -> None:
    model, plain = net(), net()
    zhooks.attach(model, policy={"stage": stage})
    for either in (model, plain):
        (either(torch.ones(4, 6)) * math.nan).sum().backward()
        with pytest.raises(RuntimeError, match=r"total norm .* is non-finite"):
            nn.utils.clip_grad_norm_(either.parameters(), 1.0, error_if_nonfinite=True)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert math.isnan(float(norm))
    assert model[3].weight.grad.full_tensor().isnan().all()


# ---- arguments of another kind


@on_ranks(1, 2)
def test_attach_refuses_arguments_of_another_kind_by_name() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: dict[str, list[Any]] = {
        "optimizer": [3, "adam", [optimizer], torch.optim.AdamW],
        "mesh": ["cpu", 0, [0, 1]],
        "init": ["zeros", 1],
        "sync": [None, "no", 2],
    }
    for name, values in wrong.items():
        for value in values:
            refused(zhooks.AttachError, f"as {name}, found", partial(zhooks.attach, model, **{name: value}), model)
    neither = "policy must be a path, a mapping, a Policy or None, found"
    policies: tuple[tuple[Any, str], ...] = (
        (3, f"{neither} int"), (b"x", f"{neither} bytes"), ([], f"{neither} list"), ("", "found a folder, not a regular file"),
        ("/", "found a folder, not a regular file"), ("nowhere.toml", "nowhere.toml: no such policy"), ("a\0b", "not a path"),
    )  # fmt: skip
    for policy, words in policies:
        refused(zhooks.PolicyError, words, partial(zhooks.attach, model, policy=policy), model)
    zhooks.attach(model, optimizer).detach()


def handed(attachment: zhooks.Attachment, optimizer: Any, path: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Every verb with something of another kind, and the words that say so."""
    foreign = torch.optim.SGD(net().parameters(), lr=0.1)
    verbs: list[tuple[str, Callable[[], Any]]] = [
        ("apply expected .* found None", lambda: attachment.apply(None)),
        ("policy must be .* found int", lambda: attachment.apply(3)),  # type: ignore[arg-type]
        ("gathered expected parameters", lambda: attachment.gathered("0.weight").__enter__()),  # type: ignore[arg-type]
        ("heads must be", lambda: attachment.memory(heads="x")),  # type: ignore[arg-type]
        ("observe expected an observer", lambda: attachment.observe(None)),  # type: ignore[arg-type]
        ("calibrate expected prefer", lambda: attachment.calibrate(prefer=[]).__enter__()),  # type: ignore[arg-type]
        ("calibrate expected prefer", lambda: attachment.calibrate(loss_scale="x").__enter__()),  # type: ignore[arg-type]
        ('state_dict expected {"model"', lambda: attachment.load_state_dict(None)),  # type: ignore[arg-type]
    ]
    takes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("state_dict", attachment.state_dict),
        ("load_state_dict", lambda one: attachment.load_state_dict({}, one)),
        ("save", lambda one: attachment.save(path / "run", one)),
        ("load", lambda one: attachment.load(path / "run", one)),
    )
    for verb, call in takes:
        verbs.append((f"{verb} expected a torch.optim.Optimizer", partial(call, 3)))
        verbs.append((f"{verb} expected an optimizer of the model's parameters", partial(call, foreign)))
    wrong: tuple[dict[str, Any], ...] = ({"objects": 3}, {"objects": {1: optimizer}}, {"objects": {"a": 3}}, {"extra": [1]})
    for more in wrong:
        verbs.append(("save expected", partial(attachment.save, path / "run", **more)))
    return verbs


@on_ranks(1, 2)
def test_every_verb_refuses_arguments_of_another_kind_and_changes_nothing() -> None:
    model = net()
    attachment = zhooks.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as own:
        path = Path(from_first(own))
        before = [value.clone() for value in full(model)]
        for words, call in handed(attachment, optimizer, path):
            with pytest.raises(zhooks.ZhooksError, match=words) as caught:
                call()
            assert len(str(caught.value)) < 600
        if place()[1] > 1:
            for bad in (0, 1):
                with pytest.raises(zhooks.CheckpointError, match=f"rank {bad}: save expected a torch.optim.Optimizer"):
                    attachment.save(path / "run", optimizer if place()[0] != bad else 3)  # type: ignore[arg-type]
                with pytest.raises(zhooks.CheckpointError, match=f"rank {bad}: load expected a mapping or None as objects"):
                    attachment.load(path / "run", objects={} if place()[0] != bad else [])  # type: ignore[arg-type]
        assert same(full(model), before) and os.listdir(path) == []
        step(model, optimizer)
        from_first(None)


def entered(attachment: zhooks.Attachment, verb: str) -> Any:
    return getattr(attachment, verb)().__enter__()


@on_ranks(1, 2)
def test_an_attachment_that_was_detached_refuses_every_verb_and_leaves_the_model_alone() -> None:
    model = net()
    attachment = zhooks.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment.detach()
    before = [value.detach().clone() for value in model.parameters()]
    verbs: dict[str, Callable[[], Any]] = {
        "apply": lambda: attachment.apply({"stage": 0}),
        "state_dict": attachment.state_dict,
        "load_state_dict": lambda: attachment.load_state_dict({"model": net().state_dict()}),
        "save": lambda: attachment.save("run"),
        "load": lambda: attachment.load("run"),
        "save_full": lambda: attachment.save_full("run.safetensors"),
        "observe": lambda: attachment.observe(Recorder()),
        "detach": attachment.detach,
    }
    for verb in ("gathered", "resident", "no_sync", "accumulate", "calibrate"):
        verbs[verb] = partial(entered, attachment, verb)
    for verb, call in verbs.items():
        with pytest.raises(zhooks.AttachError, match=f"^{verb} expected an attached model, found one that was detached"):
            call()
    assert same(model.parameters(), before)
    step(model, optimizer)
