"""Messages between ranks that send to and receive from each other directly: whose bytes are taken for whose.

pytest runs it, on two ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zhooks
from offload.policy import Policy
from tests.support.on_ranks import on_ranks, place
from zhooks.comm import CONTROL, GATHER, REDUCE, Call, open_comm
from zhooks.comm.transport import CHANNELS
from zhooks.cpu_transport.p2p import tag_of
from zhooks.layout import FLATS, flat_layout, resolve


def test_no_two_units_of_a_large_model_share_a_tag() -> None:
    for channel, what in ((GATHER, "gather"), (REDUCE, "reduce")):
        tags = {tag_of(Call(channel, what, "", unit * FLATS + flat), 7) for unit in range(2048) for flat in range(3)}
        assert len(tags) == 2048 * 3
    assert len({tag_of(Call(channel, "gather", "", 5), 7) for channel in CHANNELS}) == len(CHANNELS)
    assert 0 <= tag_of(Call(REDUCE, "reduce", "", 1 << 40), 1 << 40) < 1 << 31


PAIRS = (
    (Call(GATHER, "gather", "layers.0", 0), Call(GATHER, "gather", "layers.256", 256 * FLATS)),
    (Call(CONTROL, "full_tensor", "layer.q.weight", 5), Call(CONTROL, "full_tensor", "layer.k.weight", 5)),
)


@pytest.mark.slow
@on_ranks(2)
def test_no_rank_takes_the_bytes_of_another_call_for_its_own() -> None:
    rank, world = place()
    layout = flat_layout([8], world=world, itemsize=4)
    policy = Policy.of({"comm": {"transport": "p2p", "timeout_s": 4}})
    for pair in PAIRS:
        comm = open_comm(resolve(None), policy, torch.device("cpu"))
        shard, full = torch.full((layout.shard_numel,), float(rank)), torch.empty(layout.padded)
        comm.shard.all_gather(pair[0], shard, full, layout).wait()
        assert full.tolist() == [0.0] * layout.shard_numel + [1.0] * layout.shard_numel
        with pytest.raises(zhooks.DivergenceError, match=pair[rank].key):
            comm.shard.all_gather(pair[rank], shard, full, layout).wait()
        dist.barrier()
        comm.close()
