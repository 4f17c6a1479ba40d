"""Owns what is known of DeepSpeed's configuration keys: which exist, and what to do about those that have no key here.

`deepspeed` reads these tables; they are data. Nothing here decides how an honoured key is translated.

Source: the key names and defaults in DeepSpeed's documentation, "DeepSpeed Configuration JSON", and its config models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ALIASES", "AMBIGUOUS", "HONOURED", "LEFT_OPEN", "OTHER", "Other", "enabled"]


@dataclass(frozen=True, slots=True)
class Other:
    """A key that is not translated.

    Attributes:
        instead: what the user does about it, or what happens here.
        same: values that ask for what happens here anyway; they are not listed.
    """

    instead: str
    same: tuple[object, ...] = (False, None)


_LOOP = "do it in the training loop"
_LOADER = "set batch_size in the data loader"
_LOG = "zhooks prints nothing; observe the attachment's events, or use zprof"
_OVERFLOW = "check torch.isfinite(norm) of clip_grad_norm_ in the loop"
_DETAIL = "an internal of DeepSpeed; nothing to set here"
_COMM = "communication is not quantized"
_MESH = "pass attach a mesh with a replicate and a shard axis"
_STEP = "the step updates buffer by buffer, with a fixed number of buffers"
_OUTSIDE = "not part of ZeRO; use another library, or do it in the loop"
_SAVE = "attachment.save_full(path) writes one full safetensors file"
_MASTERS = "masters and states keep the model's own dtype"

_ZERO = {
    "contiguous_gradients": Other("gradients are always gathered in one flat buffer", (True,)),
    "allgather_partitions": Other("updated parameters are always all-gathered", (True,)),
    "reduce_scatter": Other("gradients are always reduce-scattered at stages 1 to 3", (True,)),
    "use_multi_rank_bucket_allreduce": Other(_DETAIL, (True, False)),
    "round_robin_gradients": Other(_DETAIL, (True, False)),
    "load_from_fp32_weights": Other("masters are the model's own parameters", (True,)),
    "elastic_checkpoint": Other(_SAVE),
    "sub_group_size": Other(_STEP, ()),
    "stage3_max_live_parameters": Other("bound all device memory with [budget] device", ()),
    "stage3_max_reuse_distance": Other("set [schedule] reshard_after_forward, or [budget] device for its auto", ()),
    "stage3_param_persistence_threshold": Other("every parameter is partitioned; [units] min_numel joins small ones", (0,)),
    "stage3_model_persistence_threshold": Other("every parameter is partitioned; [units] min_numel joins small ones", (0,)),
    "stage3_gather_16bit_weights_on_model_save": Other(_SAVE),
    "stage3_module_granularity_threshold": Other("set [units] classes or names", (0,)),
    "stage3_use_all_reduce_for_fetch_params": Other("units are all-gathered, straight into place"),
    "stage3_allgather_sequential": Other("units are all-gathered, straight into place"),
    "ignore_unused_parameters": Other("unused parameters are never an error", (True,)),
    "grad_hooks": Other("gradients are reduced during backward", (True,)),
    "legacy_stage1": Other(_DETAIL),
    "zero_hpz_partition_size": Other(_MESH, (0, 1)),
    "zero_quantized_weights": Other(_COMM),
    "zero_quantized_nontrainable_weights": Other(_COMM),
    "zero_quantized_gradients": Other(_COMM),
    "zeropp_loco_param": Other(_COMM),
    "mics_shard_size": Other(_MESH, (-1, 0)),
    "mics_hierarchical_params_gather": Other(_MESH),
    "memory_efficient_linear": Other(_DETAIL, (True, False)),
    "pipeline_loading_checkpoint": Other(_DETAIL),
    "override_module_apply": Other(_DETAIL, (True, False)),
    "log_trace_cache_warnings": Other(_LOG),
    "enable_sanity_checks": Other("ranks that disagree raise DivergenceError, always", (True, False)),
    "save_muon_momentum_buffer_in_memory": Other("set [optimizer] tier"),
    "leaf_module": Other("set [units] classes or names"),
    "zenflow": Other("updates are never delayed; [optimizer] overlap updates in backward", (False, None)),
}
_OFFLOAD_PARAM = {
    "buffer_count": Other("buffers are counted from the plan; set [schedule] prefetch", ()),
    "buffer_size": Other("buffers are as large as the largest unit; set [units] max_numel", ()),
    "max_in_cpu": Other("set [budget] host", ()),
    "ratio": Other("use [[rule]] to place some parameters", (1,)),
}
_OFFLOAD_OPTIMIZER = {
    "buffer_count": Other(_STEP, ()),
    "buffer_size": Other(_STEP, ()),
    "max_in_cpu": Other("set [budget] host", ()),
    "pipeline": Other("reading, updating and writing back always overlap", (True,)),
    "pipeline_read": Other("reading, updating and writing back always overlap", (True, False)),
    "pipeline_write": Other("reading, updating and writing back always overlap", (True, False)),
    "fast_init": Other(_DETAIL, (True, False)),
    "super_offload": Other('set [optimizer] kernel = "numba"'),
    "cpuadam_cores_perc": Other("set torch's and numba's number of threads", ()),
}
_FP16 = {
    "consecutive_hysteresis": Other("hysteresis counts the overflows since the scale last grew"),
    "fp16_master_weights_and_grads": Other(_MASTERS),
}
_BF16 = {
    "immediate_grad_update": Other(_DETAIL, (True, False)),
    "check_grad_overflow": Other(_OVERFLOW),
    "check_overflow": Other(_OVERFLOW),
    "bf16_master_weights_and_grads": Other(_MASTERS),
    "bf16_optimizer_states": Other(_MASTERS),
}
_ACTIVATIONS = {
    "contiguous_memory_optimization": Other('set [device] arena = "all"'),
    "synchronize_checkpoint_boundary": Other(_DETAIL),
    "partition_activations": Other('on a mesh with a tp axis set [activation] checkpoint = "unit" and partition = "tp"'),
    "number_checkpoints": Other('set [activation] checkpoint = "unit": one per unit', (False, 0)),
    "profile": Other(_LOG),
}
_AIO = {
    "single_submit": Other("requests go to a pool of threads", (False,)),
    "overlap_events": Other("requests go to a pool of threads", (True,)),
    "use_gds": Other("data goes through host memory"),
}
_TOP = {
    "train_batch_size": Other(_LOADER, ()),
    "train_micro_batch_size_per_gpu": Other(_LOADER, ()),
    "gradient_accumulation_steps": Other("accumulate in the loop, with attachment.no_sync() before the boundary", (1,)),
    "managed_gradient_accumulation": Other(_LOOP),
    "gradient_clipping": Other("call torch.nn.utils.clip_grad_norm_ in the loop", (0,)),
    "optimizer": Other("build it in the loop, e.g. torch.optim.AdamW(model.parameters())", ()),
    "scheduler": Other("build it in the loop, from torch.optim.lr_scheduler", ()),
    "zero_allow_untested_optimizer": Other("any torch optimizer that works element by element will do", (True, False)),
    "zero_force_ds_cpu_optimizer": Other('[optimizer] kernel = "numba" is the CPU optimizer of zhooks', (False,)),
    "seq_parallel_communication_data_type": Other(_OUTSIDE, ()),
    "prescale_gradients": Other('[precision] reduce = "fp16" divides before it sums'),
    "gradient_predivide_factor": Other('[precision] reduce = "fp16" divides before it sums', (1,)),
    "gradient_allreduce_op": Other('gradients are averaged; write [gradient] reduce = "sum"', ("mean",)),
    "sparse_gradients": Other("gradients are dense"),
    "disable_allgather": Other("updated parameters are gathered at their next use"),
    "amp": Other("use torch.autocast in the loop"),
    "torch_autocast": Other("use torch.autocast in the loop"),
    "steps_per_print": Other(_LOG, ()),
    "wall_clock_breakdown": Other(_LOG),
    "memory_breakdown": Other("print attachment.memory()"),
    "dump_state": Other("print attachment.describe()"),
    "dataloader_drop_last": Other(_LOADER),
    "log_level": Other(_LOG, ()),
    "flops_profiler": Other("zprof report counts FLOPs and shows MFU"),
    "autotuning": Other("zprof plan searches for the fastest policy"),
    "tensorboard": Other(_LOG),
    "wandb": Other(_LOG),
    "comet": Other(_LOG),
    "csv_monitor": Other(_LOG),
    "monitor_config": Other(_LOG),
    "comms_config": Other(_LOG, ({"verbose": False},)),
    "comms_logger": Other(_LOG),
    "timers": Other(_LOG),
    "checkpoint": Other(_SAVE),
    "use_node_local_storage": Other(_SAVE),
    "nebula": Other(_SAVE),
    "datastates": Other(_SAVE),
    "elasticity": Other(_OUTSIDE),
    "data_efficiency": Other(_OUTSIDE),
    "curriculum_learning": Other(_OUTSIDE),
    "progressive_layer_drop": Other(_OUTSIDE),
    "eigenvalue": Other(_OUTSIDE),
    "compression_training": Other(_OUTSIDE),
    "quantize_training": Other(_OUTSIDE),
    "weight_quantization": Other(_OUTSIDE),
    "sparse_attention": Other(_OUTSIDE),
    "hybrid_engine": Other(_OUTSIDE),
    "compile": Other("use torch.compile"),
    "pipeline": Other("use torch.distributed.pipelining and attach each stage"),
    "tensor_parallel": Other("use torch.distributed.tensor.parallel, then attach with the whole mesh"),
    "expert_parallel": Other("attach the experts by themselves, over a mesh with an ep axis"),
    "sequence_parallel_size": Other(_OUTSIDE, (1,)),
    "data_parallel_size": Other(_MESH, ()),
    "use_data_before_expert_parallelism": Other(_OUTSIDE),
    "graph_harvesting": Other(_OUTSIDE),
    "vocabulary_size": Other(_OUTSIDE, ()),
    "allgather_size": Other(_DETAIL, ()),
    "communication_backend_name": Other("choose it in torch.distributed.init_process_group", ()),
    "cuda_visible_devices": Other("set it for the launcher", ()),
}

#: Keys that are not translated, by the table they stand in.
OTHER: Mapping[tuple[str, ...], Mapping[str, Other]] = {
    (): _TOP,
    ("zero_optimization",): _ZERO,
    ("zero_optimization", "offload_param"): _OFFLOAD_PARAM,
    ("zero_optimization", "offload_optimizer"): _OFFLOAD_OPTIMIZER,
    ("fp16",): _FP16,
    ("bf16",): _BF16,
    ("activation_checkpointing",): _ACTIVATIONS,
    ("aio",): _AIO,
    ("data_types",): {"param_dtype": Other("set [precision] param", ()), "buffer_dtype": Other(_DETAIL, ())},
}
#: Keys that `deepspeed` translates, likewise.
HONOURED: Mapping[tuple[str, ...], frozenset[str]] = {
    (): frozenset(
        {"zero_optimization", "fp16", "bf16", "activation_checkpointing", "aio", "data_types", "communication_data_type"}
    ),
    ("zero_optimization",): frozenset(
        {
            "stage",
            "offload_param",
            "offload_optimizer",
            "cpu_offload",
            "cpu_offload_param",
            "cpu_offload_params",
            "cpu_offload_use_pin_memory",
            "overlap_comm",
            "reduce_bucket_size",
            "allgather_bucket_size",
            "stage3_prefetch_bucket_size",
        }
    ),
    ("zero_optimization", "offload_param"): frozenset({"device", "nvme_path", "pin_memory"}),
    ("zero_optimization", "offload_optimizer"): frozenset({"device", "nvme_path", "pin_memory", "ratio"}),
    ("fp16",): frozenset(
        {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}
    ),
    ("bf16",): frozenset({"enabled"}),
    ("activation_checkpointing",): frozenset({"cpu_checkpointing"}),
    ("aio",): frozenset({"block_size", "queue_depth", "thread_count", "intra_op_parallelism"}),
    ("data_types",): frozenset({"grad_accum_dtype"}),
}
#: Other spellings: older names, names without their prefix, and tables some pages show in the wrong place.
ALIASES: Mapping[tuple[str, ...], Mapping[str, tuple[str, ...]]] = {
    (): {"bfloat16": ("bf16",)},
    ("zero_optimization",): {
        "prefetch_bucket_size": ("zero_optimization", "stage3_prefetch_bucket_size"),
        "param_persistence_threshold": ("zero_optimization", "stage3_param_persistence_threshold"),
        "model_persistence_threshold": ("zero_optimization", "stage3_model_persistence_threshold"),
        "max_live_parameters": ("zero_optimization", "stage3_max_live_parameters"),
        "max_reuse_distance": ("zero_optimization", "stage3_max_reuse_distance"),
        "gather_16bit_weights_on_model_save": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        "gather_fp16_weights_on_model_save": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        "stage3_gather_fp16_weights_on_model_save": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        "module_granularity_threshold": ("zero_optimization", "stage3_module_granularity_threshold"),
        "use_all_reduce_for_fetch_params": ("zero_optimization", "stage3_use_all_reduce_for_fetch_params"),
        "allgather_sequential": ("zero_optimization", "stage3_allgather_sequential"),
        "aio": ("aio",),
    },
    ("activation_checkpointing",): {
        "partitioned_activations": ("activation_checkpointing", "partition_activations"),
        "num_checkpoints": ("activation_checkpointing", "number_checkpoints"),
    },
}
_OWN_DTYPE = "parameters keep their own dtype; write true or false"
_DEVICE = "it stays on the device; write cpu, nvme or none"
_DEFAULT_STAGE = "the policy's own default, stage 3, applies; write a number"
_CLIP = "nothing is clipped here; call torch.nn.utils.clip_grad_norm_ in the loop"
#: Keys that decide what a run computes or holds: what follows here where they say "auto", which nobody fills in.
LEFT_OPEN: Mapping[tuple[str, ...], str] = {
    ("fp16",): _OWN_DTYPE,
    ("bf16",): _OWN_DTYPE,
    ("fp16", "enabled"): _OWN_DTYPE,
    ("bf16", "enabled"): _OWN_DTYPE,
    ("zero_optimization",): _DEFAULT_STAGE,
    ("zero_optimization", "stage"): _DEFAULT_STAGE,
    ("zero_optimization", "offload_param"): _DEVICE,
    ("zero_optimization", "offload_optimizer"): _DEVICE,
    ("zero_optimization", "offload_param", "device"): _DEVICE,
    ("zero_optimization", "offload_optimizer", "device"): _DEVICE,
    ("zero_optimization", "cpu_offload"): _DEVICE,
    ("zero_optimization", "cpu_offload_param"): _DEVICE,
    ("zero_optimization", "cpu_offload_params"): _DEVICE,
    ("activation_checkpointing", "cpu_checkpointing"): "nothing is recomputed; write true or false",
    ("communication_data_type",): "gradients are summed in fp32 where parameters are cast, else in their own dtype; write it",
    ("gradient_clipping",): _CLIP,
    ("gradient_accumulation_steps",): "nothing is accumulated here; do it in the loop, with attachment.no_sync()",
}
#: Keys of DeepSpeed that could as well be misspelt keys of ours; alone they are no sign of DeepSpeed.
AMBIGUOUS = frozenset({"optimizer", "scheduler", "checkpoint", "pipeline", "compile", "timers", "amp", "comet", "log_level"})


def enabled(value: Any) -> bool:
    """Whether a table that is not translated asks for anything: one with ``enabled`` only where that is on."""
    return not (isinstance(value, Mapping) and (not value or value.get("enabled", True) in (False, "auto")))
