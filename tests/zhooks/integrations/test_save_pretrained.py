"""Attached models as folders of transformers and PEFT: equal to what their own ``save_pretrained`` writes of the plain model.

pytest runs it, on one rank and on several. Models are made from configurations: no weights are downloaded.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zhooks
from offload.events import Recorder, listen
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.paths import ROOT
from tests.support.tiers import policy

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**TINY, "num_key_value_heads": 1}
T5 = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
VIT = {"image_size": 8, "patch_size": 4, **{key: TINY[key] for key in TINY if key != "vocab_size"}}

#: A class, its configuration, how it is saved, and the Auto class that loads it.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "one file": ("LlamaForCausalLM", LLAMA, {}, "AutoModelForCausalLM"),
    "several files": ("LlamaForCausalLM", LLAMA, {"max_shard_size": "4KB"}, "AutoModelForCausalLM"),
    "tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"max_shard_size": 3000}, "AutoModelForCausalLM"),
    "tied three times": ("T5ForConditionalGeneration", T5, {}, "AutoModelForSeq2SeqLM"),
    "merged experts": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 2}, {}, "AutoModelForCausalLM"),
    "names that are converted": ("ViTForImageClassification", VIT, {}, "AutoModelForImageClassification"),
    "a body with a head": ("BertForMaskedLM", TINY, {"max_shard_size": "8KB"}, "AutoModelForMaskedLM"),
}
POLICY = {"stage": 3, "units": {"min_numel": 0}}


def made(kind: str, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**config)).to(dtype)
    model.config.dtype = dtype
    return model


def step(model: Any) -> None:
    """What is written is of the living model, not of the one that was attached."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.add_(0.01 * (number % 5))


def tensors(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {file.name: load_file(file) for file in sorted(path.glob("*.safetensors"))}


def check_same(found: Path, expected: Path) -> None:
    """The same files, tensors and JSON."""
    mine, theirs = tensors(found), tensors(expected)
    assert mine.keys() == theirs.keys()
    for name, held in theirs.items():
        assert mine[name].keys() == held.keys(), name
        for key, value in held.items():
            assert mine[name][key].dtype == value.dtype and torch.equal(mine[name][key], value), key
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}
    for path in expected.glob("*.json"):
        assert json.loads((found / path.name).read_text()) == json.loads(path.read_text()), path.name


def barrier() -> None:
    if place()[1] > 1:
        dist.barrier()


@on_ranks(2, limit_s=120.0, case=("one file", "tied three times", "names that are converted", "a body with a head"))
def test_the_folder_is_the_one_that_transformers_writes_of_the_plain_model(case: str) -> None:
    is_the_same(case)


@pytest.mark.slow
@on_ranks(1, limit_s=120.0, case=tuple(CASES))
def test_one_rank_writes_the_folder_of_the_plain_model(case: str) -> None:
    is_the_same(case)


@pytest.mark.slow
@on_ranks(2, limit_s=120.0, case=("several files", "tied", "merged experts"))
def test_rarer_folders_are_those_of_the_plain_model(case: str) -> None:
    is_the_same(case)


def is_the_same(case: str) -> None:
    kind, config, how, auto = CASES[case]
    with folder() as path:
        plain = made(kind, config)
        step(plain)
        if place()[0] == 0:
            plain.save_pretrained(path / "plain", **{"max_shard_size": "5GB", **how})
        ours = made(kind, config)
        attachment = zhooks.attach(ours, policy=POLICY)
        before = copy.deepcopy(ours.config.to_dict())
        step(ours)
        attachment.save_pretrained(path / "ours", **how)
        assert ours.config.to_dict() == before
        if place()[0] == 0:
            check_same(path / "ours", path / "plain")
            loaded = getattr(transformers, auto).from_pretrained(path / "ours")
            assert type(loaded) is type(plain)
            for name, value in plain.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], value), name
        barrier()
        again = zhooks.from_pretrained(type(plain), path / "ours", policy=POLICY).state_dict()
        for name, value in plain.state_dict().items() if place()[0] == 0 else ():
            assert torch.equal(again["model"][name], value), name


