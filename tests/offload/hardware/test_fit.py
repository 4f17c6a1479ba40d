"""From measured times to a profile: what was measured is predicted, and what is left over is said."""

from __future__ import annotations

import pytest

from offload.errors import HardwareError
from offload.hardware import CostModel, Hardware, Sample, fit


def threads() -> Hardware:
    """A profile of threads with a figure of its own for everything that a fit may change."""
    curve = {"points": [[1.0, 1.0]]}
    return Hardware.of(
        {
            "kind": "cpu",
            "device": {"count": 2, "memory": "8 GiB", "memory_bandwidth": "1 GB/s", "launch": 0},
            "peak": {"fp32": "1 GFLOP/s"},
            "matmul": curve,
            "memory_bound": curve,
            "link": {"bandwidth": "1 GB/s", "latency": 0, "through": "memory"},
            "host_link": {"bandwidth": "1 GB/s", "latency": 0},
            "host": {
                "memory": "16 GiB",
                "memory_bandwidth": "5 GB/s",
                "cores": 2,
                "flops": "100 GFLOP/s",
                "copy_rate": "1 GB/s",
                "dispatch": 0,
            },
            "disk": {"count": 1, "read": "1 GB/s", "write": "1 GB/s", "latency": 0, "capacity": "1 TB"},
        }
    )


DISPATCH = 2e-6


def machine() -> list[Sample]:
    """Exact times of a machine: 50 GFLOP/s and less for small products, 20 GB/s in caches and 8 outside, 3 between ranks."""
    samples = [Sample("dispatch", DISPATCH)]
    for n in (32, 64, 128, 256, 512):
        flops = 2.0 * n**3
        rate = 50e9 * min(1.0, 0.2 * n / 32)
        samples.append(Sample("matmul", DISPATCH + flops / rate, 12 * n * n, flops, "fp32", n))
        samples.append(Sample("matmul", DISPATCH + flops / (rate / 2), 12 * n * n, flops, "fp64", n))
    samples.append(Sample("matmul", DISPATCH + 2.0 * 256**3 / 10e9, 10, 2.0 * 256**3, "fp32", 16))
    for nbytes in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
        rate = 20e9 if nbytes <= 1 << 20 else 8e9
        samples.append(Sample("memory", DISPATCH + nbytes / rate, nbytes))
        samples.append(Sample("h2d", 10e-6 + nbytes / 4e9, nbytes))
        samples.append(Sample("disk read", 100e-6 + nbytes / 2e9, nbytes))
        samples.append(Sample("disk write", 100e-6 + nbytes / 1e9, nbytes))
        for kind in ("all_gather", "reduce_scatter"):
            samples.append(Sample(kind, 30e-6 + nbytes / 3e9, nbytes, ranks=2))
    return [*samples, Sample("h2h", 1 / 6, 10**9), Sample("fresh", 1 / 2, 10**9)]


def test_a_machine_without_noise_is_predicted_as_it_was_measured() -> None:
    fitted = fit(threads(), machine())
    assert {each.what for each in fitted.residuals} == {each.what for each in machine()}
    for each in fitted.residuals:
        # A square with a small dimension that reaches the peak is taken for one that does not quite.
        assert each.worst < (0.2 if each.what == "matmul" else 0.01) and each.median < 0.01, fitted.text()


def test_the_figures_are_the_machines() -> None:
    profile = fit(threads(), machine()).hardware
    assert profile.peak.fp32 == pytest.approx(50e9, rel=0.01) and profile.peak.fp64 == pytest.approx(25e9, rel=0.01)
    assert profile.device.memory_bandwidth == pytest.approx(20e9, rel=0.01)
    assert profile.disk is not None and profile.disk.read == pytest.approx(2e9, rel=0.01)
    assert profile.disk.write == pytest.approx(1e9, rel=0.01) and profile.disk.latency == pytest.approx(100e-6, rel=0.01)
    assert profile.host.dispatch == DISPATCH and profile.host.fresh_rate == pytest.approx(2e9)
    assert profile.matmul.by_dim is not None
    # What is not measured stays; what measured things go through is as fast as they are.
    assert profile.device.memory == threads().device.memory
    assert profile.host.memory_bandwidth == pytest.approx(12e9, rel=0.01)


def test_times_between_the_measured_sizes_are_between_theirs() -> None:
    costs = CostModel(fit(threads(), machine()).hardware)
    middle = costs.compute(2.0 * 181**3, 0, "fp32")
    assert costs.compute(2.0 * 128**3, 0, "fp32") < middle < costs.compute(2.0 * 256**3, 0, "fp32")
    group = costs.group(range(2))
    assert costs.collective("all_gather", 1 << 22, group).seconds == pytest.approx(30e-6 + (1 << 22) / 3e9, rel=0.1)


def test_the_residuals_are_said_as_a_table() -> None:
    noisy = [Sample("h2h", 1.0, 10**9), Sample("h2h", 2.0, 10**9), Sample("h2h", 4.0, 10**9)]
    fitted = fit(threads(), noisy)
    assert fitted.text().splitlines() == [
        "measured       samples  median error   worst",
        "h2h                  3        50.0%  100.0%",
    ]


def test_a_fitted_profile_is_a_file_like_any_other() -> None:
    profile = fit(threads(), machine()).hardware
    assert Hardware.of(profile.values()) == profile


def test_without_samples_nothing_changes() -> None:
    assert fit(threads(), []).hardware == threads()
    assert fit(threads(), []).residuals == ()


def test_latency_that_hides_the_rate_is_still_a_profile() -> None:
    profile = fit(threads(), [Sample("disk read", 1e-3, 1 << 12), Sample("disk read", 0.9e-3, 1 << 16)]).hardware
    assert profile.disk is not None and profile.disk.latency > 0


@pytest.mark.parametrize("sample", [Sample("h2h", 0.0, 5), Sample("h2h", float("nan"), 5), Sample("lunch", 1.0)])
def test_what_is_no_measurement_is_refused(sample: Sample) -> None:
    with pytest.raises(HardwareError, match="fit expected a time above 0 of one of dispatch"):
        fit(threads(), [sample])


def test_an_operation_with_a_name_is_predicted_by_its_own_curve_and_others_as_before() -> None:
    size = 1 << 20
    slow, product = DISPATCH + size / 0.5e9, DISPATCH + 1e9 / 20e9
    samples = [
        Sample("operation", slow, size, name="gelu"),
        Sample("operation", product, size, 1e9, name="convolution"),
    ]
    before, after = fit(threads(), machine()), fit(threads(), [*machine(), *samples])
    costs, others = CostModel(after.hardware), CostModel(before.hardware)
    assert DISPATCH + costs.compute(0, size, operation="gelu") == pytest.approx(slow, rel=1e-3)
    assert DISPATCH + costs.compute(1e9, size, operation="convolution") == pytest.approx(product, rel=1e-3)
    assert costs.compute(0, size, operation="mul") == others.compute(0, size)
    assert costs.compute(1e9, size, "fp32", 512, "mm") == others.compute(1e9, size, "fp32", 512)
    assert Hardware.of(after.hardware.values()) == after.hardware


def test_a_call_of_python_s_takes_what_was_measured() -> None:
    assert fit(threads(), [*machine(), Sample("call", 3e-7)]).hardware.host.call == pytest.approx(3e-7)
    assert fit(threads(), machine()).hardware.host.call is None
