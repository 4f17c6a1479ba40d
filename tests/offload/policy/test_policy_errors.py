"""How a mistake in a policy is reported: one line each, with file, line, subject and what to do, whatever the file holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.documents import MAX_FILE_NBYTES
from offload.errors import PolicyError
from offload.policy import Policy

Write = Callable[..., Path]


def complaint(value: Any) -> str:
    """What `Policy.of` says against ``value``, without the folder in front of the file's name."""
    with pytest.raises(PolicyError) as raised:
        Policy.of(value)
    folder = str(value.parent) + os.sep if isinstance(value, Path) else "\0"
    return str(raised.value).replace(folder, "")


MISTAKES = {
    "unknown key": (
        "[units]\nmin_nummel = 1\n",
        "policy.toml:2: [units] min_nummel: unknown key; did you mean min_numel?",
    ),
    "stage out of range": ("# x\n\nstage = 4\n", "policy.toml:3: stage: expected 0, 1, 2 or 3, found 4"),
    "stage as text": ('stage = "3"\n', 'policy.toml:1: stage: expected 0, 1, 2 or 3, found "3"'),
    "stage as bool": ("stage = true\n", "policy.toml:1: stage: expected 0, 1, 2 or 3, found true"),
    "stage as table": ("[stage]\nx = 1\n", 'policy.toml:1: stage: expected 0, 1, 2 or 3, found {"x": 1}'),
    "unknown table": ("[parametr]\ntier = 1\n", "policy.toml:1: parametr: unknown key; did you mean parameter?"),
    "key of another table": (
        "prefetch = 2\n",
        "policy.toml:1: prefetch: unknown key; did you mean [schedule] prefetch?",
    ),
    "key of several tables": (
        'tier = "host"\n',
        "policy.toml:1: tier: unknown key; did you mean [parameter] tier, [gradient] tier, [optimizer] tier or [activation] "
        "tier?",
    ),
    "key like no other": (
        "[budget]\nzzz = 1\n",
        "policy.toml:2: [budget] zzz: unknown key; known keys here: device, host, disk",
    ),
    "table as number": ("units = 3\n", "policy.toml:1: units: expected a table, found 3"),
    "tier": (
        '[optimizer]\ntier = "nvme"\n',
        'policy.toml:2: [optimizer] tier: expected "device", "host" or "disk", found "nvme"; did you mean "disk"?',
    ),
    "misspelt tier": (
        '[optimizer]\ntier = "hots"\n',
        'policy.toml:2: [optimizer] tier: expected "device", "host" or "disk", found "hots"; did you mean "host"?',
    ),
    "misspelt toggle": (
        '[schedule]\nreshard_after_forward = "aut"\n',
        'policy.toml:2: [schedule] reshard_after_forward: expected true, false or "auto", found "aut"; did you mean "auto"?',
    ),
    "another dtype": (
        '[precision]\nparam = "fp64"\n',
        'policy.toml:2: [precision] param: expected "fp32", "bf16" or "fp16", found "fp64"',
    ),
    "share out of range": (
        '[optimizer]\ntier = "host"\ndevice_share = 1.5\n',
        "policy.toml:3: [optimizer] device_share: expected a number from 0 to 1, found 1.5",
    ),
    "share in bytes": (
        '[optimizer]\ntier = "host"\ndevice_share = "4 GiB"\n',
        'policy.toml:3: [optimizer] device_share: expected a number from 0 to 1, found "4 GiB"',
    ),
    "share of what is on the device": (
        "[optimizer]\ndevice_share = 0.3\n",
        'policy.toml:2: [optimizer] device_share: found 0.3 and tier = "device", where all of it is: it divides what '
        '[optimizer] tier places elsewhere; write tier = "host" or "disk" too, or leave it out',
    ),
    "tier of replicated parameters": (
        'stage = 2\n[parameter]\ntier = "host"\n',
        'policy.toml:3: [parameter] tier: found "host" at stage 2: replicated parameters are on the device at every use; '
        'use stage 3 (or 0) to place them, or tier "device"',
    ),
    "rule for replicated parameters": (
        'stage = 1\n[[rule]]\nmatch = "a"\noptimizer.tier = "host"\n[[rule]]\nmatch = "b"\nparameter.tier = "disk"\n',
        'policy.toml:7: [[rule]] parameter.tier: found "disk" at stage 1: replicated parameters are on the device at every '
        'use; use stage 3 (or 0) to place them, or tier "device"',
    ),
    "rule without match": (
        '[[rule]]\nmatch = "a"\nparameter.tier = "host"\n[[rule]]\nparameter.tier = "host"\n',
        'policy.toml:4: [[rule]] match: expected a glob over parameter names, e.g. "*.embed*", found nothing; write it',
    ),
    "rule that sets nothing": (
        '[[rule]]\nmatch = "a"\n',
        "policy.toml:1: [[rule]]: sets nothing; write parameter.tier, gradient.tier, optimizer.tier, "
        "precision.param or precision.reduce",
    ),
    "dtype of a rule": (
        '[[rule]]\nmatch = "a"\nprecision.param = "fp8"\n',
        'policy.toml:3: [[rule]] precision.param: expected "fp32", "bf16" or "fp16", found "fp8"',
    ),
    "key of a rule": (
        '[[rule]]\nmatch = "a"\nparameter.tier = "host"\n\n[[rule]]\nmatsh = "a"\nparameter.tier = "host"\nmatch = "b"\n',
        "policy.toml:6: [[rule]] matsh: unknown key; did you mean match?",
    ),
    "key of a rule's cell": (
        '[[rule]]\nmatch = "a"\n[rule.parameter]\nteir = "host"\ntier = "host"\n',
        "policy.toml:4: [[rule]] parameter.teir: unknown key; did you mean tier?",
    ),
    "rule as table": (
        '[rule]\nmatch = "a"\n',
        'policy.toml:1: rule: expected a list of tables, each written [[rule]], found {"match": "a"}',
    ),
    "share": (
        '[budget]\nhost = "120%"\n',
        'policy.toml:2: [budget] host: expected bytes, a size like "20 GiB" or a share like "80%", found "120%"',
    ),
    "block": (
        "[disk]\nblock = 1048577\n",
        'policy.toml:2: [disk] block: expected bytes or a size like "20 GiB", at least 1 MiB and a multiple of 4 KiB, '
        "found 1048577",
    ),
    "toggle": (
        '[host]\npin = "yes"\n',
        'policy.toml:2: [host] pin: expected true, false or "auto", found "yes"',
    ),
    "path": ('[disk]\npath = ""\n', 'policy.toml:2: [disk] path: expected the path of a folder, found ""'),
    "member of a list": (
        "[units]\nnames = [\n  3,\n]\n",
        "policy.toml:2: [units] names: expected a list of non-empty names, found 3",
    ),
    "empty name": (
        '[units]\nclasses = [""]\n',
        'policy.toml:2: [units] classes: expected a list of non-empty names, found ""',
    ),
    "union": (
        '[schedule]\nreshard_after_forward = "maybe"\n',
        'policy.toml:2: [schedule] reshard_after_forward: expected true, false or "auto", found "maybe"',
    ),
    "number for a bool": (
        "[schedule]\nreshard_after_forward = 1\n",
        'policy.toml:2: [schedule] reshard_after_forward: expected true, false or "auto", found 1',
    ),
    "prefetch": (
        "[schedule]\nprefetch = 17\n",
        "policy.toml:2: [schedule] prefetch: expected an integer from 0 to 16, found 17",
    ),
    "dtype": (
        '[precision]\nparam = "float16"\n',
        'policy.toml:2: [precision] param: expected "fp32", "bf16" or "fp16", found "float16"; did you mean "fp16"?',
    ),
    "size": (
        '[budget]\ndevice = "20 G"\n',
        'policy.toml:2: [budget] device: expected bytes, a size like "20 GiB" or a share like "80%", found "20 G"',
    ),
    "small bucket": (
        "[comm]\nbucket = 255\n",
        'policy.toml:2: [comm] bucket: expected bytes or a size like "20 GiB", at least 256 B, found 255',
    ),
    "not a number": (
        "[comm]\ntimeout_s = nan\n",
        "policy.toml:2: [comm] timeout_s: expected seconds, above 0 and at most 86400, found NaN",
    ),
    "dotted key": (
        "\nunits.min_numl = 3\n",
        "policy.toml:2: [units] min_numl: unknown key; did you mean min_numel?",
    ),
    "inline table": (
        "\nunits = { min_numl = 3 }\n",
        "policy.toml:2: [units] min_numl: unknown key; did you mean min_numel?",
    ),
    "quoted key": (
        '\n["units"]\n"min_numl" = 3\n',
        "policy.toml:3: [units] min_numl: unknown key; did you mean min_numel?",
    ),
    "contradiction": (
        'stage = 3\n[gradient]\npartition = "replicate"\n',
        'policy.toml:3: [gradient] partition: stage 3 expects "shard", found "replicate"; change either',
    ),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_with_file_line_subject_and_remedy(text: str, expected: str, write: Write) -> None:
    assert complaint(write(text)) == expected


def test_lines_are_counted_past_strings_arrays_and_comments_that_look_like_keys(write: Write) -> None:
    text = '[units]\nx = ["""\n""", """\nstage = 9\n[comm]\\\n""", \'\'\'#\'\'\', "]", \'"\'] # ["\ny = 1\n'
    lines = complaint(write(text)).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["policy.toml:2", "policy.toml:7"]


def test_all_mistakes_are_reported_in_the_order_of_the_file(write: Write) -> None:
    text = '[comm]\nbucket = "x"\n[units]\nmax_numel = 0\nfoo = 1\n[precision]\nparam = 3\ncast_inputs = "yes"\n'
    lines = complaint(write(text)).splitlines()
    assert [re.match(r"policy\.toml:(\d+): ", line)[1] for line in lines] == ["2", "4", "5", "7", "8"]  # type: ignore[index]


def test_a_thousand_mistakes_are_counted_not_listed(write: Write) -> None:
    lines = complaint(write("".join(f"k{n} = 1\n" for n in range(1000)))).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "policy.toml: and 990 more"


@pytest.mark.parametrize(
    ("cells", "fits"),
    [
        ({"parameter": "replicate"}, "stages 0, 1, 2 fit, write stage too"),
        ({"gradient": "shard"}, "stages 2, 3 fit, write stage too"),
        ({"parameter": "shard", "gradient": "replicate"}, "no stage fits"),
        ({"gradient": "shard", "optimizer": "replicate"}, "no stage fits"),
    ],
)
def test_cells_that_spell_no_single_row_are_refused_with_the_four_rows(cells: dict[str, str], fits: str) -> None:
    said = complaint({cell: {"partition": partition} for cell, partition in cells.items()})
    assert "\n" not in said
    assert f"the cells match no single stage ({fits})" in said
    for row in (
        "stage 0 = replicate, replicate, replicate",
        "stage 1 = replicate, replicate, shard",
        "stage 2 = replicate, shard, shard",
        "stage 3 = shard, shard, shard",
    ):
        assert row in said


def test_json_mistakes_carry_their_lines_too(write: Write) -> None:
    text = '{\n "units": {"names": ["a:b", "c"],\n  "min_nummel": 1},\n "comm": {\n  "bucket": []\n }, "stage": 7\n}\n'
    assert complaint(write(text, "policy.json")).splitlines() == [
        "policy.json:3: [units] min_nummel: unknown key; did you mean min_numel?",
        'policy.json:5: [comm] bucket: expected bytes or a size like "20 GiB", at least 256 B, found []',
        "policy.json:6: stage: expected 0, 1, 2 or 3, found 7",
    ]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("stage = \n", "policy.toml", "policy.toml:1: not valid TOML: Invalid value"),
        ("[optimizer]\ntier = host\n", "policy.toml", "policy.toml:2: not valid TOML: Invalid value; strings need quotes"),
        ("a = True\n", "policy.toml", "policy.toml:1: not valid TOML: Invalid value; write true"),
        ("a = 1\nb = [1,\n", "policy.toml", r"policy\.toml:\d+: not valid TOML: \S.*"),
        ("a = 1\na = 2\n", "policy.toml", "policy.toml:2: not valid TOML: Cannot overwrite a value"),
        ('{"stage": }', "policy.json", r"policy.json:1: not valid JSON: Expecting value \(column 11\)"),
        (
            '{"stage": 1,\n "stage": 2}',
            "policy.json",
            "policy.json: stage: written twice in one object; keep one of them",
        ),
        ("[1]", "policy.json", r"policy.json:1: expected a JSON object, found \[1\]"),
        ("a=" + "[" * 5000, "policy.toml", "policy.toml:1: nested too deeply, more than 32 brackets; .*"),
        ('{"a":' + "[" * 200_000, "policy.json", "policy.json:1: nested too deeply, more than 32 brackets; .*"),
        ("stage = " + "9" * 5000, "policy.toml", "policy.toml: .*digits.*"),
        (b"stage = 3\n# \xff\n", "policy.toml", "policy.toml:2: expected UTF-8 text, found byte 0xff"),
    ],
    ids=[
        *("toml", "no quotes", "True", "open array", "toml twice", "json", "json twice"),
        *("array", "deep", "deep json", "digits", "latin-1"),
    ],
)
def test_text_that_is_no_document_is_one_clear_line(text: str | bytes, name: str, expected: str, write: Write) -> None:
    assert re.fullmatch(expected, complaint(write(text, name)))


