"""The Trainer of transformers over an attached model: what it trains, evaluates, saves and resumes, held to its own.

pytest runs it, on one rank and on two. The oracle is ``transformers.Trainer`` in a world of one that accumulates what the
ranks see. Models are made from configurations: no weights are downloaded.
"""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.compiling import breaks, compiling, graphs
from tests.support.launched import launched
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.slow import slow

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def samples(count: int) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, 64, (8,), generator=made) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def arguments(where: Path, **chosen: Any) -> dict[str, Any]:
    usual = {
        "output_dir": str(where), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1,
        "learning_rate": 0.01, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "gradient_accumulation_steps": 2,
    }  # fmt: skip
    return usual | chosen


def plain(where: Path, world: int, **chosen: Any) -> Any:
    """``transformers.Trainer`` by itself, in this process alone, over the batches of all ranks."""
    trainer = transformers.Trainer(
        language_model(),
        transformers.TrainingArguments(**arguments(where, gradient_accumulation_steps=2 * world, **chosen)),
        train_dataset=samples(48),
        eval_dataset=samples(8),
    )
    trainer.train()
    return trainer


def ours(where: Path, policy: Any = None, model: nn.Module | None = None, **chosen: Any) -> Any:
    from zhooks.integrations.transformers import Trainer, TrainingArguments

    return Trainer(
        language_model() if model is None else model,
        TrainingArguments(**arguments(where, **chosen)),
        train_dataset=samples(48),
        eval_dataset=samples(8),
        zhooks=policy,
    )


def logged(trainer: Any, key: str) -> list[float]:
    return [float(line[key]) for line in trainer.state.log_history if key in line]


def values(model: nn.Module) -> list[Tensor]:
    """Whole parameters.  Collective."""
    return [p.full_tensor() if isinstance(p, zhooks.ShardedTensor) else p.detach().clone() for p in model.parameters()]


