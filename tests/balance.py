"""The order in which the workers of a run take its files: the longest first, so that they end together.

conftest.py sorts tests by it for xdist, which would take the files of most tests first: the last would be one of few tests
that start programs, and one worker would be alone with it.  It chooses no test, and a run in one process keeps its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.selection import FOUR_RANKS

__all__ = ["SECONDS", "longest_first"]

#: CPU seconds of the files that take longest, by their path below tests/. Another file counts by its tests. A figure that is
#: wrong costs a run seconds at its end, and nothing else.
SECONDS: Mapping[str, float] = {
    FOUR_RANKS: 98, "zhooks/unit/test_tiers.py": 37, "zhooks/run/test_compile.py": 35, "zprof/test_run.py": 30,
    "architectures/test_architectures.py": 29, "test_docs.py": 18, "zhooks/checkpoint/test_save_faults.py": 18,
    "zhooks/integrations/test_transformers.py": 15, "zprof/test_oom.py": 14, "parity/test_matrix.py": 14,
    "parity/test_oracle.py": 14, "parity/test_adversity.py": 13, "parity/test_adversity_loop.py": 13,
    "zhooks/unit/test_buffers.py": 11, "zhooks/integrations/test_trl.py": 11, "zhooks/integrations/test_accelerate.py": 10,
    "zhooks/run/test_pipeline.py": 10, "test_source_rules.py": 9, "zhooks/checkpoint/test_save_load.py": 9,
    "zhooks/checkpoint/test_reshard.py": 9, "zhooks/checkpoint/test_reshard_edges.py": 12, "zhooks/run/test_uneven.py": 15,
    "zprof/test_pages.py": 14, "zprof/test_hardware.py": 14, "zhooks/simulation/test_policy_search_axes.py": 12,
    "zhooks/optim/test_tiers_optim.py": 10, "zhooks/tensor/test_tensor_parallel.py": 10,
    "zhooks/activation/test_partition_parallel.py": 9, "zhooks/checkpoint/test_torch_distributed.py": 9,
    "zprof/test_recorder.py": 9, "examples/test_small_examples.py": 8, "parity/test_adversity_autograd.py": 8,
    "examples/test_libraries.py": 7, "zhooks/checkpoint/test_save_forged.py": 7, "zhooks/integrations/test_pretrained.py": 7,
    "zprof/test_export.py": 7, "zhooks/integrations/test_peft.py": 7, "zprof/test_bench.py": 7,
    "zhooks/integrations/test_lightning.py": 6, "zhooks/integrations/test_generate.py": 6, "test_imports.py": 5,
    "test_checkout.py": 5, "zhooks/unit/test_arena_replay.py": 4,
    "architectures/test_trainer.py": 4, "examples/test_train.py": 3, "benchmarks/test_gpu.py": 3,
}  # fmt: skip
#: CPU seconds of a test of any other file.
EACH_S = 0.1


def longest_first(groups: Sequence[str], seconds: Mapping[str, float] = SECONDS) -> list[int]:
    """The places of tests in the order in which they are handed out; ``groups`` has the group of each, a file or another.

    Tests of a group keep their order, and come after one another. A group that no figure is known for counts by its tests.
    """
    counted = Counter(groups)
    cost = {group: seconds.get(group, EACH_S * number) for group, number in counted.items()}
    return sorted(range(len(groups)), key=lambda place: (-cost[groups[place]], groups[place], place))
