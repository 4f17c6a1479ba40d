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
    FOUR_RANKS: 102, "zprof/test_run.py": 45, "zhooks/attach/test_recover.py": 35, "zhooks/unit/test_tiers.py": 32,
    "zprof/test_pages.py": 22, "parity/test_matrix.py": 18, "zhooks/simulation/test_policy_search.py": 17,
    "zhooks/run/test_compile.py": 17, "test_docs.py": 17, "zhooks/plan/test_bad_input.py": 16, "zhooks/run/test_virtual.py": 15,
    "zprof/test_children_recorded.py": 14, "zhooks/optim/test_tiers_optim.py": 13, "zhooks/planning/test_replanning.py": 12,
    "test_packaging.py": 12, "zprof/test_silence.py": 12, "zprof/test_oom.py": 11, "zhooks/optim/test_device_share.py": 11,
    "architectures/test_architectures.py": 11, "zprof/test_snapshot.py": 11, "offload/kernels/test_kernels.py": 11,
    "zprof/test_gathering.py": 11, "test_site.py": 11, "zprof/test_hang.py": 11, "zprof/test_operators.py": 11,
    "zhooks/optim/test_tiers_partial.py": 10, "zhooks/integrations/test_transformers.py": 10,
    "zhooks/integrations/test_trl.py": 10, "parity/test_oracle.py": 9, "zhooks/unit/test_tiers_faults.py": 9,
    "zhooks/run/test_uneven.py": 9, "zhooks/attach/test_another_mesh.py": 9, "offload/policy/test_policy_fuzz.py": 8,
    "zhooks/integrations/test_lightning.py": 8, "zhooks/optim/test_owners_tiers.py": 8,
    "zhooks/checkpoint/test_torch_distributed.py": 8, "zhooks/optim/test_tiers_kernels.py": 8, "test_source_rules.py": 8,
    "zhooks/checkpoint/test_save_load.py": 8, "zprof/test_other_gpus.py": 8, "zhooks/simulation/test_policy_search_axes.py": 8,
    "zhooks/checkpoint/test_save_faults.py": 7, "zhooks/optim/test_overlap.py": 7, "zhooks/activation/test_activation.py": 7,
    "zhooks/simulation/test_stages.py": 7, "zhooks/checkpoint/test_peers.py": 7, "zprof/test_recorder.py": 7,
    "zprof/test_nvml.py": 7, "zprof/test_prometheus_live.py": 7, "zhooks/comm/test_lost_rank.py": 7,
    "zhooks/optim/test_owners.py": 7, "zhooks/comm/test_settings.py": 7, "parity/test_training_loops.py": 6,
    "parity/test_unusual_models.py": 6, "zhooks/report/test_bytes_at_rest.py": 6, "zhooks/run/test_pipeline.py": 6,
    "zprof/test_trace_bounded.py": 6, "zhooks/unit/test_buffers.py": 6, "examples/test_policy_examples_run.py": 6,
    "zhooks/comm/test_p2p.py": 6, "zhooks/integrations/test_accelerate.py": 6, "zhooks/activation/test_partition_faults.py": 6,
    "zhooks/integrations/test_save_pretrained.py": 6, "zprof/test_hardware.py": 5, "parity/test_autograd.py": 5,
    "zhooks/grad/test_scaling.py": 5, "zprof/test_export_faults.py": 5, "zhooks/simulation/test_measured.py": 5,
    "zhooks/checkpoint/test_full_state.py": 5, "zhooks/simulation/test_simulate_compiled.py": 5,
    "examples/test_simulate_gpt.py": 5, "zprof/test_children.py": 5, "examples/test_small_examples.py": 5,
    "zhooks/grad/test_reduce_order.py": 5, "zprof/test_growth.py": 5, "zhooks/checkpoint/test_save_beside.py": 5,
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