def test_files_that_cannot_be_read_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(tmp_path / "none.toml") == "none.toml: no such policy file"
    monkeypatch.chdir(tmp_path)
    assert complaint("none.toml") == f"none.toml: no such policy file in {tmp_path}"
    assert complaint("sub/none.toml") == f"sub/none.toml: no such policy file in {tmp_path / 'sub'}"
    assert "not a regular file" in complaint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in complaint(tmp_path / "pipe")
    assert "not a regular file" in complaint(Path("/dev/zero"))
    assert "not a path" in complaint("a\0b")
    assert "cannot be read: File name too long" in complaint("x" * 5000)


def test_a_file_above_one_mebibyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    with path.open("wb") as file:
        # Sparse: were it read, the test would need the memory.
        file.truncate(1 << 40)
    found = f"found {1 << 40} bytes, more than {1 << 20}"
    assert complaint(path) == f"policy.toml: expected a policy file of at most 1 MiB, {found}"
    path.write_text("#" * MAX_FILE_NBYTES)
    assert Policy.load(path) == Policy()


@pytest.mark.parametrize("value", [3, 1.5, True, b"policy.toml", ["stage", 3], object()])
def test_what_is_neither_path_nor_mapping_nor_policy_is_refused(value: Any) -> None:
    assert complaint(value).startswith("policy must be a path, a mapping, a Policy or None, found ")


