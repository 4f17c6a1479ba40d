"""The order in which the workers of a run take its files: the longest first, so that they end together.

conftest.py sorts tests by it for xdist, which would take the files of most tests first: the last would be one of few tests
that start programs, and one worker would be alone with it.  It chooses no test, and a run in one process keeps its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.selection import FOUR_RANKS

__all__ = ["SECONDS", "longest_first"]

#: Seconds of the files that take longest, waits included, by their path below tests/: of one run by two workers on a quiet
#: machine; only their proportions count. Another file counts by its tests. A figure that is wrong costs a run seconds at
#: its end, and nothing else.
SECONDS: Mapping[str, float] = {
    FOUR_RANKS: 97, "parity/test_matrix.py": 88, "zprof/test_run.py": 49, "test_docs.py": 33, "test_gpu.py": 31,
    "zhooks/unit/test_tiers.py": 27, "zprof/test_pages.py": 20, "zprof/test_oom.py": 20,
    "zhooks/simulate/test_policy_search.py": 19, "zhooks/run/test_compile.py": 19, "zprof/test_gathering.py": 18,
    "zhooks/optim/test_tiers_optim.py": 18, "zhooks/run/test_overlap.py": 16, "zhooks/attach/test_recover.py": 16,
    "accelerator/test_collectives.py": 16, "zprof/test_children_recorded.py": 16,
    "zhooks/checkpoint/test_torch_distributed.py": 16, "zhooks/run/test_device_faults.py": 16,
    "zhooks/unit/test_tiers_faults.py": 16, "zhooks/tensor/test_written.py": 15, "zhooks/activation/test_activation.py": 15,
    "test_source_rules.py": 13, "zprof/test_other_gpus.py": 13, "zhooks/attach/test_another_mesh.py": 13,
    "offload/kernels/test_kernels.py": 13, "zhooks/resilience/test_peers.py": 12, "test_site.py": 12,
    "zhooks/whole/test_owners_tiers.py": 12, "zprof/test_snapshot.py": 12, "zhooks/integrations/test_lightning.py": 11,
    "test_packaging.py": 11, "offload/policy/test_policy_fuzz.py": 11, "hosts/test_lost_hosts.py": 11,
    "zprof/test_operators.py": 10, "zprof/test_hang.py": 10, "zhooks/integrations/test_transformers.py": 10,
    "zhooks/whole/test_owners.py": 10, "zhooks/checkpoint/test_save_load.py": 10, "zhooks/cpu_transport/test_deadlock.py": 10,
    "zhooks/run/test_virtual.py": 10, "zhooks/optim/test_lbfgs.py": 10, "zhooks/checkpoint/test_save_faults.py": 10,
    "zhooks/simulate/test_replanning.py": 9, "zhooks/tensor/test_registry.py": 9, "zhooks/checkpoint/test_save_beside.py": 9,
    "zhooks/optim/test_tiers_kernels.py": 9, "zhooks/simulate/test_stages.py": 9, "zhooks/checkpoint/test_deepspeed.py": 9,
    "zhooks/parallel/test_partition.py": 9, "zhooks/checkpoint/test_reshard_edges.py": 9, "zprof/test_silence.py": 9,
    "parity/test_oracle.py": 9, "zhooks/optim/test_device_share.py": 8, "zprof/test_recorder.py": 8, "zprof/test_nvml.py": 8,
    "zhooks/grad/test_accumulate.py": 8, "zhooks/grad/test_reduce_order.py": 8, "zhooks/comm/test_lost_rank.py": 8,
    "architectures/test_architectures.py": 8, "zhooks/optim/test_overlap.py": 8, "zhooks/plan/test_bad_input.py": 7,
    "zhooks/comm/test_group_store.py": 7, "zhooks/run/test_members.py": 7, "zhooks/resilience/test_replica_checks.py": 7,
    "zhooks/integrations/test_save_pretrained.py": 7, "zhooks/unit/test_buffers.py": 7, "accelerator/test_device.py": 7,
    "parity/test_autograd.py": 7, "parity/test_unusual_models.py": 7, "offload/store/test_store_faults.py": 7,
    "zhooks/activation/test_activation_recompute.py": 7, "zprof/test_top.py": 6, "parity/test_training_loops.py": 6,
    "zhooks/grad/test_scaling.py": 6, "zprof/test_trace_bounded.py": 6, "zhooks/integrations/test_trl.py": 6,
    "zprof/test_plan.py": 6, "zprof/test_hardware.py": 6, "zhooks/checkpoint/test_full_state.py": 6, "test_ranks.py": 6,
    "zhooks/optim/test_complex.py": 6, "zprof/test_growth.py": 6, "zhooks/optim/test_rounding.py": 6,
    "zprof/test_on_accelerator.py": 6, "zhooks/session/test_nonfinite.py": 6, "zprof/test_export_faults.py": 6,
    "zhooks/run/test_unit_casts.py": 6, "zhooks/integrations/test_peft.py": 5, "zprof/test_many_ranks.py": 5,
    "zhooks/unit/test_tiers_freezes.py": 5, "zprof/test_oom_tried.py": 5, "zprof/test_prometheus_live.py": 5,
    "zhooks/run/test_inference.py": 5, "zhooks/simulate/test_simulate.py": 5, "zprof/test_children.py": 5,
    "zhooks/run/test_preemption.py": 5, "zhooks/run/test_pipeline.py": 5,
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
