"""``zprof hardware`` and ``zprof bench --profile``: profiles listed, shown and measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offload.hardware import CostModel, Hardware
from tests.support.paths import ROOT
from zprof.bench import operations, samples
from zprof.cli import main
from zprof.commands.hardware_docs import main as write_page
from zprof.commands.hardware_docs import render, tables


def zprof(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_the_shipped_profiles_are_listed_with_what_they_are() -> None:
    result = zprof("hardware", "list")
    assert result.exit_code == 0
    assert re.search(r"^v100-32  NVIDIA Tesla V100 .*DGX-2", result.stdout, re.MULTILINE)
    told = json.loads(zprof("hardware", "list", "--json").stdout)
    assert list(told["profiles"]) == ["a100-80", "b200", "h100", "h200", "rtx4090", "v100-32"]


def test_a_profile_is_shown_as_a_file_with_its_sources(tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(zprof("hardware", "show", "h200").stdout)
    assert Hardware.load(path) == Hardware.of("h200")
    assert path.read_text().count("source = ") == 11
    assert Hardware.of(json.loads(zprof("hardware", "show", str(path), "--json").stdout)) == Hardware.of("h200")


def test_a_profile_that_cannot_be_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(Hardware.of("h100").text().replace('efficiency = 0.85', "efficiency = 1.85"))
    result = zprof("hardware", "show", str(path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.match(r".*ours\.toml:\d+: \[network\] efficiency: expected a number above 0 and at most 1, ", result.stderr)
    assert zprof("hardware", "show", "h1oo").stderr.rstrip().endswith("did you mean h100?")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A profile of this machine, small; what is printed of it."""
    path = tmp_path_factory.mktemp("bench") / "here.toml"
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(samples, "REPEATS", 2)
        smaller.setattr(operations, "REPEATS", 2)
        smaller.setattr(samples, "_SQUARES", (16, 32, 64, 128, 256))
        smaller.setattr(samples, "_NARROW", ((4, 512, 512), (16, 256, 256)))
        result = zprof("bench", "--profile", str(path), "--size", "1MiB", "--path", str(path.parent), "--json")
    assert result.exit_code == 0, result.stderr
    return path, json.loads(result.stdout)


def test_this_machine_is_measured_into_a_profile(measured: tuple[Path, dict[str, Any]]) -> None:
    path, told = measured
    profile = Hardware.load(path)
    assert profile == Hardware.of(told["hardware"])
    assert (profile.name, profile.kind, profile.link.through) == ("here", "cpu", "memory")
    assert profile.peak.fp32 is not None and profile.peak.fp32 > 1e8
    assert profile.disk is not None and profile.host.fresh_rate is not None
    assert all("measured here" in table["source"] for table in told["hardware"].values() if isinstance(table, dict))


def test_how_well_the_profile_predicts_is_said_beside_it(measured: tuple[Path, dict[str, Any]]) -> None:
    path, told = measured
    kinds = {each["what"] for each in told["residuals"]}
    assert kinds == {
        "dispatch", "matmul", "memory", "h2d", "h2h", "fresh", "disk read", "disk write", "all_gather", "reduce_scatter",
        "operation", "call",
    }  # fmt: skip
    assert "# measured       samples  median error   worst" in path.read_text()


def test_a_measured_profile_answers_what_a_simulation_asks(measured: tuple[Path, dict[str, Any]]) -> None:
    costs = CostModel(Hardware.load(measured[0]))
    group = costs.group(range(costs.hardware.device.count))
    assert costs.compute(1e6, 1e5, "float32", 64) > 0 and costs.dispatch > 0 and costs.fresh(1 << 20) > 0
    assert costs.collective("all_gather", 1 << 20, group).seconds >= 0
    assert costs.disk("write", 1 << 20) > 0 and costs.host_update(1 << 20) > 0


def test_a_profile_that_is_there_is_left_alone(measured: tuple[Path, dict[str, Any]]) -> None:
    path, _ = measured
    before = path.read_bytes()
    result = zprof("bench", "--profile", str(path), "--size", "1MiB")
    assert result.exit_code == 1 and "exists already; overwrite it with -f" in result.stderr
    assert path.read_bytes() == before
    assert zprof("bench", "disk", "--profile", str(path)).exit_code == 2


def test_the_committed_page_is_what_the_models_say() -> None:
    page = (ROOT / "docs" / "reference" / "hardware.md").read_text(encoding="utf-8")
    assert render(page) == page, "run python -m zprof.commands.hardware_docs docs/reference/hardware.md"
    assert re.findall(r"<!-- keys: (\w+) -->", page) == list(tables()), "a table of the profile has no place in the page"


def test_the_page_is_written_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- keys: disk -->\nstale\n<!-- end -->\nafter\n")
    assert CliRunner().invoke(write_page, [str(page)]).output == f"{page}: written\n"
    assert "| `stripe` | `524288` | bytes above 0 or a size like" in page.read_text()
    assert CliRunner().invoke(write_page, [str(page)]).output == f"{page}: unchanged\n"
