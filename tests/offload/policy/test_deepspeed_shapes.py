"""Configurations as the pages and examples of DeepSpeed, transformers and accelerate have them, read as policies."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from offload.policy import IgnoredKeys, Policy
from offload.policy.deepspeed_keys import HONOURED
from tests.support.policy_texts import read

CPU = {"device": "cpu", "pin_memory": True}
#: What it means; all others are our defaults.
DYNAMIC = {"loss_scale": "dynamic", "growth_interval": 1000, "hysteresis": 2}
SCALED = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
AUTO = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
#: The shapes of the pages and examples of DeepSpeed, transformers and accelerate: same keys, usual values.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "transformers, stage 2 offloaded": (
        {
            "fp16": {"enabled": "auto", **SCALED},
            **AUTO,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": CPU,
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": "auto",
                "contiguous_gradients": True,
                "round_robin_gradients": True,
            },
        },
        {
            "stage": 2,
            "gradient": {"tier": "host"},
            "optimizer": {"tier": "host"},
            "units": {"max_numel": 200_000_000},
        },
    ),
    "transformers, stage 3 offloaded": (
        {
            "bf16": {"enabled": True},
            **AUTO,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        {
            "stage": 3,
            "parameter": {"tier": "host"},
            "gradient": {"tier": "host"},
            "optimizer": {"tier": "host", "compute": "host"},
            "precision": {"param": "bf16"},
        },
    ),
    "transformers, ZeRO-Infinity with aio in the wrong table": (
        {
            "fp16": {"enabled": "auto", **SCALED},
            **AUTO,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4},
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e8, "max_in_cpu": 1e9},
                "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": 2000,
        },
        {
            "stage": 3,
            "parameter": {"tier": "disk"},
            "gradient": {"tier": "disk"},
            "optimizer": {"tier": "disk", "compute": "host"},
            "disk": {"path": "/local_nvme", "block": "1 MiB", "threads": 8},
        },
    ),
    "accelerate, everything left to the launcher": (
        {
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": "auto",
                "stage3_gather_16bit_weights_on_model_save": "auto",
                "offload_optimizer": {"device": "auto"},
                "offload_param": {"device": "auto"},
            },
            "gradient_clipping": "auto",
        },
        {},
    ),
    "accelerate, ZeRO++": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
        },
        {"stage": 3, "precision": {"param": "bf16"}},
    ),
    "DeepSpeed, Megatron's stage 2 with the old offload": (
        {
            "train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 1,
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 7000000,
                "allgather_bucket_size": 7000000,
                "cpu_offload": True,
            },
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, **SCALED},
            "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
        },
        {
            "stage": 2,
            "gradient": {"tier": "host"},
            "optimizer": {"tier": "host", "compute": "host"},
            "precision": {"param": "fp16", **DYNAMIC},
            "units": {"max_numel": 7_000_000},
        },
    ),
    "DeepSpeed, BERT before ZeRO": (
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 32,
            "prescale_gradients": False,
            "optimizer": {"type": "Lamb", "params": {"lr": 11e-3}},
            "fp16": {"enabled": True, "loss_scale": 0},
            "sparse_attention": {"mode": "fixed", "block": 16},
            "wall_clock_breakdown": False,
        },
        {"stage": 0, "precision": {"param": "fp16", **DYNAMIC}},
    ),
}


@pytest.mark.parametrize(("values", "means"), SHAPES.values(), ids=SHAPES.keys())
def test_configurations_as_people_write_them_are_read(
    values: dict[str, Any], means: dict[str, Any], tmp_path: Path
) -> None:
    policy, ignored = read(values)
    assert policy == Policy.of(means)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredKeys)
        (tmp_path / "ds_config.json").write_text(json.dumps(values))
        assert Policy.load(tmp_path / "ds_config.json") == policy
    for key in values:
        honoured = key in HONOURED[()] or any(line.startswith(key) for line in ignored)
        assert honoured or values[key] in ("auto", False, 1), f"{key} was dropped"
