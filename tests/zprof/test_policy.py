"""What ``zprof policy`` answers, with which exit code, and on which stream."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from offload.errors import BudgetError, CapabilityError, PolicyError
from offload.policy import IgnoredKeys, Policy
from tests.support.paths import ROOT
from tests.support.zprof_command import Zprof
from zprof.cli import main
from zprof.commands.policy_docs import main as write_page
from zprof.commands.policy_docs import render, tables
from zprof.problem import problem_of


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
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"none.toml: no such policy file in {Path.cwd()}\n")


def test_show_prints_the_policy_as_a_file_that_loads_back(zprof: Zprof) -> None:
    Path("policy.json").write_text('{"stage": 1, "precision": {"param": "bf16"}}')
    result = zprof("policy", "show", "policy.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == Policy.load("policy.json").describe() + "\n"
    Path("shown.toml").write_text(result.stdout)
    assert Policy.load("shown.toml") == Policy.load("policy.json")


# --- DeepSpeed configurations -----------------------------------------------------------------------------------------

DEEPSPEED = """\
{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
 "aio": {"block_size": 1048576, "queue_depth": 8},
 "bf16": {"enabled": true}, "gradient_clipping": 1.0, "train_batch_size": 8}
"""
IGNORED = [
    "gradient_clipping = 1: call torch.nn.utils.clip_grad_norm_ in the loop",
    "train_batch_size = 8: set batch_size in the data loader",
]


def test_check_says_what_a_deepspeed_configuration_asks_for_in_vain(zprof: Zprof) -> None:
    Path("ds.json").write_text(DEEPSPEED)
    result = zprof("policy", "check", "ds.json")
    told = "".join(f"ds.json: not honoured: {line}\n" for line in IGNORED)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"ds.json: ok, stage 3\n{told}", "")


def test_convert_writes_a_policy_that_means_the_same(zprof: Zprof) -> None:
    Path("ds.json").write_text(DEEPSPEED)
    result = zprof("policy", "convert", "ds.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "# From ds.json.\n"
        f"# Not honoured: {IGNORED[0]}\n"
        f"# Not honoured: {IGNORED[1]}\n"
        "\n"
        "stage = 3\n"
        '\n[parameter]\ntier = "disk"\n'
        '\n[precision]\nparam = "bf16"\n'
        '\n[disk]\npath = "/nvme"\nblock = "1 MiB"\nthreads = 8\n'
    )
    assert zprof("policy", "convert", "ds.json", "-o", "policy.toml").output == ""
    assert Path("policy.toml").read_text() == result.stdout
    with pytest.warns(IgnoredKeys):
        assert Policy.load("policy.toml") == Policy.load("ds.json")


def test_convert_writes_rules_and_what_was_extended_too(zprof: Zprof) -> None:
    Path("base.toml").write_text('[[rule]]\nmatch = "a\\"b"\noptimizer.tier = "host"\n[budget]\nhost = "80%"\n')
    Path("policy.json").write_text('{"extends": "base.toml", "units": {"names": ["x.*"]}}')
    assert zprof("policy", "convert", "policy.json", "-o", "policy.toml").exit_code == 0
    assert Policy.load("policy.toml") == Policy.load("policy.json")
    assert "extends" not in Path("policy.toml").read_text()


def test_convert_never_writes_over_what_it_reads_and_says_where_it_cannot(zprof: Zprof) -> None:
    Path("ds.json").write_text(DEEPSPEED)
    result = zprof("policy", "convert", "ds.json", "-o", "./ds.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "ds.json: is the input; name another file with -o\n"
    assert Path("ds.json").read_text() == DEEPSPEED
    result = zprof("policy", "convert", "ds.json", "-o", "none/policy.toml")
    assert (result.exit_code, result.stderr) == (1, "none/policy.toml: cannot be written: No such file or directory\n")
    assert zprof("policy", "convert", "none.json").exit_code == 1


def test_convert_replaces_a_file_when_told_to_and_nothing_that_is_none(zprof: Zprof) -> None:
    Path("ds.json").write_text(DEEPSPEED)
    Path("kept.toml").write_text("stage = 1\n")
    result = zprof("policy", "convert", "ds.json", "-o", "kept.toml")
    assert result.stderr == "kept.toml: exists already; overwrite it with -f, or name another with -o\n"
    assert (result.exit_code, Path("kept.toml").read_text()) == (1, "stage = 1\n")
    Path("link.toml").symlink_to("kept.toml")
    os.mkfifo("pipe.toml")
    for name, kind in (("link.toml", "a link"), ("pipe.toml", "a device or a pipe"), ("/dev/null", "a device or a pipe")):
        assert zprof("policy", "convert", "ds.json", "-o", name).exit_code == 1
        result = zprof("policy", "convert", "ds.json", "-o", name, "-f")
        said = f"{name}: expected a plain file or none, found {kind}; name another with -o\n"
        assert (result.exit_code, result.stderr) == (1, said)
    assert Path("kept.toml").read_text() == "stage = 1\n"
    assert zprof("policy", "convert", "ds.json", "-o", "kept.toml", "--force").exit_code == 0
    with pytest.warns(IgnoredKeys):
        assert Policy.load("kept.toml") == Policy.load("ds.json")


# --- what it costs ----------------------------------------------------------------------------------------------------

PLACED = """\
[optimizer]
tier = "disk"
[precision]
param = "bf16"
[budget]
device = "5 GiB"
host = "80%"
disk = "10 GiB"
"""


def test_show_says_what_a_model_costs_and_whether_the_budgets_hold_it(zprof: Zprof) -> None:
    Path("policy.toml").write_text(PLACED)
    result = zprof("policy", "show", "policy.toml", "--params", "7B", "--ranks", "8")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith(
        """\
