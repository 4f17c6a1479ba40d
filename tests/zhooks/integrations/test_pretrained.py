"""Folders of transformers as attached models: equal to what transformers' own loader makes of them.

pytest runs it, on one rank and on two. Models are made from configurations: no weights are downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.paths import ROOT

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
VIT = {"image_size": 8, "patch_size": 4, **{key: TINY[key] for key in TINY if key != "vocab_size"}}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
MIXTRAL = {**TINY, "num_key_value_heads": 1, "num_local_experts": 2}

#: What is saved, its configuration, what is loaded, how it is saved, and what of the configuration is changed then.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1, "tie_word_embeddings": True}, "", {}, {}),
    "several files": ("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1}, "", {"max_shard_size": "4KB"}, {}),
    "another dtype": ("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1}, "", {}, {"dtype": torch.bfloat16}),
    "an Auto class": ("GPT2LMHeadModel", GPT2, "AutoModelForCausalLM", {}, {}),
    "tied three times": ("T5ForConditionalGeneration", T5, "", {}, {}),
    "experts that are merged": ("MixtralForCausalLM", MIXTRAL, "", {}, {}),
    "names that are converted": ("ViTForImageClassification", VIT, "", {}, {}),
    "the body of a model with a head": ("BertForMaskedLM", TINY, "BertForMaskedLM", {}, {}),
}


def saved(kind: str, config: dict[str, Any], where: Path, how: dict[str, Any]) -> Any:
    """A model of this class, written to ``where`` by rank 0."""
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**config))
    if place()[0] == 0:
        model.save_pretrained(where, **how)
    if place()[1] > 1:
        dist.barrier()
    return cls


@on_ranks(1, 2, limit_s=120.0, case=tuple(CASES))
def test_a_folder_is_loaded_as_transformers_loads_it(case: str) -> None:
    kind, config, load, how, changes = CASES[case]
    with folder() as path:
        cls = saved(kind, config, path / "model", how)
        cls = getattr(transformers, load or kind)
        attachment = zhooks.from_pretrained(cls, path / "model", policy={"stage": 3, "units": {"min_numel": 0}}, **changes)
        found, expected = attachment.state_dict(), cls.from_pretrained(path / "model", **changes)
        if place()[0] == 0:
            assert found["model"].keys() >= expected.state_dict().keys()
            for name, value in expected.state_dict().items():
                assert found["model"][name].dtype == value.dtype and torch.equal(found["model"][name], value), name
        for (name, buffer), other in zip(attachment.model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), name


@on_ranks(1, 2, limit_s=120.0)
def test_tensors_that_are_read_in_many_runs_of_rows_are_the_same() -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        cls = saved("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1}, path / "model", {"max_shard_size": "4KB"})
        from zhooks.integrations import pretrained

        patch.setattr(pretrained, "_RUN_NBYTES", 100)
        found = zhooks.from_pretrained(cls, path / "model", dtype=torch.bfloat16).state_dict()
        expected = cls.from_pretrained(path / "model", dtype=torch.bfloat16).state_dict()
        for name, value in expected.items() if place()[0] == 0 else ():
            assert torch.equal(found["model"][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_no_rank_takes_more_memory_than_its_shards_and_one_unit_and_a_run_of_a_file(tmp_path: Path, world: int) -> None:
    program = str(ROOT / "tests" / "support" / "loaded_folder.py")
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools"), environment.get("PYTHONPATH", "")])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    for command in ([program], [*torchrun, program]):
        arguments = [sys.executable, *command, str(tmp_path)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    for rank in range(world):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["files"] > 3 and found["kept"] > 3 * found["unit"]
        # The rings of the transport, pages of code used for the first time, and what malloc rounds up.
        assert found["grown"] < found["kept"] + found["unit"] + (24 << 20), found


@pytest.mark.slow
def test_importing_zhooks_imports_no_library_and_a_missing_one_is_named_with_what_installs_it() -> None:
    program = (
        "import sys, importlib.metadata as metadata, zhooks\n"
        "assert not {'transformers', 'accelerate', 'lightning'} & {*sys.modules}\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "try: zhooks.from_pretrained(object, '.')\n"
        "except zhooks.CapabilityError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "pip install 'zhooks[transformers]'" in done.stdout, done.stderr


@on_ranks(2, limit_s=120.0)
def test_a_head_that_the_folder_has_not_is_initialised_and_said_so_and_trains() -> None:
    with folder() as path:
        saved("BertModel", TINY, path / "model", {})
        load = {"cls": transformers.BertForSequenceClassification, "folder": path / "model"}
        if place()[0] == 0:
            with pytest.warns(UserWarning, match="classifier.weight, classifier.bias"):
                attachment = zhooks.from_pretrained(**load)
        else:
            attachment = zhooks.from_pretrained(**load)
        model = attachment.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 4, dtype=torch.long), labels=torch.tensor([0, 1])).loss
        loss.backward()
        optimizer.step()


@on_ranks(2, limit_s=120.0)
def test_a_folder_of_another_model_or_none_is_refused_on_every_rank() -> None:
    cls = transformers.LlamaForCausalLM
    with folder() as path:
        with pytest.raises(zhooks.CheckpointError, match=r"expected a folder with config\.json"):
            zhooks.from_pretrained(cls, path / "none")
        saved("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1}, path / "model", {})
        with pytest.raises(zhooks.CheckpointError, match="expected a class of transformers, found model"):
            zhooks.from_pretrained("model", path / "model")
        saved("BertModel", TINY, path / "other", {})
        if place()[0] == 0:
            shutil.copy(path / "other" / "model.safetensors", path / "model" / "model.safetensors")
        dist.barrier()
        with pytest.raises(zhooks.CheckpointError, match=r"expected the tensors of LlamaForCausalLM .* found "):
            zhooks.from_pretrained(cls, path / "model")


@on_ranks(1, 2, limit_s=120.0)
def test_a_tensor_of_another_shape_or_a_damaged_file_is_refused_and_leaves_nothing_behind() -> None:
    cls = transformers.LlamaForCausalLM
    with folder() as path:
        saved("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1}, path / "model", {})
        with pytest.raises(zhooks.CheckpointError if place()[0] == 0 else zhooks.ZhooksError, match="of shape"):
            zhooks.from_pretrained(cls, path / "model", vocab_size=48)
        if place()[0] == 0:
            (path / "model" / "model.safetensors").write_bytes(b"\x00" * 100)
        if place()[1] > 1:
            dist.barrier()
        with pytest.raises(zhooks.CheckpointError, match=r"model\.safetensors"):
            zhooks.from_pretrained(cls, path / "model")


@pytest.mark.parametrize(
    ("kind", "config", "changes", "refusal"),
    [
        ("LlamaForCausalLM", TINY, {"hidden_sise": 3}, "expected keyword arguments of the configuration, found hidden_sise"),
        ("LlamaForCausalLM", TINY, {"tie_word_embeddings": True}, "to be one tensor, as the configuration ties them"),
        ("T5ForConditionalGeneration", T5, {"dtype": torch.float16}, "keeps in fp32"),
    ],
)
def test_what_would_be_other_weights_than_those_of_transformers_is_refused(
    tmp_path: Path, kind: str, config: dict[str, Any], changes: dict[str, Any], refusal: str
) -> None:
    cls = saved(kind, config, tmp_path, {})
    with pytest.raises(zhooks.ZhooksError, match=refusal):
        zhooks.from_pretrained(cls, tmp_path, **changes)


def test_weights_that_are_quantised_in_the_file_alone_are_refused(tmp_path: Path) -> None:
    cls = saved("LlamaForCausalLM", TINY, tmp_path, {})
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(zhooks.CapabilityError, match=r"lm_head\.weight .* found torch\.int8"):
        zhooks.from_pretrained(cls, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(zhooks.CapabilityError, match="found a quantization_config"):
        zhooks.from_pretrained(cls, tmp_path)


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    saved("LlamaForCausalLM", {**TINY, "num_key_value_heads": 1}, tmp_path, {})
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(zhooks.CheckpointError, match="names files elsewhere"):
        zhooks.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
