"""The order in which the workers of a run take its files: the longest first, so that they end together.

conftest.py sorts tests by it for xdist, which would take the files of most tests first: the last would be one of few tests
that start programs, and one worker would be alone with it.  It chooses no test, and a run in one process keeps its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.selection import FOUR_RANKS

__all__ = ["SECONDS", "longest_first"]

#: Seconds of the files that take longest, waits included, by their path below tests/: of one run by two workers beside other
#: work, so that only their proportions count. Another file counts by its tests. A figure that is wrong costs a run seconds at
#: its end, and nothing else.
SECONDS: Mapping[str, float] = {
    FOUR_RANKS: 207, "zhooks/unit/test_tiers.py": 67, "zprof/test_run.py": 67, "zhooks/optim/test_tiers_optim.py": 43,
    "zhooks/simulation/test_policy_search.py": 42, "zhooks/run/test_compile.py": 39, "zhooks/planning/test_replanning.py": 36,
    "zhooks/checkpoint/test_save_faults.py": 35, "zhooks/run/test_uneven.py": 33, "zhooks/checkpoint/test_save_beside.py": 32,
    "architectures/test_architectures.py": 29, "zprof/test_pages.py": 26, "zprof/test_oom.py": 24,
    "zhooks/checkpoint/test_save_load.py": 23, "zhooks/report/test_bytes_at_rest.py": 22, "test_docs.py": 22,
    "zhooks/simulation/test_stages.py": 22, "zhooks/optim/test_device_share.py": 21, "zprof/test_export.py": 20,
    "zprof/test_hardware.py": 20, "parity/test_matrix.py": 19, "zhooks/unit/test_tiers_faults.py": 19,
    "zhooks/checkpoint/test_torch_distributed.py": 19, "offload/kernels/test_kernels.py": 18,
    "zhooks/optim/test_owners.py": 18, "zhooks/activation/test_activation.py": 18, "zhooks/plan/test_bad_input.py": 17,
    "test_source_rules.py": 17, "parity/test_training_loops.py": 16, "zhooks/optim/test_owners_tiers.py": 16,
    "zhooks/grad/test_scaling.py": 16, "benchmarks/test_gpu.py": 16, "test_site.py": 25, "parity/test_oracle.py": 16,
    "zhooks/optim/test_tiers_partial.py": 16, "zhooks/optim/test_tiers_kernels.py": 15, "zhooks/unit/test_buffers.py": 15,
    "zhooks/integrations/test_transformers.py": 15, "zprof/test_bench.py": 15, "zhooks/run/test_virtual.py": 15,
    "zhooks/checkpoint/test_save_forged.py": 14, "zprof/test_recorder.py": 14, "offload/kernels/test_kernels_bounds.py": 14,
    "offload/policy/test_policy_fuzz.py": 14, "zhooks/run/test_pipeline.py": 13, "parity/test_unusual_models.py": 13,
    "zhooks/simulation/test_policy_search_axes.py": 13, "zhooks/integrations/test_lightning.py": 13,
    "zprof/test_trace_damage.py": 12, "zhooks/optim/test_overlap.py": 12, "zhooks/integrations/test_trl.py": 12,
    "parity/test_autograd.py": 11, "zhooks/run/test_members.py": 11, "zprof/test_trace_bounded.py": 11,
    "zhooks/report/test_noise_scale.py": 10, "zhooks/optim/test_rounding.py": 10, "zprof/test_top.py": 10,
    "offload/disk/test_disk_process.py": 10, "zhooks/checkpoint/test_reshard_edges.py": 9,
    "offload/virtual/test_torch_device.py": 9, "zhooks/comm/test_settings.py": 9, "zhooks/optim/test_lbfgs.py": 9,
    "examples/test_small_examples.py": 8, "zhooks/plan/test_quantised.py": 8, "zhooks/optim/test_owners_states.py": 8,
    "zhooks/comm/test_p2p.py": 8, "zprof/test_nvml.py": 8, "zprof/test_other_gpus.py": 9,
    "offload/store/test_store_faults.py": 8,
    "zhooks/integrations/test_peft.py": 8, "zhooks/integrations/test_accelerate.py": 8,
    "zhooks/integrations/test_pretrained.py": 8, "zhooks/layout/test_precision_rules.py": 7, "mutants/test_mutants.py": 7,
    "zprof/test_snapshot.py": 7, "zprof/test_alloc.py": 7, "zhooks/comm/test_lost_rank.py": 7,
    "zhooks/simulation/test_measured.py": 7, "zhooks/grad/test_reduce_order.py": 7, "zhooks/tensor/test_sharded.py": 7,
    "zhooks/checkpoint/test_torch_state.py": 7, "zhooks/simulation/test_simulate.py": 7, "zhooks/run/test_order.py": 7,
    "zhooks/layout/test_precision_parallel.py": 7, "zhooks/unit/test_arena.py": 7,
    "zhooks/activation/test_partition_faults.py": 6, "examples/test_policy_examples_run.py": 6,
    "zhooks/simulation/test_simulate_compiled.py": 6, "zhooks/integrations/test_generate.py": 6, "zprof/test_oom_tried.py": 6,
    "parity/test_hooks_and_errors.py": 6, "zhooks/checkpoint/test_full_state.py": 6, "test_ranks.py": 6,
    "zhooks/report/test_calibrate.py": 6, "zhooks/checkpoint/test_reshard.py": 6, "zhooks/grad/test_gradient_memory.py": 5,
    "zhooks/run/test_freezes.py": 5, "zhooks/optim/test_optimizers.py": 5, "test_imports.py": 5,
    "zhooks/simulation/test_simulate_partition.py": 5, "zhooks/run/test_inference.py": 5,
    "zhooks/unit/test_tiers_freezes.py": 5, "zhooks/plan/test_ignored.py": 5, "zprof/test_export_faults.py": 5,
}  # fmt: skip
#: Seconds of a test of any other file.
EACH_S = 0.1


def longest_first(groups: Sequence[str], seconds: Mapping[str, float] = SECONDS) -> list[int]:
    """The places of tests in the order in which they are handed out; ``groups`` has the group of each, a file or another.

    Tests of a group keep their order, and come after one another. A group that no figure is known for counts by its tests.
    """
    counted = Counter(groups)
    cost = {group: seconds.get(group, EACH_S * number) for group, number in counted.items()}
    return sorted(range(len(groups)), key=lambda place: (-cost[groups[place]], groups[place], place))