#
# 7,000,000,000 parameters over 8 ranks, Adam, bytes per rank at the end of backward:
# +-----------------------------------------------------------------------------------+
# | what      | tier   | holds                    | B/param |    elements |     bytes |
# |-----------+--------+--------------------------+---------+-------------+-----------|
# | parameter | device | bf16 copy                |       2 | 875,000,000 |  1.63 GiB |
# | gradient  | device | fp32 gradients           |       4 | 875,000,000 |  3.26 GiB |
# | optimizer | disk   | fp32 masters and moments |      12 | 875,000,000 |  9.78 GiB |
# |-----------+--------+--------------------------+---------+-------------+-----------|
# | sum       |        |                          |         |             | 14.67 GiB |
# +-----------------------------------------------------------------------------------+
# Temporary buffers come on top: gathered units, partial gradients, buffers in transit between tiers.
# [budget] device: needs 4.89 GiB per rank; 5.00 GiB holds it
# [budget] host: needs 0.00 GiB per rank; 80% of what is free, known only at attach
# [budget] disk: needs 9.78 GiB per rank; 10.00 GiB holds it
"""
    )
    Path("shown.toml").write_text(result.stdout)
    assert Policy.load("shown.toml") == Policy.load("policy.toml"), "the cost is a comment"


def test_a_budget_that_does_not_hold_it_is_exit_code_3(zprof: Zprof) -> None:
    Path("policy.toml").write_text(PLACED)
    result = zprof("policy", "show", "policy.toml", "--params", "7B", "--ranks", "7")
    assert result.exit_code == 3
    assert "# [budget] device: needs 5.59 GiB per rank; 5.00 GiB does not hold it" in result.stdout
    assert zprof("policy", "show", "policy.toml", "--params", "7B", "--json").exit_code == 3


@pytest.mark.parametrize(
    ("text", "numel"),
    [("7B", 7 * 10**9), ("1.5b", 1_500_000_000), ("124M", 124 * 10**6), ("1_000", 1000), ("2,000", 2000), ("3k", 3000)],
)
def test_a_number_of_parameters_is_written_as_people_say_it(zprof: Zprof, text: str, numel: int) -> None:
    Path("policy.toml").write_text("")
    result = zprof("policy", "show", "policy.toml", "--params", text, "--json")
    assert json.loads(result.stdout)["cost"]["params"] == numel


@pytest.mark.parametrize(
    "options",
    [("--params", "seven"), ("--params", "0"), ("--params", "0.1"), ("--params", "9" * 20), ("--params", "-7B"),
     ("--params", "7B", "--ranks", "0"), ("--ranks", "8")],
    ids=" ".join,
)  # fmt: skip
def test_what_is_no_number_of_parameters_or_ranks_is_wrong_usage(zprof: Zprof, options: tuple[str, ...]) -> None:
    Path("policy.toml").write_text("")
    result = zprof("policy", "show", "policy.toml", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected" in result.stderr or "range" in result.stderr


# --- for programs and editors -----------------------------------------------------------------------------------------


def test_check_and_show_speak_json(zprof: Zprof) -> None:
    Path("policy.toml").write_text(PLACED + '[[rule]]\nmatch = "a"\nparameter.tier = "host"\n')
    assert json.loads(zprof("policy", "check", "policy.toml", "--json").stdout) == {
        "file": "policy.toml", "ok": True, "stage": 3, "ignored": [],
    }  # fmt: skip
    told = json.loads(zprof("policy", "show", "policy.toml", "--params", "7B", "--ranks", "8", "--json").stdout)
    assert Policy.of(told["policy"]) == Policy.load("policy.toml")
    assert told["table"]["optimizer"] == {"partition": "shard", "placed": "S", "tier": "disk"}
    assert told["cost"]["cells"][2] == {
        "what": "optimizer", "tier": "disk", "holds": "fp32 masters and moments", "bytes": 10_500_000_000,
    }  # fmt: skip
    assert told["cost"]["tiers"] == [
        {"tier": "device", "bytes": 5_250_000_000, "budget": "5 GiB", "holds": True},
        {"tier": "host", "bytes": 0, "budget": "80%", "holds": None},
        {"tier": "disk", "bytes": 10_500_000_000, "budget": "10 GiB", "holds": True},
    ]


def test_check_says_problems_in_json_with_the_same_exit_code(zprof: Zprof) -> None:
    Path("policy.toml").write_text("stage = 4\nx = 1\n")
    result = zprof("policy", "check", "policy.toml", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    told = json.loads(result.stdout)
    assert (told["ok"], len(told["problems"])) == (False, 2)
    assert told["problems"][0] == "policy.toml:1: stage: expected 0, 1, 2 or 3, found 4"


def test_schema_prints_the_json_schema(zprof: Zprof) -> None:
    result = zprof("policy", "schema")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == Policy.json_schema()


def test_the_committed_page_is_what_the_models_say() -> None:
    page = (ROOT / "docs" / "reference" / "policy.md").read_text(encoding="utf-8")
    assert render(page) == page, "run python -m zprof.commands.policy_docs docs/reference/policy.md"
    assert re.findall(r"<!-- keys: (\w+) -->", page) == tables(), "a table of the policy has no place in the page"


def test_the_page_is_written_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- keys: disk -->\nstale\n<!-- end -->\nafter\n")
    assert CliRunner().invoke(write_page, [str(page)]).output == f"{page}: written\n"
    assert page.read_text().startswith("before\n<!-- keys: disk -->\n| key |")
    assert "| `threads` | `16` | an integer from 1 to 64 |" in page.read_text()
    assert CliRunner().invoke(write_page, [str(page)]).output == f"{page}: unchanged\n"


def test_each_kind_of_error_has_its_exit_code() -> None:
    kinds = {PolicyError: 1, BudgetError: 3, CapabilityError: 4}
    assert {kind: problem_of(kind("x")).exit_code for kind in kinds} == kinds


# --- wrong usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("policy", "check"),
        ("policy", "show"),
        ("policy", "convert"),
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
