"""What operations take on a profile: against arithmetic, published figures, and each other."""

from __future__ import annotations

import math

import pytest

from offload.errors import HardwareError
from offload.hardware import CostModel, Hardware, as_ns

GIB = 1 << 30


def model(name: str = "h100") -> CostModel:
    return CostModel(Hardware.of(name))


def plain(**tables: object) -> CostModel:
    """A profile of round figures: every operation at its peak, 4 devices a node, no latency of links."""
    curve = {"points": [[1.0, 1.0]]}
    return CostModel(
        Hardware.of(
            {
                "device": {"count": 4, "memory": "16 GiB", "memory_bandwidth": "1000 GB/s", "launch": "2 us"},
                "peak": {"fp32": "10 TFLOP/s", "bf16": "100 TFLOP/s"},
                "matmul": curve,
                "memory_bound": curve,
                "link": {"bandwidth": "100 GB/s", "latency": 0},
                "host_link": {"bandwidth": "20 GB/s", "latency": "10 us"},
                "host": {
                    "memory": "64 GiB",
                    "memory_bandwidth": "200 GB/s",
                    "cores": 10,
                    "flops": "1 TFLOP/s",
                    "copy_rate": "10 GB/s",
                    "dispatch": "5 us",
                },
                "disk": {"count": 4, "read": "2 GB/s", "write": "1 GB/s", "latency": "100 us", "capacity": "1 TB"},
                "network": {"bandwidth": "40 GB/s", "latency": 0},
                "power": {"idle": 100, "max": 500, "node": 400},
                "price": {"device_hour": 2.0, "date": "2026-05"},
                **tables,
            }
        )
    )


def test_an_operation_takes_the_longer_of_compute_and_memory() -> None:
    costs = plain()
    assert costs.compute(100e12, 1e9, "bf16") == pytest.approx(1.0)
    assert costs.compute(1e9, 1000e9, "bf16") == pytest.approx(1.0)
    assert costs.compute(0, 10e9) == pytest.approx(0.01)
    assert costs.compute(100e12, 0, "fp32") == pytest.approx(10.0)


def test_no_operation_is_shorter_than_the_shortest_kernel() -> None:
    assert plain().compute(10, 10, "bf16") == plain().compute(0, 0) == pytest.approx(2e-6)


def test_a_larger_operation_never_takes_less_time() -> None:
    for name in ("v100-32", "h100", "b200"):
        costs = model(name)
        sizes = [10 ** (exponent / 4) for exponent in range(16, 56)]
        for dtype in ("fp16", "fp32"):
            seconds = [costs.compute(flops, 0, dtype) for flops in sizes]
            assert seconds == sorted(seconds)
        moved = [costs.compute(0, nbytes) for nbytes in sizes]
        assert moved == sorted(moved)


def test_a_large_product_reaches_the_published_rate() -> None:
    # stas00/ml-engineering, compute/accelerator/README.md: 794.5 TFLOP/s of 2048 x 2048 x 13312 in bf16, a mean of 100.
    flops = 2.0 * 2048 * 2048 * 13312
    assert flops / model().compute(flops, 1e8, "bf16", 2048) == pytest.approx(794.5e12, rel=0.05)
    # Markidis and others: 83 TFLOP/s on V100.
    large = 2.0 * 8192**3
    assert large / model("v100-32").compute(large, 4e8, "float16") == pytest.approx(83e12, rel=0.05)


def test_a_small_dimension_costs() -> None:
    costs = model()
    assert costs.compute(1e11, 0, "bf16", 16) > 3 * costs.compute(1e11, 0, "bf16", 1024)
    assert costs.compute(1e11, 0, "bf16", None) == costs.compute(1e11, 0, "bf16", 4096)


def test_dtypes_are_known_by_both_names() -> None:
    costs = model()
    for words in (("bf16", "bfloat16", "torch.bfloat16"), ("fp16", "half", "float16"), ("fp8", "float8_e4m3fn")):
        assert len({costs.compute(1e12, 0, word) for word in words}) == 1
    # What has no TF32 computes the same in fp32.
    assert model("v100-32").compute(1e12, 0, "tf32") == model("v100-32").compute(1e12, 0, "fp32")


def test_a_dtype_without_a_rate_is_refused_and_looked_at_only_for_products() -> None:
    with pytest.raises(HardwareError, match=r"v100-32: \[peak\] has no rate for bfloat16, it has fp64, fp32, fp16; use one"):
        model("v100-32").compute(1e9, 1e6, "bfloat16")
    assert model("v100-32").compute(0, 1e6, "int64") > 0


def test_copies_take_latency_and_bytes_over_the_slower_of_both_ends() -> None:
    costs = plain()
    assert costs.copy("h2d", 20_000_000_000) == pytest.approx(1 + 10e-6)
    assert costs.copy("h2h", 10_000_000_000) == pytest.approx(1.0)
    assert costs.copy("d2d", 500_000_000_000) == pytest.approx(1.0)
    with pytest.raises(HardwareError, match='expected "h2d", "d2h", "h2h" or "d2d", found \'up\''):
        costs.copy("up", 1)