@on_ranks(2, limit_s=120.0)
def test_experts_that_fill_several_files_are_those_of_the_plain_model() -> None:
    with folder() as path:
        plain = made("MixtralForCausalLM", {**LLAMA, "num_local_experts": 2})
        attachment = zhooks.attach(made("MixtralForCausalLM", {**LLAMA, "num_local_experts": 2}), policy=POLICY)
        attachment.save_pretrained(path / "ours", max_shard_size="4KB")
        if place()[0] == 0:
            assert len(tensors(path / "ours")) > 2
            loaded = transformers.MixtralForCausalLM.from_pretrained(path / "ours").state_dict()
            assert all(torch.equal(loaded[name], value) for name, value in plain.state_dict().items())


@on_ranks(3, limit_s=120.0, how=((0, "device"), (2, "device"), (3, "disk")))
def test_it_is_the_same_at_every_stage_and_from_every_tier(how: tuple[int, str]) -> None:
    stage, tier = how
    with folder() as path:
        plain = made("LlamaForCausalLM", LLAMA)
        step(plain)
        if place()[0] == 0:
            plain.save_pretrained(path / "plain", max_shard_size="4KB")
        attachment = zhooks.attach(made("LlamaForCausalLM", LLAMA), policy=policy(tier, stage))
        with attachment.gathered(write=True) as whole, torch.no_grad():
            for number, value in enumerate(whole):
                value.add_(0.01 * (number % 5))
        attachment.save_pretrained(path / "ours", max_shard_size="4KB")
        if place()[0] == 0:
            check_same(path / "ours", path / "plain")
        barrier()
        attachment.detach()


