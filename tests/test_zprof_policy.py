"""What ``zprof policy`` answers, with which exit code, and on which stream."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.policy import Policy
from zprof.cli import main

Zprof = Callable[..., Result]


@pytest.fixture
def zprof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zprof:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, arguments, prog_name="zprof")


def test_a_valid_policy_is_checked_in_one_line(zprof: Zprof) -> None:
    Path("policy.toml").write_text("stage = 2\n")
    result = zprof("policy", "check", "policy.toml")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "policy.toml: ok, stage 2\n", "")


def test_every_problem_is_one_line_on_stderr_and_the_exit_code_is_1(zprof: Zprof) -> None:
    Path("policy.toml").write_text("stage = 4\n[units]\nmin_nummel = 1\n")
    for command in ("check", "show"):
        result = zprof("policy", command, "policy.toml")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == (
            "policy.toml:1: stage: expected 0, 1, 2 or 3, found 4\n"
            "policy.toml:3: [units] min_nummel: unknown key; did you mean min_numel?\n"
        )


def test_a_missing_file_is_a_problem_not_wrong_usage(zprof: Zprof) -> None:
    result = zprof("policy", "check", "none.toml")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "none.toml: no such policy file\n")


def test_show_prints_the_policy_as_a_file_that_loads_back(zprof: Zprof) -> None:
    Path("policy.json").write_text('{"stage": 1, "precision": {"param": "bf16"}}')
    result = zprof("policy", "show", "policy.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == Policy.load("policy.json").describe() + "\n"
    Path("shown.toml").write_text(result.stdout)
    assert Policy.load("shown.toml") == Policy.load("policy.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "check"),
        ("policy", "show"),
        ("policy", "nonsense"),
        ("nonsense",),
        ("policy", "check", "a", "b"),
        ("-x",),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(zprof: Zprof, arguments: tuple[str, ...]) -> None:
    result = zprof(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" and "Usage: zprof" in result.stderr


def test_help_and_version_exit_with_0(zprof: Zprof) -> None:
    for arguments in (("--help",), ("-h",), ("policy", "--help"), ("policy", "check", "--help"), ("--version",)):
        assert zprof(*arguments).exit_code == 0
    assert zprof("--version").stdout == f"zprof, version {metadata.version('zhooks')}\n"


def test_the_installed_command_is_this_one() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="zprof")
    assert script.load() is main


def test_nothing_called_tools_is_installed() -> None:
    packages = metadata.packages_distributions()
    ours = {name for name, owners in packages.items() if "zhooks" in owners}
    assert "tools" not in ours
