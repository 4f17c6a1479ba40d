"""Policies that set every key, as text of ours and as a DeepSpeed file, and the reading of the latter.

Tests of policies, of their errors and of damaged policy files start from them.
"""

from __future__ import annotations

import warnings
from typing import Any

from offload.policy import IgnoredKeys, Policy

#: Every honoured table, with values away from the defaults.
EVERYTHING: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": False, "buffer_count": 5},
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 2e8,
        "allgather_bucket_size": 1e8,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 2, "overlap_events": True},
    "wall_clock_breakdown": False,
}


def read(values: dict[str, Any]) -> tuple[Policy, tuple[str, ...]]:
    """The policy, and what is not honoured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = Policy.of(values)
    ignored = [warning.message.ignored for warning in caught if isinstance(warning.message, IgnoredKeys)]
    assert len(ignored) == len(caught) <= 1
    return policy, ignored[0] if ignored else ()


WHOLE = """\
# every key once
stage = 2

[parameter]
partition = "replicate"
tier = "device"
[gradient]
partition = "shard"
tier = "host"
[optimizer]
partition = "shard"
tier = "disk"
kernel = "numba"
compute = "host"
overlap = true
rounding = "stochastic"
seed = 11
device_share = 0.25
[activation]
tier = "host"
checkpoint = "unit"
partition = "tp"
sharded_inputs = ["layers.[0-3]"]
min_bytes = "64 KiB"
keep = "1 GiB"

[precision]
param = "bf16"
reduce = "fp32"
output = "fp32"
cast_inputs = false

[units]
classes = ["Block", "Stage"]
names = [
    "layers.*",  # with # a comment
    "head",
]
min_numel = 0
max_numel = 1_000_000

[schedule]
reshard_after_forward = false
prefetch = 3
max_reductions = 4

[budget]
device = "20 GiB"
host = "80%"
disk = 12345

[device]
arena = "all"

[host]
pin = false
slab = "16 MiB"

[disk]
path = "/scratch"
block = "4 MiB"
threads = 7
direct = true

[comm]
transport = "p2p"
timeout_s = 12.5
bucket = "8 MiB"

[[rule]]
match = "*.embed*"
gradient.tier = "host"
optimizer = { tier = "device" }
[[rule]]
match = "head.*"
[rule.optimizer]
tier = "host"
"""
