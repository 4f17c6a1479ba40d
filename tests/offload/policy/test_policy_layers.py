"""A policy that builds on others: what wins, what is refused, and whose line an error names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import PolicyError
from offload.policy import Policy
from offload.policy.layers import MAX_DEPTH, MAX_FILES

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def into(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return into


def complaint(path: Path) -> str:
    with pytest.raises(PolicyError) as raised:
        Policy.load(path)
    return str(raised.value).replace(f"{path.parent}/", "")


def test_tables_are_merged_key_by_key_and_the_later_file_wins(write: Write) -> None:
    write("base.toml", 'stage = 2\n[units]\nnames = ["a", "b"]\nmin_numel = 1\n[comm]\nbucket = "1 MiB"\n')
    path = write("policy.toml", 'extends = "base.toml"\nstage = 3\n[units]\nnames = ["c"]\n[disk]\nthreads = 2\n')
    assert Policy.load(path) == Policy.of(
        {
            "stage": 3,
            "units": {"names": ["c"], "min_numel": 1},
            "comm": {"bucket": "1 MiB"},
            "disk": {"threads": 2},
        }
    )


def test_rules_follow_each_other_those_of_the_extended_file_first(write: Write) -> None:
    write("base.toml", '[[rule]]\nmatch = "a"\nparameter.tier = "host"\n[[rule]]\nmatch = "b"\nparameter.tier = "host"\n')
    path = write("policy.toml", 'extends = "base.toml"\n[[rule]]\nmatch = "a"\nparameter.tier = "disk"\n')
    policy = Policy.load(path)
    assert [rule.match for rule in policy.rule] == ["a", "b", "a"]
    assert policy.tiers("a").parameter.value == "disk"


def test_of_several_files_the_later_wins_and_each_is_found_beside_the_file_that_names_it(write: Write) -> None:
    write("shared/one.toml", 'extends = "two.json"\n[disk]\nthreads = 1\n')
    write("shared/two.json", '{"disk": {"threads": 2, "path": "/two"}, "stage": 1}')
    write("three.toml", "[disk]\nthreads = 3\n")
    policy = Policy.load(write("policy.toml", 'extends = ["shared/one.toml", "three.toml"]\n'))
    assert policy == Policy(stage=1, disk={"threads": 3, "path": "/two"})


def test_a_mapping_extends_files_of_the_working_directory(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("base.toml", "stage = 1\n")
    monkeypatch.chdir(tmp_path)
    assert Policy.of({"extends": "base.toml", "comm": {"timeout_s": 1}}) == Policy(stage=1, comm={"timeout_s": 1})


def test_an_error_names_the_file_in_which_the_key_was_written(write: Write) -> None:
    write("base.toml", '[units]\nmin_numl = 1\nmax_numel = 0\n[[rule]]\nmatch = "a"\nparameter.tier = "x"\n')
    path = write("policy.toml", 'extends = "base.toml"\n[units]\nnames = 3\n[[rule]]\nmatch = "b"\noptimizer.tier = "y"\n')
    assert complaint(path).splitlines() == [
        "base.toml:2: [units] min_numl: unknown key; did you mean min_numel?",
        "base.toml:3: [units] max_numel: expected an integer from 1 to 2**40, found 0",
        'base.toml:6: [[rule]] parameter.tier: expected "device", "host" or "disk", found "x"',
        "policy.toml:3: [units] names: expected a list of non-empty names, found 3",
        'policy.toml:6: [[rule]] optimizer.tier: expected "device", "host" or "disk", found "y"',
    ]


def test_a_contradiction_between_two_files_names_the_cell_that_does_not_fit(write: Write) -> None:
    write("base.toml", '\n[parameter]\ntier = "host"\n')
    assert complaint(write("policy.toml", 'stage = 2\nextends = "base.toml"\n')).startswith(
        'base.toml:3: [parameter] tier: found "host" at stage 2'
    )


def test_a_file_that_extends_itself_is_refused_by_name(write: Write) -> None:
    assert complaint(write("policy.toml", '\nextends = "policy.toml"\n')) == (
        "policy.toml:2: extends: policy.toml extends itself through this file; leave one of them out"
    )


def test_a_round_of_files_is_refused_by_name(write: Write) -> None:
    write("a.toml", 'extends = "sub/b.toml"\n')
    write("sub/b.toml", 'extends = "../policy.toml"\n')
    assert complaint(write("policy.toml", 'extends = "a.toml"\n')) == (
        "sub/b.toml:1: extends: sub/../policy.toml extends itself through this file; leave one of them out"
    )


def test_a_chain_of_files_has_an_end(write: Write) -> None:
    for n in range(MAX_DEPTH):
        write(f"{n}.toml", f'extends = "{n + 1}.toml"\n')
    write(f"{MAX_DEPTH}.toml", "stage = 1\n")
    assert Policy.load(write("ok.toml", 'extends = "1.toml"\n')).stage == 1
    assert complaint(write("policy.toml", 'extends = "0.toml"\n')) == (
        f"{MAX_DEPTH - 1}.toml:1: extends: extends goes deeper than {MAX_DEPTH} files; flatten it"
    )


def test_the_files_of_a_policy_are_not_without_number(write: Write) -> None:
    write("empty.toml", "")
    many = ", ".join(['"empty.toml"'] * (MAX_FILES - 1))
    assert Policy.load(write("ok.toml", f"extends = [{many}]\n")) == Policy()
    assert complaint(write("policy.toml", f'extends = [{many}, "empty.toml"]\n')) == (
        "policy.toml:1: extends: extends adds up to more than 64 files or 4 MiB; a policy is a page of settings"
    )
    # Each file names the next twice: without a bound this reads as many as 2**8.
    for n in range(MAX_DEPTH):
        write(f"{n}.toml", f'extends = ["{n + 1}.toml", "{n + 1}.toml"]\n')
    write(f"{MAX_DEPTH}.toml", "")
    assert "adds up to more than" in complaint(write("fan.toml", 'extends = "1.toml"\n'))


def test_the_text_of_a_policy_is_not_without_end(write: Write) -> None:
    write("long.toml", "#" * (1 << 20))
    path = write("policy.toml", 'extends = ["long.toml", "long.toml", "long.toml", "long.toml", "long.toml"]\n')
    assert "adds up to more than 64 files or 4 MiB" in complaint(path)


@pytest.mark.parametrize("value", ["3", "[3]", '""', '[["a"]]', "{ a = 1 }", "true", '"\\u001f"'])
def test_extends_is_a_path_or_a_list_of_paths(value: str, write: Write) -> None:
    said = complaint(write("policy.toml", f"extends = {value}\n"))
    assert said.startswith("policy.toml:1: extends: expected the path of a policy file or a list of them, found ")


def test_a_file_that_cannot_be_read_is_reported_with_the_line_that_names_it(write: Write) -> None:
    assert complaint(write("policy.toml", '\nextends = "none.toml"\n')) == (
        "policy.toml:2: extends: none.toml: no such policy file"
    )
    write("bad.toml", "stage = \n")
    assert complaint(write("policy.toml", 'extends = "bad.toml"\n')) == (
        "policy.toml:1: extends: bad.toml:1: not valid TOML: Invalid value"
    )


def test_what_was_extended_leaves_no_trace_in_the_policy(write: Write) -> None:
    write("base.toml", 'stage = 1\n[[rule]]\nmatch = "a"\noptimizer.tier = "host"\n')
    policy = Policy.load(write("policy.toml", 'extends = "base.toml"\n'))
    assert "extends" not in policy.describe()
    assert Policy.load(write("shown.toml", policy.describe())) == policy
