"""What collectives take over a topology: floors that no algorithm beats, published bandwidths, and traffic that adds up."""

from __future__ import annotations

from typing import Any

import pytest

from offload.errors import HardwareError
from offload.hardware import KINDS, CostModel, Group, Hardware

GB = 10**9


def flat(**link: Any) -> CostModel:
    """H100 nodes without latency, every link at its bandwidth: 100 GB/s a device, 40 GB/s a node."""
    still: dict[str, Any] = {"start": 0, "latency": 0, "short_latency": None, "short_start": None, "efficiency": 1.0}
    network = {"bandwidth": "40 GB/s", "latency": 0, "short_latency": None, "efficiency": 1.0}
    return CostModel(Hardware.of("h100").replaced(link=still | {"bandwidth": "100 GB/s"} | link, network=network))


def test_a_ring_in_a_node_moves_the_bytes_it_must() -> None:
    costs = flat()
    group = costs.group(range(8))
    gathered = costs.collective("all_gather", 8 * GB, group)
    assert gathered.seconds == pytest.approx(7 / 8 * 8 / 100)
    assert (gathered.algorithm, gathered.link_nbytes, gathered.network_nbytes) == ("ring", 7 * GB, 0)
    assert costs.collective("reduce_scatter", 8 * GB, group) == gathered
    reduced = costs.collective("all_reduce", 8 * GB, group)
    assert reduced.seconds == pytest.approx(2 * gathered.seconds)
    assert reduced.link_nbytes == 14 * GB


def test_no_gather_is_faster_than_its_share_over_the_link() -> None:
    for name in ("v100-32", "a100-80", "h100", "b200"):
        costs = CostModel(Hardware.of(name))
        for ranks in (2, 8, 16, 24, 1024):
            group = costs.group(range(ranks))
            for nbytes in (1, 1 << 10, 1 << 20, 1 << 30):
                moved = nbytes * (ranks - 1) / ranks
                found = costs.collective("all_gather", nbytes, group)
                floor = moved / costs.hardware.link.bandwidth
                if group.nodes > 1:
                    assert costs.hardware.network is not None
                    floor = max(floor, nbytes * (group.nodes - 1) / group.nodes / costs.hardware.network.bandwidth)
                assert found.seconds >= floor
                assert costs.collective("all_reduce", nbytes, group).seconds >= floor