@on_ranks(1, 2, limit_s=180.0, stage=(*slow(1), 3))
def test_a_trainer_trains_evaluates_and_saves_what_it_does_by_itself(stage: int) -> None:
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "max_grad_norm": 0.5}
    with folder() as path:
        with launched() as (rank, world):
            trainer = ours(path / "ours", {"stage": stage}, **steps, **best)
            trainer.train()
            trainer.save_model(str(path / "final"))
            trainer.accelerator.wait_for_everyone()
            found = values(trainer.model)
        expected = plain(path / f"plain{rank}", world, **steps, **best)
        for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
            assert logged(trainer, key) == pytest.approx(logged(expected, key), rel=1e-4)
        for value, other in zip(found, values(expected.model), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
        loaded = transformers.LlamaForCausalLM.from_pretrained(path / "final")
        assert all(torch.equal(value, other) for value, other in zip(values(loaded), found, strict=True))


@pytest.mark.slow
@on_ranks(2, limit_s=180.0)
@compiling()
def test_a_trainer_compiles_what_it_trains_and_saves_it_under_the_usual_names() -> None:
    with folder() as path:
        with launched() as (rank, world):
            trainer = ours(path / "ours", {"units": {"min_numel": 0}}, torch_compile=True, torch_compile_backend="aot_eager")
            trainer.train()
            assert graphs() > 0
            assert breaks() == []
            trainer.save_model(str(path / "final"))
            trainer.accelerator.wait_for_everyone()
            found = values(trainer.model)
        expected = plain(path / f"plain{rank}", world)
        assert logged(trainer, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-4)
        loaded = transformers.LlamaForCausalLM.from_pretrained(path / "final")
        assert all(torch.equal(value, other) for value, other in zip(values(loaded), found, strict=True))


@on_ranks(1, 2, limit_s=180.0)
def test_a_run_resumes_from_its_own_checkpoint_as_if_it_had_gone_on() -> None:
    with launched(), folder() as path:
        through = ours(path, save_strategy="steps", save_steps=2)
        through.train()
        expected = values(through.model)
        again = ours(path, save_strategy="steps", save_steps=2)
        again.train(resume_from_checkpoint=str(path / "checkpoint-2"))
        assert again.state.global_step == 4
        assert all(torch.equal(value, other) for value, other in zip(values(again.model), expected, strict=True))


class Signalled(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """One rank is told to end during a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and place()[0] == 0:
            signal.raise_signal(signal.SIGTERM)


@on_ranks(1, 2, limit_s=180.0)
def test_a_signal_on_one_rank_ends_training_on_all_in_a_checkpoint_that_goes_on() -> None:
    with launched(), folder() as path:
        through = ours(path / "through")
        through.train()
        expected = values(through.model)
        told = ours(path / "told", enable_jit_checkpoint=True)
        told.add_callback(Signalled(1))
        told.train()
        assert told.state.global_step == 2
        told.attachment.detach()
        again = ours(path / "told")
        again.train(resume_from_checkpoint=str(path / "told" / "checkpoint-2"))
        assert all(torch.equal(value, other) for value, other in zip(values(again.model), expected, strict=True))
        with pytest.raises(zhooks.PolicyError, match='found "best" with enable_jit_checkpoint'):
            best: dict[str, Any] = {"metric_for_best_model": "loss", "eval_strategy": "steps"}
            ours(path, enable_jit_checkpoint=True, save_strategy="best", **best)


@on_ranks(2, limit_s=180.0)
def test_a_checkpoint_of_a_plain_run_is_resumed_and_a_plain_run_does_not_take_ours_for_its_own() -> None:
    with folder() as path:
        with launched() as (rank, world):
            pass
        expected = plain(path / f"plain{rank}", world, save_strategy="steps", save_steps=2)
        dist.barrier()
        with launched():
            trainer = ours(path / "ours", save_strategy="steps", save_steps=2)
            trainer.train(resume_from_checkpoint=str(path / "plain0" / "checkpoint-2"))
            for value, other in zip(values(trainer.model), values(expected.model), strict=True):
                torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
        alone = transformers.Trainer(
            language_model(), transformers.TrainingArguments(**arguments(path / "other")), train_dataset=samples(48)
        )
        with pytest.raises(KeyError, match="param_groups"):
            alone.train(resume_from_checkpoint=str(path / "ours" / "checkpoint-4"))


@on_ranks(1, 2, limit_s=180.0)
def test_a_model_is_evaluated_before_it_is_trained() -> None:
    with launched(), folder() as path:
        trainer = ours(path)
        first = trainer.evaluate()["eval_loss"]
        assert trainer.attachment is not None
        trainer.train()
        assert trainer.evaluate()["eval_loss"] != first
        trainer.train()
        assert len(trainer.accelerator.attachments) == 1


DEEPSPEED = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
}


@on_ranks(1, 2, limit_s=180.0)
def test_a_deepspeed_configuration_is_read_as_the_trainer_would_have_filled_it_in() -> None:
    with folder() as path:
        with launched() as (rank, world):
            written = path / f"ds{rank}.json"
            written.write_text(json.dumps(DEEPSPEED))
            trainer = ours(path, deepspeed=str(written), bf16=True)
            policy = trainer.accelerator.policy
            assert (policy.stage, policy.precision.param, policy.optimizer.tier) == (2, "bf16", "host")
            trainer.train()
        expected = plain(path / f"plain{rank}", world, bf16=True)
        assert logged(trainer, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-2)


@pytest.mark.parametrize(
    ("written", "both"),
    [
        ({"gradient_accumulation_steps": 8}, r"gradient_accumulation_steps: .*found 8, but gradient_accumulation_steps = 2"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping: .*found 0.5, but max_grad_norm = 1"),
        ({"bf16": {"enabled": True}}, r"\[bf16\] enabled: .*found true, but bf16 = false"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, r"params\.lr: .*found 1.*, but learning_rate = 0\.01"),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, r"adam_w_mode: .*found false, but optim = true"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 500}}}, r"found 500, but warmup_steps = 0"),
        ({"optimizer": {"type": "Lion", "params": {}}}, r'\[optimizer\] type: .*found "Lion", but optim = '),
    ],
)
def test_an_argument_that_contradicts_the_configuration_is_refused_and_both_are_named(
    tmp_path: Path, written: dict[str, Any], both: str
) -> None:
    with launched(), pytest.raises(zhooks.PolicyError, match=both):
        ours(tmp_path, {"zero_optimization": {"stage": 2}, **written})


@on_ranks(1)
def test_each_training_of_a_model_that_is_made_anew_keeps_one_attachment() -> None:
    from zhooks.integrations.transformers import Trainer, TrainingArguments

    with launched(), folder() as path:
        chosen = TrainingArguments(**arguments(path))
        trainer = Trainer(model_init=language_model, args=chosen, train_dataset=samples(48), zhooks={"stage": 1})
        for _ in range(3):
            trainer.train()
            assert [each.model for each in trainer.accelerator.attachments] == [trainer.model]


@on_ranks(1, 2, limit_s=180.0)
def test_pretrained_weights_that_were_attached_unit_by_unit_are_trained() -> None:
    from zhooks.integrations.pretrained import from_pretrained

    with folder() as path:
        if place()[0] == 0:
            language_model().save_pretrained(path / "model")
        if place()[1] > 1:
            dist.barrier()
        with launched() as (rank, world):
            attachment = from_pretrained(transformers.LlamaForCausalLM, path / "model")
            trainer = ours(path / "ours", attachment, attachment.model)
            trainer.train()
            assert trainer.attachment is attachment
            found = values(trainer.model)
        for value, other in zip(found, values(plain(path / f"plain{rank}", world).model), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


def test_arguments_that_are_written_out_and_read_again_keep_the_policy(tmp_path: Path) -> None:
    from zhooks.integrations.transformers import Seq2SeqTrainingArguments, TrainingArguments

    with launched():
        for kind in (TrainingArguments, Seq2SeqTrainingArguments):
            once = kind(**arguments(tmp_path, deepspeed="ds.json"))
            written = {key: once.to_dict()[key] for key in ("output_dir", "zhooks", "deepspeed")}
            again = kind(**written)
            assert again.zhooks == once.zhooks == "ds.json" and again.deepspeed is None


def test_what_would_train_otherwise_or_leave_ranks_waiting_is_refused(tmp_path: Path) -> None:
    with launched(), pytest.raises(zhooks.PolicyError, match="save_on_each_node = True"):
        ours(tmp_path, save_on_each_node=True)
    with launched(), pytest.raises(zhooks.PolicyError, match="bf16_full_eval = True"):
        ours(tmp_path, bf16_full_eval=True)
    with launched(), pytest.raises(zhooks.CapabilityError, match="auto_find_batch_size = True"):
        ours(tmp_path, auto_find_batch_size=True)


@on_ranks(2, limit_s=180.0)
def test_an_adapter_is_trained_and_saved_alone() -> None:
    peft = pytest.importorskip("peft")
    with launched(), folder() as path, warnings.catch_warnings():
        # transformers asks PEFT's model for a name that transformers has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        chosen = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        base = language_model()
        trainer = ours(path, model=peft.get_peft_model(base, chosen))
        trainer.train()
        trainer.save_model(str(path / "adapter"))
        trainer.accelerator.wait_for_everyone()
        names = sorted(file.name for file in (path / "adapter").iterdir())
        assert "adapter_model.safetensors" in names and "model.safetensors" not in names
        trained = dict(zip(dict(trainer.model.named_parameters()), values(trainer.model), strict=True))
        loaded = peft.PeftModel.from_pretrained(language_model(), path / "adapter")
        for name, param in loaded.named_parameters():
            assert torch.equal(param, trained[name]), name
        assert any(value.any() for name, value in trained.items() if "lora_B" in name)


@on_ranks(1, 2, limit_s=180.0)
def test_ranks_that_generate_texts_of_other_lengths_wait_for_each_other() -> None:
    from zhooks.integrations.transformers import Seq2SeqTrainer

    with launched() as (rank, _), folder() as path:
        torch.manual_seed(0)
        size = {"vocab_size": 16, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
        config = transformers.T5Config(decoder_start_token_id=0, **size)
        made = torch.Generator().manual_seed(1)
        tokens = [torch.randint(2, 16, (6,), generator=made) for _ in range(16)]
        chosen = transformers.Seq2SeqTrainingArguments(
            **arguments(path, gradient_accumulation_steps=1), predict_with_generate=True, generation_max_length=9
        )
        trainer: Any = Seq2SeqTrainer(
            transformers.T5ForConditionalGeneration(config),
            chosen,
            train_dataset=[{"input_ids": each, "labels": each} for each in tokens],
        )
        trainer.train()
        model = trainer.model.eval()
        with trainer.attachment.gathered() as full:
            alone = transformers.T5ForConditionalGeneration(config)
            for param, value in zip(alone.parameters(), full, strict=True):
                param.data.copy_(value)
        alone.tie_weights()
        assert len(trainer.predict(trainer.train_dataset).predictions) == 16
        mine = torch.stack(tokens[:3]) if rank == 0 else torch.stack(tokens[3:4])
        limit = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
        assert torch.equal(model.generate(mine, **limit), alone.eval().generate(mine, **limit))


@on_ranks(2, limit_s=180.0)
def test_ranks_that_drop_other_layers_train_where_transformers_can_synchronise_them() -> None:
    from zhooks.integrations.accelerate import Accelerator

    with launched() as (rank, _):
        torch.manual_seed(0)
        config = transformers.Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, layerdrop=0.5, conv_dim=(8, 8),
            conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0, vocab_size=8,
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, zhooks={"stage": 3, "units": {"min_numel": 0}})
        model = transformers.Wav2Vec2ForCTC(config)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        kept: list[int] = []
        for number, layer in enumerate(model.wav2vec2.encoder.layers):
            layer.register_forward_hook(lambda *_, number=number: kept.append(number))
        before = values(model)
        torch.manual_seed(rank)
        for _ in range(4):
            loss = model(torch.randn(2, 800), labels=torch.randint(1, 8, (2, 3))).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (kept, values(model)))
        assert found[0][0] == found[1][0] == [0, 1, 2] * 4, "every layer is computed, the dropped ones for nothing"
        assert all(map(torch.equal, found[0][1], found[1][1])) and not all(map(torch.equal, before, found[0][1]))
