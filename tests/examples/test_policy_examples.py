"""The policies in examples/policies are sound, say what they are for, and between them show every tier."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from offload.policy import Policy
from tests.support.paths import ROOT
from zprof.cli import main

FOLDER = ROOT / "examples" / "policies"
EXAMPLES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".toml", ".json"))
each = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)


def test_there_is_one_for_each_common_case() -> None:
    assert [path.name for path in EXAMPLES] == [
        "activations_host.toml",
        "checkpoint_units.toml",
        "ds_zero3_offload.json",
        "hybrid_shard.toml",
        "lora.toml",
        "one_gpu_infinity.toml",
        "one_gpu_offload.toml",
        "precision_rules.toml",
        "teams_zero3_bf16.toml",
        "three_tiers.toml",
    ]


@each
def test_an_example_loads_without_a_warning_and_shows_as_a_policy(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = Policy.load(path)
    shown = tmp_path / "shown.toml"
    shown.write_text(policy.describe(), encoding="utf-8")
    assert Policy.load(shown) == policy != Policy()


@each
def test_zprof_finds_nothing_wrong_with_an_example(path: Path) -> None:
    result = CliRunner().invoke(main, ["policy", "check", str(path)])
    assert (result.exit_code, result.output) == (0, f"{path}: ok, stage 3\n")


@each
def test_zprof_says_what_an_example_costs(path: Path) -> None:
    result = CliRunner().invoke(main, ["policy", "show", str(path), "--params", "7B", "--ranks", "8", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)["cost"]["bytes"] in (16 * 875_000_000, 18 * 875_000_000)


@each
def test_an_example_begins_with_two_lines_that_say_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".json":
        assert [line.strip()[:2] for line in lines[1:3]] == ['"_', '"_']
    else:
        assert [line[:2] for line in lines[:3]].count("# ") == 2


def test_between_them_they_use_every_tier() -> None:
    policies = [Policy.load(path) for path in EXAMPLES]
    assert {policy.optimizer.tier for policy in policies} == {"device", "host", "disk"}
    assert {policy.parameter.tier for policy in policies} == {"device", "host", "disk"}
    assert {policy.activation.tier for policy in policies} == {"device", "host"}
    assert any(policy.rule for policy in policies)
