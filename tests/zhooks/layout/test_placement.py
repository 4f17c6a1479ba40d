"""What each row of the table of ZeRO asks for: when parameters are gathered, and when gradients are reduced.

pytest runs it; it starts no process. That an attachment does so is asked wherever it trains.
"""

from __future__ import annotations

import pytest

from offload.policy import Policy
from offload.tier import Tier, Tiers
from zhooks.layout import Placement, Table

R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_a_row_of_the_table(stage: int) -> None:
    table = Table.of(Policy.of({"stage": stage}).table())
    assert table.gathers_at_use is (stage == 3)
    assert table.shards_optimizer is (stage > 0)
    assert table.accumulates_unreduced is (stage < 2)


@pytest.mark.parametrize("tier", list(Tier))
def test_parameters_stay_gathered_where_they_are_replicated_and_rest_on_the_device(tier: Tier) -> None:
    tiers = Tiers(tier, Tier.HOST, Tier.HOST)
    assert Table(R, S, S).keeps_gathered(tiers) is (tier is Tier.DEVICE)
    assert not Table(S, S, S).keeps_gathered(tiers)


def test_cells_are_read_by_their_names() -> None:
    assert Table.of({"optimizer": "S", "gradient": "P", "parameter": "R"}) == Table(R, P, S)
    assert Table(R, P, S).accumulates_unreduced and not Table(R, S, P).shards_optimizer
