"""The policies that are searched: each is one, none is listed twice, and none lies farther from compute than it need."""

from __future__ import annotations

import pytest

from offload.policy import Policy
from offload.tier import Tier, Tiers
from zhooks.simulate.axes import Batch, Candidate, batches, candidates, saves

BF16 = Policy.of({"precision": {"param": "bf16"}})
HOST = Tiers(Tier.DEVICE, Tier.HOST, Tier.HOST)


def test_each_candidate_is_a_policy_of_its_own_and_plain_ones_come_first() -> None:
    found = list(candidates(BF16, 8))
    assert len(found) == len(set(found)) and found[0] == Candidate(0)
    policies = [each.policy(BF16) for each in found]
    assert all(one != other for number, one in enumerate(policies) for other in policies[:number])
    assert {each.stage for each in found} == {0, 1, 2, 3}
    assert {each.tiers.parameter for each in found if each.stage in (1, 2)} == {Tier.DEVICE}


def test_one_rank_has_one_stage_and_hardware_without_a_disk_two_tiers() -> None:
    found = list(candidates(BF16, 1, tiers=(Tier.DEVICE, Tier.HOST)))
    assert {each.stage for each in found} == {3}
    assert all(Tier.DISK not in (each.tiers.parameter, each.tiers.gradient, each.tiers.optimizer) for each in found)


def test_what_the_users_policy_says_of_other_keys_stays() -> None:
    base = Policy.of({"precision": {"param": "bf16"}, "units": {"min_numel": 5}, "comm": {"transport": "p2p"}, "stage": 1})
    made = Candidate(3, HOST, compute="host", checkpoint="unit", kept=True).policy(base)
    assert (made.stage, made.gradient.tier, made.optimizer.compute, made.activation.checkpoint) == (3, "host", "host", "unit")
    assert made.schedule.reshard_after_forward is False
    assert (made.precision.param, made.units.min_numel, made.comm.transport) == ("bf16", 5, "p2p")


def test_what_the_users_policy_rules_out_is_no_candidate() -> None:
    # In fp32 replicated parameters are masters too, which the host cannot update on the device.
    wide = [each for each in candidates(Policy(), 8) if each.compute == "host"]
    assert wide and all(each.tiers.parameter is not Tier.DEVICE for each in wide)


def test_a_step_is_divided_into_as_many_samples() -> None:
    assert batches(12, 1) == (Batch(12, 1), Batch(6, 2), Batch(3, 4))


@pytest.mark.parametrize(
    ("candidate", "beside", "expected"),
    [
        (Candidate(3, HOST), Candidate(3), True),
        (Candidate(3, HOST, compute="host"), Candidate(3), True),
        (Candidate(3, HOST, compute="host"), Candidate(3, HOST), False),
        (Candidate(3, checkpoint="unit"), Candidate(3), True),
        (Candidate(3), Candidate(3, checkpoint="unit"), False),
        (Candidate(3), Candidate(3, kept=True), False),
        (Candidate(2), Candidate(3), False),
        (Candidate(2, batch=Batch(1, 4)), Candidate(2, batch=Batch(2, 2)), True),
        (Candidate(2, batch=Batch(2, 2)), Candidate(2, batch=Batch(1, 4)), False),
    ],
)
def test_which_only_save_memory(candidate: Candidate, beside: Candidate, expected: bool) -> None:
    assert saves(candidate, beside, one_memory=False) is expected
    assert not saves(candidate, candidate, one_memory=False)


def test_on_a_cpu_the_host_tier_saves_nothing() -> None:
    assert not saves(Candidate(3, HOST), Candidate(3), one_memory=True)


def test_ranks_that_share_their_samples_have_as_many_in_a_step() -> None:
    found = list(candidates(BF16, 8, batched=batches(4, 1), divided=(1, 2, 8)))
    assert len(found) == len(set(found)) and {each.tp for each in found} == {1, 2, 8}
    samples = {(each.tp, each.batch.micro_batch * each.batch.accumulation) for each in found if each.batch}
    assert samples == {(1, 4), (2, 8), (8, 32)}
    assert {each.batch.micro_batch for each in found if each.batch and each.tp == 2} == {8, 4, 2, 1}
    # Where all ranks share one batch there is nobody to share states with.
    assert {each.stage for each in found if each.tp == 8} == {3}


def test_a_step_is_not_divided_into_more_micro_batches_than_can_be_simulated() -> None:
    assert batches(1 << 15, 1)[-1] == Batch(512, 64) and batches(12, 1)[-1] == Batch(3, 4)
    assert batches(8, 200) == (Batch(8, 200),), "what the step says itself is not changed"


def test_each_candidate_s_mesh_has_all_ranks() -> None:
    found = list(candidates(BF16, 16, batched=batches(2, 1), divided=(1, 4), replicas=(1, 2)))
    assert {each.replicate for each in found} == {1, 2}
    for each in found:
        mesh = each.mesh(16) or {"shard": 16}
        assert mesh.get("replicate", 1) * mesh["shard"] * mesh.get("tp", 1) == 16
        assert [name for name in ("replicate", "shard", "tp") if name in mesh] == list(mesh)


def test_16_bits_with_few_exponents_get_a_loss_scale_that_a_simulation_does_not() -> None:
    found = list(candidates(Policy(), 1, dtypes=("fp16", "bf16")))
    half = next(each for each in found if each.dtype == "fp16")
    assert half.policy(Policy()).precision.loss_scale == "dynamic" and half.simulated(Policy()).precision.loss_scale is None
    given = Policy.of({"precision": {"loss_scale": 512.0, "param": "fp16"}})
    assert half.policy(given).precision.loss_scale == 512.0
    assert all(each.policy(Policy()).precision.loss_scale is None for each in found if each.dtype == "bf16")
    overlapped = Policy.of({"optimizer": {"overlap": True}})
    assert {each.dtype for each in candidates(overlapped, 1, dtypes=("fp16", "bf16"))} == {"bf16"}