# Bus bandwidths, GB/s: stas00/ml-engineering, network/README.md, measured by nccl-tests on one node of 8 (A100: all-reduce).
PUBLISHED = {
    "a100-80": ("all_reduce", 235.0),
    "h200": ("all_gather", 361.4),
    "b200": ("all_reduce", 682.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_large_collective_of_a_node_reaches_the_published_bandwidth(name: str) -> None:
    kind, published = PUBLISHED[name]
    costs = CostModel(Hardware.of(name))
    nbytes = 16 << 30
    factor = (2 if kind == "all_reduce" else 1) * 7 / 8
    busbw = factor * nbytes / costs.collective(kind, nbytes, costs.group(range(8)), algorithm="ring").seconds / GB
    assert busbw == pytest.approx(published, rel=0.01)


def test_short_messages_take_latency_alone() -> None:
    costs = CostModel(Hardware.of("h100"))
    link, group = costs.hardware.link, costs.group(range(8))
    assert link.short_latency is not None and link.short_start is not None
    barrier = costs.collective("barrier", 0, group)
    assert barrier.seconds == pytest.approx(link.short_start + 14 * link.short_latency, rel=0.01)
    # nccl-tests has some tens of microseconds for the shortest all-reduce of a node.
    assert 5e-6 < barrier.seconds < 60e-6


def test_over_nodes_the_slower_level_decides_and_traffic_is_counted_by_level() -> None:
    costs = flat()
    group = costs.group(range(32))
    assert group == Group(32, 4, 8)
    gathered = costs.collective("all_gather", 32 * GB, group)
    assert gathered.seconds == pytest.approx(31 / 40)
    assert gathered.link_nbytes == gathered.network_nbytes == 31 * GB


def test_groups_at_once_share_the_network() -> None:
    costs = flat()
    column = costs.group(range(0, 32, 8))
    assert column == Group(4, 4, 1) and column.alike(8) == 8
    alone = costs.collective("all_reduce", 4 * GB, column)
    together = costs.collective("all_reduce", 4 * GB, column, sharing=column.alike(8))
    # Alone the device's own link to the host bounds it above the network's 40 GB/s.
    assert alone.seconds == pytest.approx(6 / 40)
    assert together.seconds == pytest.approx(6 / (40 / 8))
    assert alone.network_nbytes == together.network_nbytes == 6 * GB


def test_a_single_device_reaches_the_network_no_faster_than_through_its_own_link() -> None:
    costs = CostModel(flat().hardware.replaced(network={"bandwidth": "400 GB/s"}))
    sent = costs.collective("send", 10 * GB, costs.group([0, 8]))
    assert sent.seconds == pytest.approx(10 / 55.43)


def test_a_tree_wins_for_short_all_reduces_over_many_nodes_and_a_ring_for_long_ones() -> None:
    costs = CostModel(Hardware.of("h100"))
    group = costs.group(range(1024))
    assert costs.collective("all_reduce", 1 << 16, group).algorithm == "tree"
    long = 1 << 40
    assert costs.collective("all_reduce", long, group).algorithm == "ring"
    ring, tree = (costs.collective("all_reduce", long, group, algorithm=each) for each in ("ring", "tree"))
    assert ring.seconds < tree.seconds
    assert costs.collective("all_gather", 1 << 16, group).algorithm == "ring"


def test_a_hierarchical_gather_takes_fewer_hops_and_its_parts_add_up() -> None:
    costs = CostModel(Hardware.of("h100"))
    group = costs.group(range(1024))
    flatly = costs.collective("all_gather", 1 << 20, group)
    nested = costs.collective("all_gather", 1 << 20, group, algorithm="hierarchical")
    assert nested.algorithm == "hierarchical" and nested.seconds < flatly.seconds / 2
    between = costs.collective("all_gather", (1 << 20) // 8, Group(128, 128, 1), sharing=8)
    inside = costs.collective("all_gather", 1 << 20, Group(8, 1, 8))
    assert nested.seconds == pytest.approx(between.seconds + inside.seconds)
    assert nested.network_nbytes == 8 * between.network_nbytes


def test_a_hierarchical_all_reduce_crosses_nodes_with_the_bytes_it_must() -> None:
    costs = flat()
    nested = costs.collective("all_reduce", 32 * GB, costs.group(range(32)), algorithm="hierarchical")
    assert nested.network_nbytes == pytest.approx(2 * 3 / 4 * 32 * GB)
    assert nested.seconds == pytest.approx(2 * 7 / 8 * 32 / 100 + 2 * 3 / 4 * 32 / 40)
    with pytest.raises(HardwareError, match="expected as many ranks on every node, found 10 on 2 nodes"):
        costs.collective("all_reduce", GB, costs.group(range(10)), algorithm="hierarchical")
    with pytest.raises(HardwareError, match="there is no such algorithm"):
        costs.collective("all_to_all", GB, costs.group(range(32)), algorithm="hierarchical")


def test_broadcast_and_send_pass_every_byte_once() -> None:
    costs = flat()
    for kind in ("broadcast", "reduce", "send"):
        assert costs.collective(kind, 100 * GB, costs.group(range(2))).seconds == pytest.approx(1.0)
    assert costs.collective("broadcast", 40 * GB, costs.group(range(16))).seconds == pytest.approx(1.0)


def test_an_even_exchange_is_an_all_to_all() -> None:
    costs = flat()
    for ranks in (8, 32):
        group = costs.group(range(ranks))
        rows = [[GB] * ranks for _ in range(ranks)]
        even = costs.collective("all_to_all", ranks * GB, group)
        assert costs.exchange(rows, group) == even
    assert costs.collective("all_to_all", 8 * GB, costs.group(range(8))).seconds == pytest.approx(7 / 100)


def test_the_busiest_rank_decides_an_uneven_exchange() -> None:
    costs = flat()
    group = costs.group(range(4))
    rows = [[0, GB, GB, GB], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert costs.exchange(rows, group).seconds == pytest.approx(3 / 100)
    gathered = [[0, 0, 0, GB], [0, 0, 0, GB], [0, 0, 0, GB], [0, 0, 0, GB]]
    assert costs.exchange(gathered, group).link_nbytes == 3 * GB
    with pytest.raises(HardwareError, match="expected 4 rows of 4 numbers"):
        costs.exchange(rows[:3], group)
    with pytest.raises(HardwareError, match="expected 4 rows of 4 numbers"):
        costs.exchange([[-1] * 4] * 4, group)


def in_memory() -> CostModel:
    """Ranks that are threads of one host: 10 GB/s each, 15 GB/s together."""
    values = Hardware.of("rtx4090").values()
    values |= {"kind": "cpu", "device": values["device"] | {"count": 4}}
    values["link"] = {"bandwidth": "10 GB/s", "node_bandwidth": "15 GB/s", "through": "memory", "latency": "20 us"}
    return CostModel(Hardware.of(values))


def test_through_memory_every_rank_copies_in_once_and_out_once() -> None:
    costs = in_memory()
    two = costs.group(range(2))
    gathered = costs.collective("all_gather", 10 * GB, two)
    assert (gathered.algorithm, gathered.link_nbytes) == ("memory", 10 * GB)
    assert gathered.seconds == pytest.approx(20e-6 + 10 / 7.5)
    assert costs.collective("reduce_scatter", 10 * GB, two).link_nbytes == 10 * GB
    assert costs.collective("all_reduce", 10 * GB, two).seconds == pytest.approx(40e-6 + 20 / 7.5)
    assert costs.exchange([[0, GB], [GB, 0]], two).link_nbytes == 2 * GB


def test_one_rank_pays_nothing() -> None:
    costs = CostModel(Hardware.of("h100"))
    for kind in KINDS:
        assert costs.collective(kind, GB, costs.group([3])).seconds == 0
    assert costs.exchange([[5]], costs.group([3])).seconds == 0


def test_what_a_profile_cannot_do_is_refused() -> None:
    desktop = CostModel(Hardware.of("rtx4090"))
    with pytest.raises(HardwareError, match=r"rtx4090: 2 ranks are on 2 nodes of 1 devices, .* no \[network\]"):
        desktop.collective("all_gather", 1, desktop.group(range(2)))
    costs = CostModel(Hardware.of("h100"))
    with pytest.raises(HardwareError, match=r"expected one of all_gather, .* found 'gather'"):
        costs.collective("gather", 1, costs.group(range(2)))
    with pytest.raises(HardwareError, match="expected one of auto, ring, tree, hierarchical, found 'butterfly'"):
        costs.collective("all_reduce", 1, costs.group(range(2)), algorithm="butterfly")
    with pytest.raises(HardwareError, match="expected bytes from 0"):
        costs.collective("all_reduce", -1, costs.group(range(2)))
    for ranks in ([], [1, 1]):
        with pytest.raises(HardwareError, match="expected ranks, each once"):
            costs.group(ranks)


def test_a_link_curve_slows_short_messages_alone() -> None:
    costs = flat(points=[[1e6, 0.1], [1e9, 1.0]])
    group = costs.group(range(8))
    assert costs.collective("all_gather", 8 * GB, group).seconds == pytest.approx(7 / 100)
    assert costs.collective("all_gather", 1_000_000, group).seconds == pytest.approx(7 / 8 * 1e6 / 10e9)