@on_ranks(2, limit_s=120.0)
def test_parts_over_tp_are_joined() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with folder() as path:
        if place()[0] == 0:
            made("LlamaForCausalLM", LLAMA).save_pretrained(path / "plain", max_shard_size="4KB")
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
        model = made("LlamaForCausalLM", LLAMA)
        plan = {"*.up_proj": ColwiseParallel(), "*.gate_proj": ColwiseParallel(), "*.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer.mlp, mesh["tp"], {key.removeprefix("*."): how for key, how in plan.items()})
        zhooks.attach(model, mesh=mesh, policy=POLICY).save_pretrained(path / "ours", max_shard_size="4KB")
        if place()[0] == 0:
            check_same(path / "ours", path / "plain")


class Custom(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Whose code goes with it, once it is registered."""


@on_ranks(1, limit_s=120.0)
def test_the_code_of_a_model_that_is_registered_is_in_the_folder() -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Custom, "_auto_class", "AutoModelForCausalLM")
        torch.manual_seed(0)
        plain = Custom(transformers.LlamaConfig(**LLAMA))
        plain.save_pretrained(path / "plain")
        torch.manual_seed(0)
        attachment = zhooks.attach(Custom(transformers.LlamaConfig(**LLAMA)), policy=POLICY)
        attachment.save_pretrained(path / "ours")
        check_same(path / "ours", path / "plain")
        assert (path / "ours" / Path(__file__).name).is_file()
        assert not hasattr(attachment.model.config, "auto_map")


@on_ranks(2, limit_s=120.0)
def test_a_generation_config_that_transformers_refuses_is_refused_before_a_weight_is_gathered() -> None:
    with folder() as path:
        attachment = zhooks.attach(made("LlamaForCausalLM", LLAMA), policy=POLICY)
        # Sampling alone has a temperature.
        attachment.model.generation_config.temperature = 0.3
        seen = Recorder()
        stop = listen(seen)
        with pytest.raises(zhooks.CheckpointError, match="GenerationConfig is invalid"):
            attachment.save_pretrained(path / "ours")
        stop()
        barrier()
        assert not list(path.iterdir())
        assert not any(event.what == "gather" for event in seen.events)


@on_ranks(2, limit_s=120.0)
def test_a_dtype_is_what_the_plain_model_is_in_it_and_the_configuration_says_so() -> None:
    with folder() as path:
        plain = made("LlamaForCausalLM", LLAMA).to(torch.bfloat16)
        if place()[0] == 0:
            plain.save_pretrained(path / "plain")
        attachment = zhooks.attach(made("LlamaForCausalLM", LLAMA), policy=POLICY)
        attachment.save_pretrained(path / "ours", dtype="bf16")
        if place()[0] == 0:
            check_same(path / "ours", path / "plain")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(path / "ours")
            assert loaded.dtype is torch.bfloat16
        assert next(iter(attachment.model.parameters())).dtype is torch.float32


@on_ranks(2, limit_s=120.0)
def test_modules_that_transformers_keeps_in_fp32_stay_so() -> None:
    with folder() as path:
        attachment = zhooks.attach(made("T5ForConditionalGeneration", T5), policy=POLICY)
        attachment.save_pretrained(path / "ours", dtype=torch.float16)
        if place()[0] == 0:
            found = load_file(path / "ours" / "model.safetensors")
            wide = {name for name, value in found.items() if value.dtype is torch.float32}
            assert wide == {name for name in found if ".wo." in name} and wide
            loaded = transformers.T5ForConditionalGeneration.from_pretrained(path / "ours")
            for name, value in found.items():
                assert torch.equal(loaded.state_dict()[name], value), name


@on_ranks(2, limit_s=120.0)
def test_a_number_that_would_become_infinite_is_refused_on_every_rank_and_the_earlier_folder_stays() -> None:
    with folder() as path:
        model = made("LlamaForCausalLM", LLAMA)
        attachment = zhooks.attach(model, policy=POLICY)
        attachment.save_pretrained(path / "ours")
        with torch.no_grad():
            model.model.norm.weight.mul_(1e6)
        with pytest.raises(zhooks.CheckpointError, match=r"values of model\.norm\.weight that torch\.float16 can hold"):
            attachment.save_pretrained(path / "ours", dtype="fp16", max_shard_size="4KB")
        if place()[0] == 0:
            assert sorted(each.name for each in path.iterdir()) == ["ours"]
            assert load_file(path / "ours" / "model.safetensors")["model.norm.weight"].max() == 1


@on_ranks(2, limit_s=120.0)
def test_an_earlier_folder_is_replaced_and_what_the_user_put_there_moves_on() -> None:
    with folder() as path:
        attachment = zhooks.attach(made("LlamaForCausalLM", LLAMA), policy=POLICY)
        attachment.save_pretrained(path / "ours", max_shard_size="4KB")
        if place()[0] == 0:
            assert len(tensors(path / "ours")) > 2
            (path / "ours" / "notes.md").write_text("mine")
        barrier()
        attachment.save_pretrained(path / "ours")
        if place()[0] == 0:
            left = {each.name for each in (path / "ours").iterdir()}
            assert left == {"config.json", "generation_config.json", "model.safetensors", "notes.md"}
            assert [each.name for each in path.iterdir()] == ["ours"]


class Vocabulary:
    """As a tokenizer saves itself."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def save_pretrained(self, path: str) -> None:
        (Path(path) / "tokenizer.json").write_text("{}")
        if self.fails:
            raise ValueError("no vocabulary")


@on_ranks(2, limit_s=120.0)
def test_a_tokenizer_lies_beside_the_model_and_one_that_fails_leaves_nothing() -> None:
    with folder() as path:
        attachment = zhooks.attach(made("LlamaForCausalLM", LLAMA), policy=POLICY)
        with pytest.raises(zhooks.CheckpointError, match="no vocabulary"):
            attachment.save_pretrained(path / "ours", tokenizer=Vocabulary(fails=True))
        barrier()
        assert not list(path.iterdir())
        barrier()
        attachment.save_pretrained(path / "ours", tokenizer=Vocabulary() if place()[0] == 0 else None)
        assert (path / "ours" / "tokenizer.json").read_text() == "{}"


@on_ranks(2, limit_s=120.0)
def test_what_cannot_be_written_right_is_refused_on_every_rank() -> None:
    with folder() as path:
        model = made("LlamaForCausalLM", LLAMA)
        attachment = zhooks.attach(model, policy=POLICY)

        def refused(match: str, **given: Any) -> None:
            with pytest.raises(zhooks.CheckpointError, match=match):
                attachment.save_pretrained(given.pop("folder", path / "ours"), **given)
            barrier()

        refused("expected dtype", dtype="int8")
        refused("max_shard_size", max_shard_size="5 things")
        refused("at least a byte", max_shard_size=0)
        refused("expected a tokenizer", tokenizer=7)
        refused("expected one max_shard_size and dtype on all ranks", max_shard_size=[3000, 4000][place()[0]])
        if place()[0] == 0:
            (path / "files").mkdir()
            (path / "files" / "thesis.tex").write_text("")
            (path / "adapter").mkdir()
            (path / "adapter" / "config.json").write_text("{}")
            (path / "adapter" / "adapter_config.json").write_text("{}")
        barrier()
        refused(r"one without config\.json", folder=path / "files")
        refused(r"one with adapter_config\.json", folder=path / "adapter")
        other = zhooks.attach(torch.nn.Linear(4, 4))
        with pytest.raises(zhooks.CheckpointError, match=r"of transformers or PEFT, found Linear\. Use .*save_full"):
            other.save_pretrained(path / "ours")
        for asked in (model, copy.deepcopy(model)):
            for given in ({}, {"state_dict": model.state_dict()}):
                with pytest.raises(zhooks.ShardedOpError, match=r"attachment\.save_pretrained\(folder\)"):
                    asked.save_pretrained(path / "ours", **given)
        assert not (path / "ours").exists(), "what is there looks like a checkpoint"
        barrier()
        # Whole values are written as ever.
        whole = attachment.state_dict().get("model")
        if place()[0] == 0:
            model.save_pretrained(path / "given", state_dict=whole)
        with attachment.gathered():
            model.save_pretrained(path / "gathered", is_main_process=place()[0] == 0)
        detached: Any = attachment.detach()
        if place()[0] == 0:
            detached.save_pretrained(path / "plain")
            check_same(path / "given", path / "plain")
            check_same(path / "gathered", path / "plain")
        assert "save_pretrained" not in vars(model)


@on_ranks(2, limit_s=120.0, adapter=("lora", "prompt", "embeddings"))
def test_adapters_of_peft_are_written_as_peft_writes_them(adapter: str) -> None:
    peft = pytest.importorskip("peft")
    lora = {"r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    config = {
        "lora": lambda: peft.LoraConfig(target_modules=["q_proj"], **lora),
        "prompt": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "embeddings": lambda: peft.LoraConfig(target_modules=["embed_tokens"], modules_to_save=["lm_head"], **lora),
    }[adapter]

    def adapted() -> Any:
        model = made("LlamaForCausalLM", LLAMA)
        torch.manual_seed(1)
        return peft.get_peft_model(model, config())

    # PEFT asks transformers by names that go in its next version, and says what it adds.
    with folder() as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = adapted()
        if place()[0] == 0:
            plain.save_pretrained(path / "plain")
        attachment = zhooks.attach(adapted(), policy=POLICY)
        attachment.save_pretrained(path / "ours")
        attachment.save_pretrained(path / "ours", tokenizer=Vocabulary())
        if place()[0] == 0:
            (path / "ours" / "tokenizer.json").unlink()
            check_same(path / "ours", path / "plain")
            loaded = peft.PeftModel.from_pretrained(made("LlamaForCausalLM", LLAMA), path / "ours")
            for name, value in plain.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], value), name
        barrier()
        with pytest.raises(zhooks.CheckpointError, match="expected no dtype for adapters"):
            attachment.save_pretrained(path / "ours", dtype="bf16")


