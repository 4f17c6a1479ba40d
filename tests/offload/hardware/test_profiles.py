"""What a hardware profile may say: shipped ones with their sources, files of one's own, and what cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.documents import Table
from offload.errors import HardwareError
from offload.hardware import DTYPES, Hardware, names

SHIPPED = ("a100-80", "b200", "h100", "h200", "rtx4090", "v100-32")

every_profile = pytest.mark.parametrize("name", SHIPPED)


def complaint(value: Any) -> str:
    """What `Hardware.of` says against ``value``, without the folder in front of the file's name."""
    with pytest.raises(HardwareError) as raised:
        Hardware.of(value)
    folder = str(value.parent) + os.sep if isinstance(value, Path) else "\0"
    return str(raised.value).replace(folder, "")


def test_the_shipped_profiles_are_listed() -> None:
    assert tuple(names()) == SHIPPED


@every_profile
def test_every_table_of_a_shipped_profile_says_where_its_figures_are_from(name: str) -> None:
    for _, table in Hardware.of(name):
        if isinstance(table, Table):
            source = getattr(table, "source", "")
            assert len(source) > 20, table
            cited = ("http", "arXiv", "assumed", "computed", "stas00/ml-engineering", "NVIDIA")
            assert any(word in source for word in cited), source


@every_profile
def test_a_shipped_profile_comes_back_from_its_text_and_its_values(name: str, tmp_path: Path) -> None:
    profile = Hardware.of(name)
    assert profile.name == name and profile.kind == "gpu"
    path = tmp_path / "copy.toml"
    path.write_text(profile.text())
    assert Hardware.load(path) == profile == Hardware.of(profile.values())


@every_profile
def test_no_shipped_profile_counts_sparsity(name: str) -> None:
    # Of every device here fp16 with tensor cores is at most 31 times its fp32 without; sparse figures would be twice that.
    peak = Hardware.of(name).peak
    rates = {dtype: getattr(peak, dtype) for dtype in DTYPES if getattr(peak, dtype)}
    assert rates["fp16"] <= 31 * rates["fp32"]
    assert rates.get("fp8", 0) <= 2 * rates["fp16"] * 1.01


def test_figures_are_those_of_their_sources() -> None:
    v100, h100 = Hardware.of("v100-32"), Hardware.of("h100")
    assert v100.device.count == 16 and v100.device.memory == 32 << 30
    assert v100.network is not None and v100.network.bandwidth == 100e9
    assert v100.peak.fp16 == 125e12 and v100.peak.bf16 is None
    assert h100.peak.bf16 == 989.4e12 and h100.device.memory_bandwidth == 3.35e12
    assert h100.disk is not None and h100.disk.capacity == 3_840_000_000_000


def test_a_name_that_is_none_gets_the_near_one() -> None:
    assert complaint("h1oo") == (
        'hardware must be one of a100-80, b200, h100, h200, rtx4090, v100-32, found "h1oo"; did you mean h100?'
    )
    assert complaint("tpu").endswith('found "tpu"; name one, or the path of a .toml file')


def test_a_file_takes_its_name_from_the_path(tmp_path: Path) -> None:
    text = "\n".join(line for line in Hardware.of("h100").text().splitlines() if not line.startswith("name"))
    path = tmp_path / "ours.toml"
    path.write_text(text)
    assert Hardware.of(path).name == "ours" == Hardware.of(str(path)).name


def with_keys(table: str, **keys: Any) -> dict[str, Any]:
    values = Hardware.of("h100").values()
    values[table] = values.get(table, {}) | keys
    return values


RATE = 'expected bytes a second above 0, or text like "3.35 TB/s" or "800 Gb/s"'
IMPOSSIBLE = {
    "no bandwidth": (
        ("network", {"bandwidth": 0}),
        f"hardware: [network] bandwidth: {RATE}, found 0",
    ),
    "negative": (
        ("device", {"memory_bandwidth": -1.0}),
        f"hardware: [device] memory_bandwidth: {RATE}, found -1.0",
    ),
    "link above its memory": (
        ("link", {"bandwidth": "4 TB/s"}),
        "hardware: [link] bandwidth: found 4 TB/s, more than [device] memory_bandwidth, 3.35 TB/s, which it goes through",
    ),
    "link above its bus": (
        ("link", {"bandwidth": "60 GB/s", "through": "pcie"}),
        "hardware: [link] bandwidth: found 60 GB/s, more than [host_link] bandwidth, 55.43 GB/s, which it goes through",
    ),
    "host link above memory": (
        ("host_link", {"bandwidth": "700 GB/s"}),
        "hardware: [host_link] bandwidth: found 700 GB/s, more than [host] memory_bandwidth, 614.4 GB/s, which it goes through",
    ),
    "node above its devices": (
        ("host_link", {"node_bandwidth": "500 GB/s"}),
        "hardware: [host_link] node_bandwidth: found 500 GB/s, more than 8 x [host_link] bandwidth, 443.44 GB/s, "
        "which it goes through",
    ),
    "node below a device": (
        ("host_link", {"node_bandwidth": "5 GB/s"}),
        "hardware: [host_link] node_bandwidth: found 5 GB/s, less than one device's 55.43 GB/s: it is what all devices of "
        "a node reach at once",
    ),
    "network above its links": (
        ("network", {"bandwidth": "6400 Gb/s"}),
        "hardware: [network] bandwidth: found 800 GB/s, more than 8 x [host_link] bandwidth, 443.44 GB/s, "
        "which it goes through",
    ),
    "drives above memory": (
        ("disk", {"read": "100 GB/s"}),
        "hardware: [disk] read: found 800 GB/s, more than [host] memory_bandwidth, 614.4 GB/s, which it goes through",
    ),
    "efficiency above 1": (
        ("link", {"efficiency": 1.2}),
        "hardware: [link] efficiency: expected a number above 0 and at most 1, found 1.2",
    ),
    "idle above busy": (("power", {"idle": 900}), "hardware: [power] idle: found 900 W, more than [power] max, 700 W"),
    "curve without peak": (
        ("peak", {"tf32": None}),
        "hardware: [matmul] tf32: found a curve, and [peak] has no tf32; write the peak, or leave the curve out",
    ),
    "unknown key": (
        ("network", {"bandwith": 1}),
        "hardware: [network] bandwith: unknown key; did you mean bandwidth?",
    ),
    "bits written as none": (
        ("network", {"bandwidth": "400 gbps"}),
        f'hardware: [network] bandwidth: {RATE}, found "400 gbps"',
    ),
}