def test_devices_that_copy_at_once_share_the_node() -> None:
    costs = model("v100-32")
    alone, together = costs.copy("d2h", GIB), costs.copy("d2h", GIB, sharing=16)
    assert GIB / alone == pytest.approx(12e9, rel=0.01)
    assert GIB / together == pytest.approx(3e9, rel=0.01)


def test_requests_hide_each_others_latency_and_share_the_drives() -> None:
    costs = plain()
    assert costs.disk("read", 1 << 30, depth=1) == pytest.approx(100e-6 + GIB / 8e9)
    assert costs.disk("write", 1 << 30, depth=1) == pytest.approx(100e-6 + GIB / 4e9)
    small = costs.disk("read", 4096)
    assert small == pytest.approx(100e-6 + 4096 / 2e9)
    assert costs.disk("read", 4096, depth=32) == pytest.approx(small / 32)
    assert costs.disk("read", 1 << 30, depth=64, sharing=4) == pytest.approx(4 * GIB / 8e9)
    with pytest.raises(HardwareError, match='expected "read" or "write"'):
        costs.disk("append", 1)
    with pytest.raises(HardwareError, match=r"no \[disk\]"):
        CostModel(costs.hardware.replaced(disk=None)).disk("read", 1)


def test_fresh_pages_cost_only_where_the_profile_says_so() -> None:
    assert plain().fresh(GIB) == 0
    assert CostModel(plain().hardware.replaced(host={"fresh_rate": "2 GB/s"})).fresh(2_000_000_000) == pytest.approx(1.0)


def test_an_update_on_the_host_is_bound_by_memory_or_by_cores() -> None:
    costs = plain()
    assert costs.host_update(200e9) == pytest.approx(1.0)
    assert costs.host_update(1, flops=1e12) == pytest.approx(1.0)
    assert costs.host_update(200e9, sharing=4) == pytest.approx(4.0)


def test_threads_as_devices_update_at_their_own_rate_until_they_share() -> None:
    host = plain().hardware.replaced(device={"memory_bandwidth": "150 GB/s"}, link={"bandwidth": "50 GB/s"}).values()
    costs = CostModel(Hardware.of(host | {"kind": "cpu"}))
    assert costs.host_update(150e9) == pytest.approx(1.0)
    assert costs.host_update(150e9, sharing=2) == pytest.approx(1.5)


def test_a_step_has_joules_of_devices_and_whole_nodes_and_a_price() -> None:
    costs = plain()
    cost = costs.step(10.0, 0.5, 5)
    assert cost.joules == pytest.approx(10 * (5 * 300 + 2 * 400))
    assert cost.price == pytest.approx(5 * 2.0 * 10 / 3600)
    bare = CostModel(costs.hardware.replaced(power=None, price=None)).step(1.0, 1.0, 1)
    assert bare.joules is None and bare.price is None


def test_whole_nanoseconds_never_vanish() -> None:
    assert [as_ns(each) for each in (0.0, 1e-12, 1e-9, 2.5e-9, 1.0)] == [0, 0, 1, 3, 10**9]
    assert as_ns(5e-10) == 1
    assert not math.isnan(model().dispatch) and model().dispatch > 0


def test_nothing_is_shared_by_none() -> None:
    costs = plain()
    for call in (
        lambda: costs.copy("h2d", 1, sharing=0),
        lambda: costs.disk("read", 1, depth=0),
        lambda: costs.disk("read", 1, sharing=0),
        lambda: costs.host_update(1, sharing=0),
        lambda: costs.exchange([[0, 1], [1, 0]], costs.group(range(2)), sharing=0),
        lambda: costs.collective("send", 1, costs.group(range(2)), sharing=0),
    ):
        with pytest.raises(HardwareError, match=r"expected .* from 1, found"):
            call()


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_amounts_that_cannot_be_are_refused(amount: float) -> None:
    costs = plain()
    for call in (
        lambda: costs.compute(amount, 1),
        lambda: costs.compute(0, amount),
        lambda: costs.copy("h2h", amount),
        lambda: costs.copy("d2h", amount),
        lambda: costs.fresh(amount),
        lambda: costs.disk("read", amount),
        lambda: costs.host_update(amount),
        lambda: costs.host_update(1, amount),
        lambda: costs.step(amount, 1.0, 1),
        lambda: costs.step(1.0, amount, 1),
        lambda: costs.collective("all_reduce", amount, costs.group(range(2))),  # type: ignore[arg-type]
    ):
        with pytest.raises(HardwareError, match=r"expected .* from 0"):
            call()


def test_ranks_and_devices_that_cannot_be_are_refused() -> None:
    with pytest.raises(HardwareError, match="expected ranks from 0, found -1"):
        plain().group([-1, 0])
    with pytest.raises(HardwareError, match="devices expected a number from 1, found 0"):
        plain().step(1.0, 1.0, 0)


@pytest.mark.parametrize("depth", [1, 4, 64])
def test_a_longer_request_never_takes_a_drive_less_time(depth: int) -> None:
    costs = plain()
    sizes = [stripes * (512 << 10) + more for stripes in range(9) for more in (0, 1, 300_000)]
    times = [costs.disk("read", nbytes, depth=depth) for nbytes in sizes]
    assert times == sorted(times)
    assert costs.disk("read", 600_000) == pytest.approx(100e-6 + (512 << 10) / 2e9)
