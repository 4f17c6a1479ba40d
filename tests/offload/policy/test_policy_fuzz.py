"""Whatever a policy file holds, it is a policy or clear lines: in TOML, in JSON, in DeepSpeed's words, and extended."""

from __future__ import annotations

import enum
import json
import re
import tomllib
import warnings
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.errors import PolicyError
from offload.policy import Policy, deepspeed
from offload.policy.deepspeed_keys import HONOURED, OTHER
from tests.support.policy_texts import EVERYTHING, WHOLE
from tests.support.slow import slow

Write = Callable[..., Path]
FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
SOME = settings(FILES, max_examples=200)
#: What a change of the schema must survive once: run with -m slow.
MANY = settings(FILES, max_examples=10_000)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def into(text: str | bytes, name: str = "policy.toml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return path

    return into


LINES = re.compile(r"\S[^\n]*(\n\S[^\n]*)*")


def answers(path: Path) -> None:
    """A policy or a `PolicyError` of printable, non-empty lines that start with the file's name; nothing else."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy = Policy.load(path)
    except PolicyError as error:
        said = str(error)
        assert LINES.fullmatch(said) and len(said) < 5000
        for line in said.split("\n"):
            assert line.isprintable() and line.startswith(str(path.parent)) and len(line) > len(str(path)) + 5
    else:
        assert policy.stage in range(4)
        assert Policy.of(tomllib.loads(policy.describe())) == policy
        assert Policy.of(policy.values()) == policy
        for warning in caught:
            assert isinstance(warning.message, deepspeed.IgnoredKeys)
            assert "\n" not in str(warning.message)
            assert all(line.isprintable() and ": " in line for line in warning.message.ignored)


# --- text -------------------------------------------------------------------------------------------------------------

FRAGMENTS = [*"\"'[]{}=\n#,\\%.", '"""', "[[", "[[rule]]\n", "-1", "1e999", "nan", "true", "null", "stage = 1\n", '"auto"']
TEXTS = [WHOLE, json.dumps(tomllib.loads(WHOLE), indent=1), Policy().describe(), json.dumps(EVERYTHING, indent=1)]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + draw(st.sampled_from(FRAGMENTS) | st.text(max_size=6)) + text[end:]
    return text


@SOME
@given(text=mutated())
def test_a_mutated_policy_is_a_policy_or_clear_lines(text: str, write: Write) -> None:
    answers(write(text))


@pytest.mark.slow
@MANY
@given(text=mutated())
def test_a_policy_mutated_ten_thousand_ways_is_a_policy_or_clear_lines(text: str, write: Write) -> None:
    answers(write(text))


@FILES
@given(raw=st.binary(max_size=200), name=st.sampled_from(["policy.toml", "policy.json", "policy"]))
def test_any_bytes_are_a_policy_or_clear_lines(raw: bytes, name: str, write: Write) -> None:
    answers(write(raw, name))


# --- values -----------------------------------------------------------------------------------------------------------

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["auto", "80%", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
INNER = sorted({key for _, table in Policy() if hasattr(table, "model_fields_set") for key in type(table).model_fields})
KEYS = [*Policy.model_fields, "extends", "$schema", "prefetch", "bogus", "fp16"]
RULE = st.dictionaries(
    st.sampled_from(["match", "parameter", "parameter.tier", "optimizer.tier", "precision", "precision.param", "bogus"]),
    JSONS | st.sampled_from(["host", "*"]) | st.dictionaries(st.sampled_from(["tier", "reduce", "bogus"]), JSONS, max_size=2),
    max_size=3,
)
OWN = st.dictionaries(
    st.sampled_from(KEYS), JSONS | st.dictionaries(st.sampled_from([*INNER, "bogus"]), JSONS, max_size=4), max_size=5
) | st.fixed_dictionaries({"rule": st.lists(RULE, max_size=3)})


def dialect(place: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Any]]:
    """A table of DeepSpeed's keys, and sometimes another, with any values."""
    plain = sorted({*HONOURED[place], *OTHER.get(place, {})})
    tables = [key for key in plain if (*place, key) in HONOURED]
    anything = st.dictionaries(st.sampled_from([*plain, "bogus", "stage"]), JSONS | st.integers(0, 2**40), max_size=6)
    below = [st.fixed_dictionaries({key: dialect((*place, key))}) for key in tables]
    return st.lists(st.one_of(anything, *below), max_size=3).map(lambda parts: dict(ChainMap(*parts)))


def values_answer(values: dict[str, Any], write: Write) -> None:
    answers(write(json.dumps(values), "policy.json"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", deepspeed.IgnoredKeys)
            Policy.of(values)
    except PolicyError as error:
        assert all(line.startswith("policy: ") and line.isprintable() for line in str(error).split("\n"))


@FILES
@given(values=OWN)
def test_any_value_under_any_key_is_a_policy_or_clear_lines(values: dict[str, Any], write: Write) -> None:
    values_answer(values, write)


@SOME
@given(values=dialect())
def test_any_value_under_any_key_of_deepspeed_is_a_policy_or_clear_lines(values: dict[str, Any], write: Write) -> None:
    values_answer(values, write)


@pytest.mark.slow
@MANY
@given(values=OWN | dialect())
def test_ten_thousand_values_are_policies_or_clear_lines(values: dict[str, Any], write: Write) -> None:
    values_answer(values, write)


@FILES
@given(base=OWN | dialect(), over=OWN)
def test_any_file_that_extends_any_other_is_a_policy_or_clear_lines(
    base: dict[str, Any], over: dict[str, Any], write: Write
) -> None:
    write(json.dumps(base), "base.json")
    answers(write(json.dumps({**over, "extends": "base.json"}), "policy.json"))


# --- values that no file holds ----------------------------------------------------------------------------------------


class Raises:
    """An object that cannot be compared, shown or hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("shown")


class Word(str):
    """Text of a type of its own."""


class Place(enum.Enum):
    HOST = "host"


def circle() -> dict[str, Any]:
    values: dict[str, Any] = {}
    values["units"] = values["rule"] = values
    return values


def bomb() -> list[Any]:
    """Few objects, entries without end."""
    values: list[Any] = [1]
    for _ in range(30):
        values = [values] * 100
    return values


FOREIGN: dict[str, Callable[[], Any]] = {
    "array": lambda: numpy.ones(3),
    "array of objects": lambda: numpy.array(["host", None], dtype=object),
    "scalar": lambda: numpy.int64(3),
    "tensor": lambda: torch.ones(2, requires_grad=True),
    "dtype": lambda: torch.float32,
    "circle": circle,
    "bomb": bomb,
    "raises": Raises,
    "generator": lambda: (number for number in range(3)),
    "enum": lambda: Place.HOST,
    "path": lambda: Path("x"),
    "bytes": lambda: b"host",
    "set": lambda: {"host"},
    "huge": lambda: 10**5000,
    "long": lambda: "x" * 1_000_000,
    "long key": lambda: {"k" * 100_000: 1},
    "many keys": lambda: {f"k{number}": 1 for number in range(5000)},
    "strange keys": lambda: {1: 2, None: 3, ("a",): 4, b"x": 5, float("nan"): 6},
    "surrogate": lambda: "\ud800",
    "function": lambda: len,
}
PLACES = sorted(
    {(key,) for key in [*KEYS, *HONOURED[()], *OTHER[()]]}
    | {(name, key) for name, table in Policy() if hasattr(table, "model_fields_set") for key in type(table).model_fields}
    | {(*place, key) for place in HONOURED for key in {*HONOURED[place], *OTHER.get(place, {})}}
    | {("rule", "match"), ("rule", "parameter"), ("rule", "parameter.tier"), ("rule", "precision")}
)


@pytest.mark.parametrize("every", [len(FOREIGN), *slow(6)])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_value_that_no_file_holds_is_refused_in_few_words_wherever_it_stands(kind: str, every: int) -> None:
    # Each kind at one place of ``every``; between them they are everywhere.
    for place in PLACES[list(FOREIGN).index(kind) % every :: every]:
        values: Any = FOREIGN[kind]()
        for key in reversed(place):
            values = [{"match": "*", key: values}] if place[0] == "rule" and key != "rule" else {key: values}
        if place[0] in HONOURED[()] | OTHER[()].keys():
            values.setdefault("zero_optimization", {"stage": 2})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Policy.of(values)
            except PolicyError as error:
                said = str(error)
                assert 0 < len(said) < 5000 and all(line.isprintable() for line in said.split("\n")), place
                assert len(place) > 1 or place[0][:60] in said or "names for keys" in said, (place, said)
        assert all(len(str(warning.message)) < 1000 for warning in caught)


def test_an_array_where_a_number_is_expected_is_named_with_its_key() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.of({"units": {"min_numel": numpy.ones(3)}, "parameter": {"tier": torch.ones(2)}})
    assert str(caught.value).split("\n") == [
        "policy: [units] min_numel: expected an integer from 0 to 2**40, found a value of type numpy.ndarray",
        'policy: [parameter] tier: expected "device", "host" or "disk", found a value of type torch.Tensor',
    ]
    assert Policy.of({"parameter": {"tier": Word("host")}}) == Policy.of({"parameter": {"tier": "host"}})


MEBI = 1 << 20
HOSTILE = {
    "dotted.toml": ".".join(["a"] * 6000) + " = 1",
    "table.toml": "[" + ".".join(["a"] * (MEBI // 2 - 10)) + "]",
    "quoted.toml": ".".join(['"a"'] * 6000) + " = 1",
    "inline.toml": "units = {" + " . ".join(["a"] * 6000) + " = 1}",
    "word.toml": "a" * (MEBI - 10),
    "open.toml": '"' + '\\"' * (MEBI // 2 - 10),
    "open3.toml": 'a = """' + '\\"' * (MEBI // 2 - 10),
    "open.json": '{"' + '\\"' * (MEBI // 2 - 10),
    "deep.json": '{"a":' * 5000 + "1" + "}" * 5000,
    "deep.toml": "a = " + "[" * (MEBI - 10),
    "digits.json": '{"stage": ' + "9" * 10_000 + "}",
    "twice.json": '{"' + "x" * 10_000 + '": 1, "' + "x" * 10_000 + '": 2}',
    "keys.toml": "\n".join(f"k{number} = 1" for number in range(5000)),
    "extends.toml": 'extends = ["' + "x" * 5000 + '"]',
    "nothing.toml": "a = 1\0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_few_words(name: str, write: Write) -> None:
    """Some of these took minutes or gigabytes: the test ends because they are refused before they are parsed."""
    path = write(HOSTILE[name], name)
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert str(caught.value).startswith(str(path)) and len(str(caught.value)) < 5000