@pytest.mark.parametrize(("change", "said"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_is_refused_by_name(change: tuple[str, dict[str, Any]], said: str) -> None:
    table, keys = change
    assert complaint(with_keys(table, **keys)) == said


CURVES = {
    "falling size": [[10, 0.5], [5, 0.6]],
    "above 1": [[10, 1.5]],
    "zero": [[10, 0.0]],
    "more work in less time": [[10, 0.01], [20, 0.9]],
    "no point": [],
    "a number": 0.5,
}


@pytest.mark.parametrize("points", CURVES.values(), ids=CURVES)
def test_a_curve_that_cannot_be_is_refused(points: Any) -> None:
    said = complaint(with_keys("memory_bound", points=points))
    assert said.startswith("hardware: [memory_bound] points: expected a list of [size, fraction], sizes growing")


def test_a_mistake_in_a_file_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    text = Hardware.of("h100").text().replace('bandwidth = "400 GB/s"', 'bandwidth = "0 GB/s"')
    path.write_text(text)
    line = text.splitlines().index('bandwidth = "0 GB/s"') + 1
    assert complaint(path).startswith(f"ours.toml:{line}: [network] bandwidth: expected bytes a second above 0")


def test_missing_tables_and_unread_files_are_refused(tmp_path: Path) -> None:
    assert "device: expected a table, found nothing; write it" in complaint({})
    assert complaint(tmp_path / "none.toml") == "none.toml: no such hardware profile file"
    assert "expected a hardware profile file of at most 1 MiB" in complaint(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("device = [")
    assert complaint(broken).startswith("broken.toml:1: not valid TOML")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (1 << 21))
    assert "at most 1 MiB" in complaint(large)
    os.mkfifo(tmp_path / "pipe.toml")
    assert "named pipe" in complaint(tmp_path / "pipe.toml")


@pytest.mark.parametrize("value", [7, None, ["h100"], object()])
def test_what_is_no_profile_at_all_is_refused(value: Any) -> None:
    assert "must be one of a100-80" in complaint(value)


def test_tables_of_other_kinds_are_refused_by_name() -> None:
    assert complaint({1: 2}) == "hardware needs names for keys, found int"
    assert "hardware: device: expected a table, found 5" in complaint({"device": 5})
    assert "hardware: name: expected a name, found 5" in complaint(Hardware.of("h100").values() | {"name": 5})
    assert "hardware: kind: expected" in complaint(Hardware.of("h100").values() | {"kind": "tpu"})


def test_keys_are_replaced_and_checked_again() -> None:
    slow = Hardware.of("h100").replaced(network={"bandwidth": "200 Gb/s"}, device={"memory": "40 GiB"})
    assert slow.network is not None and slow.network.bandwidth == 25e9
    assert slow.device.memory == 40 << 30
    assert slow.link == Hardware.of("h100").link
    assert Hardware.of("h100").replaced(network=None).network is None
    with pytest.raises(HardwareError, match="more than"):
        Hardware.of("h100").replaced(network={"bandwidth": "9 TB/s"})


def test_curves_by_operation_are_written_and_read_and_checked(tmp_path: Path) -> None:
    curves = {"by_operation": {"gelu": [[1e6, 0.25]], "_softmax": [[1e4, 0.1], [1e6, 0.2]]}}
    profile = Hardware.of("h100").replaced(memory_bound=curves)
    file = tmp_path / "ours.toml"
    file.write_text(profile.text())
    assert Hardware.load(file).memory_bound == profile.memory_bound
    with pytest.raises(HardwareError, match="by_operation"):
        Hardware.of("h100").replaced(memory_bound={"by_operation": {"gelu": [[1e6, 2.0]]}})


@pytest.mark.parametrize("digits", [30, 309, 400])
@pytest.mark.parametrize("key", ["[peak]\nfp64", "[memory]\nbandwidth", "[overhead]\nlaunch"])
def test_an_integer_above_every_float_is_refused_by_its_line(tmp_path: Path, digits: int, key: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(f"{key} = {'9' * digits}\n")
    assert complaint(path).startswith("machine.toml:")