def test_mistakes_of_one_line_and_of_a_mapping_are_reported_in_the_order_they_were_written_in(write: Write) -> None:
    line = 'optimizer = { teir = 1, overlap = 2, kernel = "x", tier = 3 }\nstage = 7\n'
    assert [said.split(": ")[1] for said in complaint(write(line)).splitlines()] == [
        "[optimizer] teir", "[optimizer] overlap", "[optimizer] kernel", "[optimizer] tier", "stage",
    ]  # fmt: skip
    rule = {"match": "a", "precision.param": "fp64", "parameter.tier": "x"}
    assert [said.split(": ")[1] for said in complaint({"units": 3, "rule": [rule], "stage": 7}).splitlines()] == [
        "units", "[[rule]] 1 precision.param", "[[rule]] 1 parameter.tier", "stage",
    ]  # fmt: skip


def test_a_mapping_names_no_file_and_no_line() -> None:
    assert complaint({"stage": 4}) == "policy: stage: expected 0, 1, 2 or 3, found 4"
    assert complaint({1: 2}) == "policy needs names for keys, found int"
    assert complaint({"units": {"min_numel": object()}}) == (
        "policy: [units] min_numel: expected an integer from 0 to 2**40, found a value of type object"
    )


def test_rules_without_a_file_are_known_by_their_number() -> None:
    rules = [{"match": "a", "parameter.tier": "host"}, {"match": "b", "optimizer": {"tier": "nvme"}}]
    assert complaint({"rule": rules}) == (
        'policy: [[rule]] 2 optimizer.tier: expected "device", "host" or "disk", found "nvme"; did you mean "disk"?'
    )


def test_rules_in_json_carry_their_own_lines(write: Write) -> None:
    text = '{"rule": [\n {"match": "a", "parameter.tier": "host"},\n {"match": "b",\n  "gradient": {"tear": 1}}]}'
    assert complaint(write(text, "policy.json")) == (
        "policy.json:4: [[rule]] gradient.tear: unknown key; did you mean tier?"
    )


def test_the_constructor_reports_as_the_loader_does() -> None:
    with pytest.raises(PolicyError) as raised:
        Policy(stage=4, unit={})
    assert str(raised.value).splitlines() == [
        "policy: stage: expected 0, 1, 2 or 3, found 4",
        "policy: unit: unknown key; did you mean units?",
    ]


def test_a_long_value_is_cut_to_fit_the_line() -> None:
    said = complaint({"comm": {"transport": "x" * 10_000 + "\n"}})
    assert len(said) < 200 and said.endswith("...")
