"""What is known of DeepSpeed's configuration keys: which exist, what they take, and what to do about those without one here.

Source: the key names and defaults in DeepSpeed's documentation, "DeepSpeed Configuration JSON", and its config models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ALIASES", "AMBIGUOUS", "HONOURED", "LARGEST_SCALE", "LEFT_OPEN", "OTHER", "TAKES", "Other", "Takes", "enabled"]

Place = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """A key that is not translated.

    Attributes:
        instead: what the user does about it, or what happens here.
        same: values that ask for what happens here anyway; they are not listed.
    """

    instead: str
    same: tuple[object, ...] = (False, None)


@dataclass(frozen=True, slots=True)
class Takes:
    """What a key that is translated takes: in words, whether a value fits, and what it stands for here."""

    expected: str
    fits: Callable[[Any], bool]
    means: Callable[[Any], Any]


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and value >= 0


def _number(low: float, high: float) -> Takes:
    def fits(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high

    return Takes(f"a number from {low:g} to {high:g}", fits, float)


def _one_of(choices: Mapping[str, str]) -> Takes:
    return Takes(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices, choices.__getitem__)


def _each(other: Other, *keys: str) -> dict[str, Other]:
    return dict.fromkeys(keys, other)


LARGEST_SCALE = 2.0**127
_FLAG = Takes("true or false", lambda value: isinstance(value, bool), bool)
_COUNT = Takes("a whole number, 0 or more", _is_count, int)
_STAGE = Takes("0, 1, 2 or 3", lambda value: _is_count(value) and value <= 3, int)
_TEXT = Takes("a path", lambda value: isinstance(value, str) and 0 < len(value) <= 4096 and value.isprintable(), str)
_TIER = _one_of({"cpu": "host", "nvme": "disk", "none": "device"})
_DTYPE = _one_of({
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfp16", "torch.bfloat16"), "bf16"),
})  # fmt: skip
_OFFLOAD: dict[str, Takes | None] = {"device": _TIER, "nvme_path": _TEXT, "pin_memory": _FLAG}
#: Keys that `deepspeed` translates, by the table they stand in, and what each takes; a table has a row of its own.
TAKES: Mapping[Place, Mapping[str, Takes | None]] = {
    (): {
        "zero_optimization": None, "fp16": None, "bf16": None, "activation_checkpointing": None, "aio": None,
        "data_types": None, "communication_data_type": _DTYPE,
    },
    ("zero_optimization",): {
        "stage": _STAGE, "offload_param": None, "offload_optimizer": None, "cpu_offload": _FLAG, "cpu_offload_param": _FLAG,
        "cpu_offload_params": _FLAG, "cpu_offload_use_pin_memory": _FLAG, "overlap_comm": _FLAG, "reduce_bucket_size": _COUNT,
        "allgather_bucket_size": _COUNT, "stage3_prefetch_bucket_size": _COUNT,
    },
    ("zero_optimization", "offload_param"): _OFFLOAD,
    ("zero_optimization", "offload_optimizer"): {**_OFFLOAD, "ratio": _number(0, 1)},
    ("fp16",): {
        "enabled": _FLAG, "auto_cast": _FLAG, "loss_scale": _number(0, LARGEST_SCALE),
        "initial_scale_power": _number(0, 127), "loss_scale_window": _number(1, 2.0**31 - 1), "hysteresis": _number(1, 1024),
        "min_loss_scale": _number(2.0**-126, LARGEST_SCALE),
    },
    ("bf16",): {"enabled": _FLAG},
    ("activation_checkpointing",): {"cpu_checkpointing": _FLAG},
    ("aio",): {"block_size": _COUNT, "queue_depth": _COUNT, "thread_count": _COUNT, "intra_op_parallelism": _COUNT},
    ("data_types",): {"grad_accum_dtype": _DTYPE},
}  # fmt: skip
HONOURED: Mapping[Place, frozenset[str]] = {table: frozenset(keys) for table, keys in TAKES.items()}

_LOADER = "set batch_size in the data loader"
_LOG = "zhooks prints nothing; observe the attachment's events, or use zprof"
_DETAIL = "an internal of DeepSpeed; nothing to set here"
_MESH = "pass attach a mesh with a replicate and a shard axis"
_STEP = "the step updates buffer by buffer, with a fixed number of buffers"
_OUTSIDE = "not part of ZeRO; use another library, or do it in the loop"
_SAVE = "attachment.save_full(path) writes one full safetensors file"
_MASTERS = "masters and states keep the model's own dtype"

_ZERO = {
    "contiguous_gradients": Other("gradients are always gathered in one flat buffer", (True,)),
    "allgather_partitions": Other("updated parameters are always all-gathered", (True,)),
    "reduce_scatter": Other("gradients are always reduce-scattered at stages 1 to 3", (True,)),
    **_each(
        Other(_DETAIL, (True, False)),
        "use_multi_rank_bucket_allreduce", "round_robin_gradients", "memory_efficient_linear", "override_module_apply",
    ),
    "load_from_fp32_weights": Other("masters are the model's own parameters", (True,)),
    **_each(Other(_SAVE), "elastic_checkpoint", "stage3_gather_16bit_weights_on_model_save"),
    "sub_group_size": Other(_STEP, ()),
    "stage3_max_live_parameters": Other("bound all device memory with [budget] device", ()),
    "stage3_max_reuse_distance": Other("set [schedule] reshard_after_forward, or [budget] device for its auto", ()),
    **_each(
        Other("every parameter is partitioned; [units] min_numel joins small ones", (0,)),
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    ),
    "stage3_module_granularity_threshold": Other("set [units] classes or names", (0,)),
    **_each(Other("units are all-gathered, straight into place"),
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    ),
    "ignore_unused_parameters": Other("unused parameters are never an error", (True,)),
    "grad_hooks": Other("gradients are reduced during backward", (True,)),
    **_each(Other(_DETAIL), "legacy_stage1", "pipeline_loading_checkpoint"),
    "zero_hpz_partition_size": Other(_MESH, (0, 1)),
    **_each(Other("communication is not quantized"),
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zeropp_loco_param",
    ),
    "mics_shard_size": Other(_MESH, (-1, 0)),
    "mics_hierarchical_params_gather": Other(_MESH),
    "log_trace_cache_warnings": Other(_LOG),
    "enable_sanity_checks": Other("ranks that disagree raise DivergenceError, always", (True, False)),
    "save_muon_momentum_buffer_in_memory": Other("set [optimizer] tier"),
    "leaf_module": Other("set [units] classes or names"),
    "zenflow": Other("updates are never delayed; [optimizer] overlap updates in backward", (False, None)),
}  # fmt: skip
_OFFLOAD_PARAM = {
    "buffer_count": Other("buffers are counted from the plan; set [schedule] prefetch", ()),
    "buffer_size": Other("buffers are as large as the largest unit; set [units] max_numel", ()),
    "max_in_cpu": Other("set [budget] host", ()),
    "ratio": Other("use [[rule]] to place some parameters", (1,)),
}
_OFFLOAD_OPTIMIZER = {
    **_each(Other(_STEP, ()), "buffer_count", "buffer_size"),
    "max_in_cpu": Other("set [budget] host", ()),
    "pipeline": Other("reading, updating and writing back always overlap", (True,)),
    **_each(Other("reading, updating and writing back always overlap", (True, False)), "pipeline_read", "pipeline_write"),
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
    **_each(Other("check torch.isfinite(norm) of clip_grad_norm_ in the loop"), "check_grad_overflow", "check_overflow"),
    **_each(Other(_MASTERS), "bf16_master_weights_and_grads", "bf16_optimizer_states"),
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
    **_each(Other(_LOADER, ()), "train_batch_size", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": Other("accumulate in the loop, with attachment.no_sync() before the boundary", (1,)),
    "managed_gradient_accumulation": Other("do it in the training loop"),
    "gradient_clipping": Other("call torch.nn.utils.clip_grad_norm_ in the loop", (0,)),
    "optimizer": Other("build it in the loop, e.g. torch.optim.AdamW(model.parameters())", ()),
    "scheduler": Other("build it in the loop, from torch.optim.lr_scheduler", ()),
    "zero_allow_untested_optimizer": Other("any torch optimizer that works element by element will do", (True, False)),
    "zero_force_ds_cpu_optimizer": Other('[optimizer] kernel = "numba" is the CPU optimizer of zhooks', (False,)),
    **_each(Other(_OUTSIDE, ()), "seq_parallel_communication_data_type", "vocabulary_size"),
    "prescale_gradients": Other('[precision] reduce = "fp16" divides before it sums'),
    "gradient_predivide_factor": Other('[precision] reduce = "fp16" divides before it sums', (1,)),
    "gradient_allreduce_op": Other('gradients are averaged; write [gradient] reduce = "sum"', ("mean",)),
    "sparse_gradients": Other("gradients are dense"),
    "disable_allgather": Other("updated parameters are gathered at their next use"),
    **_each(Other("use torch.autocast in the loop"), "amp", "torch_autocast"),
    **_each(Other(_LOG, ()), "steps_per_print", "log_level"),
    **_each(Other(_LOG),
        "wall_clock_breakdown", "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config", "comms_logger", "timers",
    ),
    "memory_breakdown": Other("print attachment.memory()"),
    "dump_state": Other("print attachment.describe()"),
    "dataloader_drop_last": Other(_LOADER),
    "flops_profiler": Other("zprof report counts FLOPs and shows MFU"),
    "autotuning": Other("zprof plan searches for the fastest policy"),
    "comms_config": Other(_LOG, ({"verbose": False},)),
    **_each(Other(_SAVE), "checkpoint", "use_node_local_storage", "nebula", "datastates"),
    **_each(Other(_OUTSIDE),
        "elasticity", "data_efficiency", "curriculum_learning", "progressive_layer_drop", "eigenvalue", "compression_training",
        "quantize_training", "weight_quantization", "sparse_attention", "hybrid_engine", "use_data_before_expert_parallelism",
        "graph_harvesting",
    ),
    "compile": Other("use torch.compile"),
    "pipeline": Other("use torch.distributed.pipelining and attach each stage"),
    "tensor_parallel": Other("use torch.distributed.tensor.parallel, then attach with the whole mesh"),
    "expert_parallel": Other("attach the experts by themselves, over a mesh with an ep axis"),
    "sequence_parallel_size": Other(_OUTSIDE, (1,)),
    "data_parallel_size": Other(_MESH, ()),
    "allgather_size": Other(_DETAIL, ()),
    "communication_backend_name": Other("choose it in torch.distributed.init_process_group", ()),
    "cuda_visible_devices": Other("set it for the launcher", ()),
}  # fmt: skip

#: Keys that are not translated, by the table they stand in.
OTHER: Mapping[Place, Mapping[str, Other]] = {
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
#: Other spellings: older names, names without their prefix, and tables some pages show in the wrong place.
ALIASES: Mapping[Place, Mapping[str, Place]] = {
    (): {"bfloat16": ("bf16",)},
    ("zero_optimization",): {
        **{
            name: ("zero_optimization", f"stage3_{name}")
            for name in (
                "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
                "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
                "use_all_reduce_for_fetch_params", "allgather_sequential",
            )
        },
        **dict.fromkeys(
            ("gather_fp16_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        ),
        "aio": ("aio",),
    },
    ("activation_checkpointing",): {
        "partitioned_activations": ("activation_checkpointing", "partition_activations"),
        "num_checkpoints": ("activation_checkpointing", "number_checkpoints"),
    },
}
_OWN_DTYPE = "parameters keep their own dtype; write true or false"
_DEFAULT_STAGE = "the policy's own default, stage 3, applies; write a number"
#: Keys that decide what a run computes or holds: what follows here where they say "auto", which nobody fills in.
LEFT_OPEN: Mapping[Place, str] = {
    **dict.fromkeys([("fp16",), ("bf16",), ("fp16", "enabled"), ("bf16", "enabled")], _OWN_DTYPE),
    **dict.fromkeys([("zero_optimization",), ("zero_optimization", "stage")], _DEFAULT_STAGE),
    **dict.fromkeys(
        [
            *(("zero_optimization", f"offload_{cell}", *key) for cell in ("param", "optimizer") for key in ((), ("device",))),
            *(("zero_optimization", name) for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_params")),
        ],
        "it stays on the device; write cpu, nvme or none",
    ),
    ("activation_checkpointing", "cpu_checkpointing"): "nothing is recomputed; write true or false",
    ("communication_data_type",): "gradients are summed in fp32 where parameters are cast, else in their own dtype; write it",
    ("gradient_clipping",): "nothing is clipped here; call torch.nn.utils.clip_grad_norm_ in the loop",
    ("gradient_accumulation_steps",): "nothing is accumulated here; do it in the loop, with attachment.no_sync()",
}
#: Keys of DeepSpeed that could as well be misspelt keys of ours; alone they are no sign of DeepSpeed.
AMBIGUOUS = frozenset({"optimizer", "scheduler", "checkpoint", "pipeline", "compile", "timers", "amp", "comet", "log_level"})


def enabled(value: Any) -> bool:
    """Whether a table that is not translated asks for anything: one with ``enabled`` only where that is on."""
    return not (isinstance(value, Mapping) and (not value or value.get("enabled", True) in (False, "auto")))