KILLED = """
import os, signal, sys, torch, transformers, zhooks
from offload.shards import Draft
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                  num_attention_heads=2, num_key_value_heads=1)
attachment = zhooks.attach(transformers.LlamaForCausalLM(config))
where = sys.argv[1]
attachment.save_pretrained(where)
with open(os.path.join(where, "notes.md"), "w") as file:
    file.write("mine")
if sys.argv[2] == "before":
    Draft.commit = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "after":
    # The first file of the earlier folder that is removed, once the new one is in its place.
    os.unlink = lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL)
attachment.save_pretrained(where, max_shard_size="4KB")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_export_leaves_one_folder_whole_and_the_next_tidies_what_is_left(tmp_path: Path, when: str) -> None:
    where = tmp_path / "ours"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def export(how: str) -> int:
        run = [sys.executable, "-c", KILLED, str(where), how]
        return subprocess.run(run, env=environment, timeout=300).returncode

    assert export(when) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    transformers.LlamaForCausalLM.from_pretrained(where)
    assert len(tensors(where)) == 1 if when == "before" else len(tensors(where)) > 2
    assert export("never") == 0
    assert [each.name for each in tmp_path.iterdir()] == ["ours"]
    assert (where / "notes.md").read_text() == "mine"
    assert not list(where.glob("saving-*"))
