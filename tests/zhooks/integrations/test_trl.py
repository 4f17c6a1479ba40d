"""TRL's trainers over attached models: fine-tuning, preferences with a reference, and training on what the model generates.

pytest runs it on one rank and on two. The oracle is TRL in a world of one that accumulates what the ranks see; where a model
generates, whose random numbers are each rank's own, TRL under DistributedDataParallel. No model or data is downloaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from tests.support.launched import launched
from tests.support.on_ranks import folder, on_ranks
from tests.support.slow import slow
from tests.support.values import copies

for library in ("accelerate", "datasets", "peft", "trl"):
    pytest.importorskip(library)
transformers = pytest.importorskip("transformers")

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "log", "big", "red", "small", "and", "then", "it", "was", "is")
POLICY = {"stage": 3, "units": {"min_numel": 0}}


@contextmanager
def session() -> Iterator[tuple[int, int, Any, Any]]:
    """This rank, the ranks, TRL's module and ours; their warnings about their own future are not ours to fail by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl

        from zhooks.integrations import trl as attached

        with launched() as (rank, world):
            # TRL reports its use to its makers elsewhere.
            os.environ["CI"] = "1"
            yield rank, world, trl, attached


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, **changes,
    )  # fmt: skip
    kind: Any = transformers.LlamaForSequenceClassification if "num_labels" in changes else transformers.LlamaForCausalLM
    made: nn.Module = kind(config)
    return made


def rows(columns: dict[str, int]) -> Any:
    """Texts of so many words, a column each."""
    from datasets import Dataset

    made = torch.Generator().manual_seed(1)

    def text(words: int) -> str:
        return " " + " ".join(WORDS[int(at)] for at in torch.randint(len(WORDS), (words,), generator=made))

    return Dataset.from_list([{key: text(words) for key, words in columns.items()} for _ in range(48)])


def on_disk(data: Any, where: Path) -> Any:
    """The same data in one folder of all ranks: TRL caches beside them, and of those in memory in a folder of each process."""
    from datasets import load_from_disk

    where.mkdir(exist_ok=True)
    data.save_to_disk(where / f"data{os.getpid()}")
    with suppress(OSError):  # another rank was first
        (where / f"data{os.getpid()}").rename(where / "data")
    return load_from_disk(str(where / "data"))


def arguments(where: Path, **chosen: Any) -> dict[str, Any]:
    usual = {
        "output_dir": str(where), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1,
        "learning_rate": 0.01, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "gradient_accumulation_steps": 2,
        "bf16": False,
    }  # fmt: skip
    return usual | chosen


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def made(library: Any, what: str, where: Path, zhooks: dict[str, Any] | None, **chosen: Any) -> Any:
    """A trainer of ``library``, TRL's module or ours."""
    adapter = chosen.pop("adapter", False)
    keys: dict[str, Any] = {} if zhooks is None else {"zhooks": zhooks}
    keys |= {"peft_config": lora()} if adapter else {}
    trainer, config = getattr(library, f"{what}Trainer"), getattr(library, f"{what}Config")
    if what == "GRPO":
        chosen |= {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 1}
        keys |= {"reward_funcs": reward}
    if what == "DPO" and not (adapter or "precompute_ref_log_probs" in chosen):
        keys["ref_model"] = model(1)
    columns = {
        "SFT": {"text": 8},
        "DPO": {"prompt": 4, "chosen": 4, "rejected": 4},
        "GRPO": {"prompt": 4},
        "KTO": {"prompt": 4, "completion": 4},
        "Reward": {"chosen": 6, "rejected": 6},
    }
    data = rows(columns[what])
    if what == "KTO":
        data = data.add_column("label", [bool(at % 2) for at in range(len(data))])
    if "precompute_ref_log_probs" in chosen:
        data = on_disk(data, where)
    start = chosen.pop("model", None) or (model(num_labels=1) if what == "Reward" else model())
    return trainer(
        model=start, args=config(**arguments(where, **chosen)), train_dataset=data, processing_class=tokenizer(), **keys
    )


def logged(trainer: Any, key: str) -> list[float]:
    return [float(line[key]) for line in trainer.state.log_history if key in line]


def values(net: nn.Module) -> dict[str, Tensor]:
    """Whole parameters.  Collective."""
    return dict(zip(dict(net.named_parameters()), copies(net.parameters()), strict=True))


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SFT", {}),
    ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    ("DPO", {"adapter": True}),
)
MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SFT", {"adapter": True, "packing": True, "max_length": 16}),
    ("DPO", {"precompute_ref_log_probs": True}),
    ("KTO", {"adapter": True}),
    ("Reward", {}),
)


