"""Full values and full states through the Attachment: gathered, resident, save_full, state dicts, and a library's loop.

pytest runs it, on one, two and four ranks. The stock save and resume loop is test_torch_state.py's.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from tests.support.collector import collect_all
from tests.support.inside import comm_of, flats_of, runtime_of, units_of
from tests.support.on_ranks import from_first, on_ranks, place
from tests.support.ranks import Pool
from tests.support.values import full, same, sharded
from zhooks.comm import ControlPlane

STAGES = (0, 1, 2, 3)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- gathered and resident


@on_ranks(2, stage=STAGES)
def test_gathered_shows_full_plain_values_and_puts_the_shards_back(stage: int) -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={"stage": stage})
    with attachment.gathered() as values:
        assert same(values, plain.parameters())
        assert type(model[0].weight) is not zhooks.ShardedTensor and torch.equal(model[0].weight, plain[0].weight)
    with attachment.gathered(model[3].bias) as (bias,):
        assert torch.equal(bias, plain[3].bias) and isinstance(model[0].weight, zhooks.ShardedTensor)
    assert all(isinstance(param, zhooks.ShardedTensor) for param in model.parameters())


@on_ranks(2, 4, stage=(1, 3))
def test_the_first_ranks_writes_reach_every_shard_and_the_next_forward(stage: int) -> None:
    model, plain = net().eval(), net().eval()
    attachment = zhooks.attach(model, policy={"stage": stage})
    model(batch(0))
    with attachment.gathered(model[0].weight, model[3].bias, write=True) as (weight, bias), torch.no_grad():
        if place()[0] == 0:
            weight.mul_(2.0)
            bias[1] = 5.0
    with torch.no_grad():
        plain[0].weight.mul_(2.0)
        plain[3].bias[1] = 5.0
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert same(full(model), plain.parameters())


@on_ranks(2)
def test_changes_without_write_and_changes_of_other_ranks_are_dropped() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model)
    with attachment.gathered(model[0].weight) as (weight,), torch.no_grad():
        weight.zero_()
    with attachment.gathered(model[0].weight, write=True) as (weight,), torch.no_grad():
        if place()[0] == 1:
            weight.zero_()
    assert same(full(model), plain.parameters())


@on_ranks(2)
def test_an_exception_inside_gathered_puts_the_shards_back_and_writes_nothing() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model)
    with pytest.raises(ArithmeticError), attachment.gathered(write=True) as values:
        with torch.no_grad():
            values[0].zero_()
        raise ArithmeticError
    assert same(full(model), plain.parameters())
    train(model, adamw(model), range(1))


@on_ranks(2)
def test_a_stranger_cannot_be_gathered() -> None:
    attachment = zhooks.attach(net())
    with pytest.raises(zhooks.CheckpointError, match="expected parameters of this model"), attachment.gathered(torch.ones(3)):
        pass


@on_ranks(2)
def test_a_resident_model_gathers_once_for_many_forwards() -> None:
    model, plain = net().eval(), net().eval()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    recorder = Recorder()
    with attachment.observe(recorder), attachment.resident(), torch.no_grad():
        for step in range(3):
            assert torch.equal(model(batch(step)), plain(batch(step)))
        assert len([line for line in recorder.names("gather") if line.startswith("begin")]) == len(units_of(attachment))
    assert attachment.memory().transient["gathered units"] == 0
    for either in (model.train(), plain.train()):
        train(either, adamw(either), range(2))
    assert same(full(model), plain.parameters())


# ---- states


@on_ranks(1, 2, stage=STAGES)
def test_a_full_state_is_the_plain_models_on_the_first_rank_and_nothing_elsewhere(stage: int) -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={"stage": stage})
    optimizers = [adamw(model), adamw(plain)]
    for either, optimizer in zip((model, plain), optimizers, strict=True):
        train(either, optimizer, range(2))
    state = attachment.state_dict(optimizers[0])
    if place()[0] > 0:
        assert state == {}
        return
    wanted, packed = plain.state_dict(), optimizers[1].state_dict()
    assert list(state["model"]) == list(wanted) and same(state["model"].values(), wanted.values())
    assert state["optimizer"]["param_groups"] == packed["param_groups"]
    for index, entry in packed["state"].items():
        found = state["optimizer"]["state"][index]
        assert list(found) == list(entry) and same(found.values(), entry.values())
    resumed = net(seed=3)
    resumed.load_state_dict(state["model"])
    again = adamw(resumed)
    again.load_state_dict(state["optimizer"])
    for either, optimizer in ((resumed, again), (plain, optimizers[1])):
        train(either, optimizer, range(2, 4))
    assert same(resumed.state_dict().values(), plain.state_dict().values())


@on_ranks(2, stages=((3, 0), (0, 3), (3, 1), (2, 3)))
def test_a_full_state_is_loaded_at_another_stage_and_training_goes_on(stages: tuple[int, int]) -> None:
    model = net()
    attachment = zhooks.attach(model, policy={"stage": stages[0]})
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    state = copy.deepcopy(attachment.state_dict(optimizer))
    train(model, optimizer, range(2, 4))
    wanted = full(model)
    attachment.detach()
    other = net(seed=3)
    again = zhooks.attach(other, policy={"stage": stages[1], "units": {"min_numel": 0}})
    resumed = adamw(other)
    again.load_state_dict(state, resumed)
    train(other, resumed, range(2, 4))
    for ours, theirs in zip(full(other), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def saved_by(world: int) -> dict[str, Any]:
    model = net()
    attachment = zhooks.attach(model)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    return attachment.state_dict(optimizer)


def resumed_by(state: dict[str, Any]) -> list[Tensor]:
    model = net(seed=3)
    attachment = zhooks.attach(model)
    optimizer = adamw(model)
    attachment.load_state_dict(state if place()[0] == 0 else {}, optimizer)
    train(model, optimizer, range(2, 4))
    return full(model)


def test_a_full_state_is_loaded_on_another_number_of_ranks(ranks1: Pool, ranks2: Pool, ranks4: Pool) -> None:
    state = ranks2.run(f"{__name__}:saved_by", world=2)[0]
    plain = net()
    train(plain, adamw(plain), range(0))
    results = [pool.run(f"{__name__}:resumed_by", state=state)[0] for pool in (ranks1, ranks4)]
    for one, four in zip(*results, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_a_state_of_another_model_is_refused_on_every_rank_and_changes_nothing() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model)
    state = {"model": {**plain.state_dict(), "0.weight": torch.ones(2, 2), "more": torch.ones(1)}}
    del state["model"]["3.bias"]
    with pytest.raises(zhooks.CheckpointError, match=r"missing \(3\.bias\).*unknown \(more\).*another shape \(0\.weight\)"):
        attachment.load_state_dict(state if place()[0] == 0 else {})
    assert same(full(model), plain.parameters())


#: Between ranks it names the class that puts a tensor together; of a file it would be code to run.
_MADE = "zhooks: a tensor made of others"


def _wrong_optimizer(state: dict[str, Any], kind: str) -> Any:
    [group] = state["param_groups"]
    return {
        "of groups": {**state, "param_groups": [group, group]},
        "of parameters": {**state, "param_groups": [{**group, "params": [0, 1]}]},
        "unknown": {**state, "state": {**state["state"], 9: state["state"][0]}},
        "no state": 3,
        "not plain": {**state, "param_groups": [{**group, "lr": object()}]},
        "code": {**state, "param_groups": [{**group, "lr": {_MADE: ["os", "error", None, [], []], "inner": {}}}]},
    }[kind]


@on_ranks(2)
def test_a_state_of_another_optimizer_is_refused_on_every_rank_and_changes_nothing() -> None:
    model = net()
    attachment, optimizer = zhooks.attach(model), adamw(model)
    train(model, optimizer, range(1))
    state = attachment.state_dict(optimizer)
    train(model, optimizer, range(1, 2))
    before, first = full(model), place()[0] == 0
    for kind, found in {
        "of groups": r"groups of \[6, 6\] parameters where it has \[6\]",
        "of parameters": r"groups of \[2\] parameters where it has \[6\]",
        "unknown": "the state of parameter 9 of 6",
        "no state": "int without state and param_groups",
        "not plain": "dicts and tensors in the optimizer's state.*'lr'.*found object",
        "code": f"a dict with the key '{_MADE}'",
    }.items():
        wrong = {**state, "optimizer": _wrong_optimizer(state["optimizer"], kind)} if first else {}
        with pytest.raises(zhooks.CheckpointError, match=found):
            attachment.load_state_dict(wrong, optimizer)
        assert same(full(model), before)
    with pytest.raises(zhooks.CheckpointError, match='expected the optimizer whose state is under "optimizer", found none'):
        attachment.load_state_dict(state)
    assert same(full(model), before)
    held = {key: value.clone() for key, value in optimizer.state[next(iter(model.parameters()))].items()}
    attachment.load_state_dict({"model": state["model"]} if first else {}, optimizer)
    for key, value in optimizer.state[next(iter(model.parameters()))].items():
        assert torch.equal(value, held[key]), "a state without one leaves the optimizer as it is"
    train(model, optimizer, range(2, 3))


@on_ranks(2, stage=(0, 1, 3))
def test_save_full_writes_what_safetensors_loads_into_a_plain_model(stage: int) -> None:
    import tempfile

    from safetensors.torch import load_file

    model = net()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    model.register_parameter("narrow", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    model.register_parameter("turned", nn.Parameter(torch.randn(4, 3).t()))
    plain = copy.deepcopy(model)
    attachment = zhooks.attach(model, policy={"stage": stage})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(from_first(folder)) / "model.safetensors"
        attachment.save_full(path)
        if place()[0] == 0:
            assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
            loaded = load_file(path)
            assert loaded.keys() == plain.state_dict().keys()
            other = copy.deepcopy(plain)
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            other.load_state_dict(loaded)
            assert same(other.state_dict().values(), plain.state_dict().values())
        if dist.is_initialized():
            dist.barrier()


@on_ranks(2)
def test_save_full_into_a_folder_that_is_not_there_is_refused_on_every_rank() -> None:
    attachment = zhooks.attach(net())
    with pytest.raises(zhooks.CheckpointError, match=r"Cannot write /nowhere/at/all\.safetensors. Expected a folder to write"):
        attachment.save_full("/nowhere/at/all.safetensors")


# ---- a library's model in a library's loop


def test_a_plain_models_state_is_refused_with_the_way_to_pass_it() -> None:
    model = net()
    attachment = zhooks.attach(model)
    plain = net(seed=1)
    with pytest.raises(zhooks.CheckpointError, match=r'Pass a plain model\'s state as \{"model": state\}'):
        attachment.load_state_dict(plain.state_dict())
    assert same(full(model), net().parameters())
    attachment.load_state_dict({"model": plain.state_dict()})
    assert same(full(model), plain.parameters())


def tiny_gpt2(device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=128, n_positions=32)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        torch.manual_seed(0)
        with torch.device(device):
            return GPT2LMHeadModel(config)


def loop(model: nn.Module) -> list[float]:
    """Accumulation over two micro-batches, clipping and a schedule, as trainers do it."""
    decayed = [param for param in model.parameters() if param.dim() > 1]
    plain = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses = []
    model.train()
    for step in range(3):
        for micro in range(2):
            tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(2 * step + micro))
            output = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
            (output.loss / 2).backward()
            losses.append(output.loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


@on_ranks(2, stage=(0, 1, 3))
def test_a_transformers_gpt2_trains_like_the_plain_one(stage: int) -> None:
    model, plain = tiny_gpt2("cpu"), tiny_gpt2("cpu")
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 1000}})
    torch.testing.assert_close(loop(model), loop(plain), rtol=1e-5, atol=1e-6)
    attachment.detach()
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert model.lm_head.weight is model.transformer.wte.weight


@on_ranks(2)
def test_a_transformers_model_on_meta_is_filled_by_its_own_init_and_generates() -> None:
    model = tiny_gpt2("meta")
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 1000}})
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
    weight = model.transformer.h[0].mlp.c_fc.weight.full_tensor()
    assert 0.015 < weight.std() < 0.025 and torch.equal(model.transformer.ln_f.weight.full_tensor(), torch.ones(32))
    assert loop(model)[-1] > 0
    with attachment.resident(), torch.no_grad():
        tokens = torch.ones(1, 4, dtype=torch.int64)
        made = model.eval().generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    everybody = from_first(made)
    assert torch.equal(made, everybody) and made.shape == (1, 8)


@on_ranks(1)
def test_a_llama_on_meta_gets_its_rotary_frequencies_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=128,
        )
        plain = LlamaForCausalLM(config)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
    zhooks.attach(model, policy={"units": {"min_numel": 1000}})
    wanted, found = dict(plain.named_buffers()), dict(model.named_buffers())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    assert bool(model(input_ids=tokens, labels=tokens).loss.isfinite())


def test_nothing_of_an_attachment_outlives_detach_and_its_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    attachment = zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 4))  # no backward follows
    flats = [weakref.ref(flat) for flat in flats_of(attachment)]
    attachment.detach()
    del attachment, optimizer, model
    gc.collect()
    assert [flat() for flat in flats] == [None] * len(flats)


@on_ranks(1, 2, more=({}, {"precision": {"loss_scale": 2.0}}, {"activation": {"tier": "host"}}))
def test_a_graph_that_a_module_keeps_of_its_last_forward_keeps_no_detached_model(more: dict[str, Any]) -> None:
    # Its weight is an attribute, the result of the last forward's division by the norm.
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **more})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    loss = model(torch.ones(2, 4)).sum()
    attachment.detach()
    with pytest.raises(zhooks.AttachError, match="expected backward before detach"):
        loss.backward()
    gone = [weakref.ref(each) for each in (model, attachment, runtime_of(attachment))]
    del attachment, optimizer, loss, model
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, fails: bool = False) -> tuple[Tensor, Tensor]:
        y = self.body(x).tanh()
        if fails:
            raise ValueError(str(self.one(y)))
        return self.one(y), self.other(y)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("ended", ["forward", "one head", "error", "penalty"])
def test_what_a_dropped_models_last_graph_holds_is_freed_before_the_next_attach_allocates(ended: str, tier: str) -> None:
    model = Heads()
    zhooks.attach(model, policy={"units": {"min_numel": 0}, "parameter": {"tier": tier}})
    one, other = model(torch.ones(2, 4))
    (one.sum() + (other.sum() if ended != "one head" else 0)).backward()
    if ended == "forward":
        one, other = model(torch.ones(2, 4))
    elif ended == "error":
        with pytest.raises(ValueError):
            model(torch.ones(2, 4), fails=True)
    elif ended == "penalty":
        sum(param.square().sum() for param in model.parameters())
    gone = weakref.ref(model)
    del one, other, model
    next_one = nn.Linear(2, 2)
    zhooks.attach(next_one)
    assert gone() is None
    out = next_one(torch.ones(1, 2))
    zhooks.attach(nn.Linear(2, 2))
    out.sum().backward()
    grad = next_one.weight.grad
    assert grad is not None and sharded(grad).full_tensor().eq(1).all(), "a graph in use is kept"


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("ended", ["backward", "step", "zero_grad"])
def test_nothing_of_an_attachment_outlives_a_model_that_is_dropped_without_detach(ended: str, tier: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    cells = {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **cells})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if ended != "backward":
            optimizer.step()
        if ended == "zero_grad":
            optimizer.zero_grad()
    flats = [weakref.ref(flat) for flat in flats_of(attachment)]
    kept = model[0].weight.detach()
    del attachment, optimizer, model
    gc.collect()
    # An alias of a parameter keeps its unit.
    assert kept.full_tensor().shape == (4, 4) and flats[0]() is not None
    del kept
    gc.collect()
    assert [flat() for flat in flats] == [None] * len(flats)


@on_ranks(2, stage=(1, 2, 3), transport=("shm", "p2p", "stock"))
def test_a_model_that_is_dropped_without_detach_goes_with_its_gradients_and_its_shared_memory(
    stage: int, transport: str
) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, "stage": stage, "comm": {"transport": transport}})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    gone = [weakref.ref(each) for each in (model, attachment, comm_of(attachment).shard, *model.parameters())]
    assert all(param.grad is not None for param in model.parameters())
    del attachment, optimizer, model
    collect_all()
    assert [one() for one in gone] == [None] * len(gone)


@on_ranks(2)
def test_what_is_kept_of_a_parameter_over_detach_says_that_it_parted() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    attachment = zhooks.attach(model)
    kept = model[0].weight.detach()
    attachment.detach()
    for use in (lambda: kept @ torch.ones(4, 1), lambda: kept[0], lambda: kept.T):
        with pytest.raises(zhooks.ShardedOpError, match="one that was detached"):
            use()


@on_ranks(1, 2)
def test_what_the_user_keeps_of_a_model_stays_whole() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})

    model(torch.ones(2, 4)).sum().backward()
    average = [param.detach().clone() for param in model.parameters()]
    grad: Any = model[0].weight.grad.clone()
    copied = copy.deepcopy(average)
    wanted = [value.full_tensor() for value in (*average, grad)]
    # Other layouts, whose flat buffers are not those of what was kept.
    for change in ("freeze", "apply"):
        if change == "freeze":
            model[0].bias.requires_grad_(False)
        else:
            attachment.apply({"units": {"min_numel": 0}, "schedule": {"prefetch": 2}})
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        gc.collect()
        for kept in (average, copied):
            assert all(torch.equal(value.full_tensor(), full) for value, full in zip((*kept, grad), wanted, strict=True))
            assert torch.nn.utils.get_total_norm(kept) > 0
    del attachment, model
    gc.collect()
    assert torch.equal(grad.full_tensor(), wanted[-1])


@on_ranks(2)
def test_gradients_of_a_copied_parameter_are_nobodys_business() -> None:
    model = nn.Linear(4, 4)
    attachment = zhooks.attach(model, policy={"comm": {"timeout_s": 60}})
    copied = [copy.deepcopy(param) for param in model.parameters()]
    with attachment.accumulate():
        model(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 0:
            for param in copied:
                param.grad = None
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 4.0))
    attachment.detach()


@on_ranks(1, 2)
def test_a_gradient_kept_over_detach_has_its_range_and_says_what_it_lacks() -> None:
    model = nn.Linear(4, 4)
    attachment = zhooks.attach(model)
    model(torch.ones(2, 4)).sum().backward()
    grad: Any = model.weight.grad
    whole, part = grad.full_tensor(), grad.to_local().clone()
    attachment.detach()
    assert torch.equal(grad.to_local(), part)
    if place()[1] == 1:
        assert torch.equal(grad.full_tensor(), whole)
        return
    for use in (grad.full_tensor, grad.norm().item, grad.sum):
        with pytest.raises(zhooks.ShardedOpError, match=r"tensor of .*. Expected an attached model, found"):
            use()


def test_a_full_state_is_agreed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    attachment = zhooks.attach(model, policy={"precision": {"loss_scale": "dynamic"}})
    state, shared, real = attachment.state_dict(), [], ControlPlane.on_first
    monkeypatch.setattr(ControlPlane, "on_first", lambda self, call: shared.append(call) or real(self, call))
    attachment.load_state_dict(state)
    assert len(shared) == 1
    attachment.detach()