def train_beside_plain(what: str, chosen: dict[str, Any], policy: dict[str, Any]) -> None:
    with folder() as path:
        with session() as (rank, world, _, attached):
            trainer = made(attached, what, path / "ours", policy, **chosen)
            trainer.train()
            assert trainer.attachment is not None
            found = values(trainer.model)
            # A reference model is sharded as well.
            assert len(trainer.accelerator.attachments) == 1 + (getattr(trainer, "ref_model", None) is not None)
            trainer.save_model(str(path / "saved"))
            trainer.accelerator.wait_for_everyone()
        with session() as (_, _, trl, _):
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = made(trl, what, path / f"plain{rank}", None, **chosen, gradient_accumulation_steps=2 * world)
            plain.train()
        for key in ("loss", "grad_norm", "rewards/margins"):
            assert logged(trainer, key) == pytest.approx(logged(plain, key), rel=1e-3, abs=1e-5)
        for name, value in values(plain.model).items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
        adapter = "adapter_model.safetensors" in {file.name for file in (path / "saved").iterdir()}
        assert adapter == ("adapter" in chosen)


@on_ranks(*slow(1), 2, limit_s=300.0, case=(CASES[0], *slow(*CASES[1:])))
def test_trl_trains_what_it_trains_by_itself(case: tuple[str, dict[str, Any]]) -> None:
    train_beside_plain(*case, POLICY)


@pytest.mark.slow
@on_ranks(1, 2, limit_s=300.0, case=MORE)
def test_other_trainers_of_trl_train_what_they_train_by_themselves(case: tuple[str, dict[str, Any]]) -> None:
    train_beside_plain(*case, POLICY)


@pytest.mark.slow
@on_ranks(2, limit_s=300.0, case=CASES)
def test_trl_trains_the_same_over_tiers(case: tuple[str, dict[str, Any]]) -> None:
    train_beside_plain(*case, {"stage": 3, "parameter": {"tier": "host"}, "optimizer": {"tier": "host"}})


def gathers_of_a_run(where: Path, **chosen: Any) -> tuple[int, list[float]]:
    """How often units were gathered in three steps, and the rewards."""
    recorder = Recorder()

    class Observe(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer.attachment.observe(recorder)

    with session() as (_, _, _, attached):
        trainer = made(attached, "GRPO", where, POLICY, **chosen)
        trainer.add_callback(Observe())
        trainer.train()
    return sum((event.kind, event.what) == ("end", "gather") for event in recorder.events), logged(trainer, "reward")


@pytest.mark.slow
@on_ranks(2, limit_s=300.0)
def test_what_generates_may_gather_the_model_once_for_all_tokens() -> None:
    with folder() as path:
        apart, rewards = gathers_of_a_run(path / "apart")
        once, same = gathers_of_a_run(path / "once", generate_resident=True)
        assert same == rewards
        assert once < apart / 2


@on_ranks(1, 2, limit_s=300.0)
def test_a_model_trains_on_what_it_generates_as_under_ddp() -> None:
    with folder() as path:
        with session() as (_, world, trl, attached):
            start = path / "start"
            # Only rank 0 writes.
            model().save_pretrained(start)
            if world > 1:
                dist.barrier()
            # With beta TRL loads a reference model from the folder.
            trainer = made(attached, "GRPO", path / "ours", POLICY, model=str(start), beta=0.1)
            trainer.train()
            found = values(trainer.model)
            assert len(trainer.accelerator.attachments) == 2
        with session():
            plain = made(trl, "GRPO", path / "plain", None, model=str(start), beta=0.1)
            plain.train()
        for key in ("loss", "grad_norm", "reward", "kl", "completions/mean_length"):
            assert logged(trainer, key) == pytest.approx(logged(plain, key), rel=1e-3, abs=1e-5)
        for name, value in values(plain.model).items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@on_ranks(2, limit_s=300.0)
def test_fine_tuning_resumes_from_its_checkpoint_as_if_it_had_gone_on() -> None:
    with session() as (_, _, _, attached), folder() as path:
        steps = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        through = made(attached, "SFT", path, POLICY, **steps)
        through.train()
        expected = values(through.model)
        again = made(attached, "SFT", path, POLICY, **steps)
        again.train(resume_from_checkpoint=str(path / "checkpoint-2"))
        assert again.state.global_step == 4
        assert all(torch.equal(value, expected[name]) for name, value in values(again.model).items())
        dist.barrier()


def test_what_generates_past_the_attachment_is_refused_by_its_name(tmp_path: Path) -> None:
    with session() as (_, _, _, attached):
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            with pytest.raises(zhooks.CapabilityError, match=f"GRPOTrainer.*found {name} = True"):
                made(attached, "GRPO", tmp_path, POLICY, **{name: True})


def test_configurations_have_trls_defaults_and_read_a_deepspeed_file_as_a_policy(tmp_path: Path) -> None:
    with session() as (_, _, trl, attached):
        for name in attached.__all__:
            if not name.endswith("Config"):
                continue
            ours, theirs = ({each.name: each for each in fields(getattr(of, name))} for of in (attached, trl))
            generates = name in ("GRPOConfig", "RLOOConfig")
            assert ours.keys() - theirs.keys() == {"zhooks", *(["generate_resident"] if generates else [])}
            assert all(ours[key].default == theirs[key].default for key in theirs), name
        chosen = attached.SFTConfig(**arguments(tmp_path, deepspeed="ds.json"))
        assert chosen.zhooks == "ds.json" and chosen.deepspeed is None
