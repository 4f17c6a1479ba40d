"""What a policy file may say, and what it then means."""

from __future__ import annotations

import copy
import json
import pickle
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from offload.errors import PolicyError
from offload.policy import Policy, Rule
from offload.policy.tables import Budget, Disk, Dtypes
from offload.text import Share, format_amount, format_size, parse_amount, parse_size
from offload.tier import Tier, Tiers
from tests.support.policy_texts import WHOLE

Write = Callable[..., Path]


# --- what it means ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_stage_3_on_the_device() -> None:
    policy = Policy.of(None)
    assert policy.stage == 3
    assert (policy.precision.param, policy.precision.cast_inputs) == (None, True)
    assert (policy.units.classes, policy.units.names) == ((), ())
    assert (policy.units.min_numel, policy.units.max_numel) == (65536, 2**26)
    assert policy.schedule.reshard_after_forward == "auto"
    assert (policy.schedule.prefetch, policy.schedule.max_reductions) == (1, 2)
    assert policy.budget == Budget(device=None, host=None, disk=None)
    assert (policy.comm.transport, policy.comm.timeout_s, policy.comm.bucket) == ("auto", 300.0, 16 << 20)
    assert {policy.parameter.tier, policy.gradient.tier, policy.optimizer.tier, policy.activation.tier} == {"device"}
    assert (policy.optimizer.kernel, policy.optimizer.compute, policy.optimizer.overlap) == ("torch", "device", False)
    assert (policy.activation.checkpoint, policy.activation.min_bytes, policy.activation.keep) == ("none", 1 << 20, 0)
    assert policy.device.model_dump() == {"arena": "none"}
    assert policy.host.model_dump() == {"pin": "auto", "slab": 64 << 20}
    assert policy.disk.model_dump() == {"path": None, "block": 4 << 20, "threads": 16, "direct": "auto"}
    assert policy.rule == () and not policy.tiered


@pytest.mark.parametrize(("stage", "row"), [(0, "R R R"), (1, "R P S"), (2, "R S S"), (3, "S S S")])
def test_each_stage_is_one_row_of_the_table(stage: int, row: str) -> None:
    table = Policy(stage=stage).table()
    assert list(table) == ["parameter", "gradient", "optimizer"]
    assert " ".join(table.values()) == row


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_row_written_cell_by_cell_is_its_stage(stage: int) -> None:
    cells = {cell: {"partition": Policy(stage=stage).partition(cell)} for cell in Policy().table()}
    assert Policy.of(cells).stage == stage
    assert Policy.of({"stage": stage, **cells}).stage == stage


@pytest.mark.parametrize(("cell", "partition", "stage"), [("parameter", "shard", 3), ("optimizer", "replicate", 0)])
def test_one_cell_is_enough_where_only_one_row_has_it(cell: str, partition: str, stage: int) -> None:
    assert Policy.of({cell: {"partition": partition}}).stage == stage


def test_the_table_says_which_share_of_the_states_stays_on_the_device() -> None:
    policy = Policy.of({"optimizer": {"tier": "host", "device_share": 0.3}})
    assert "# optimizer  shard      S       host, 0.3 of it on the device" in policy.describe()
    assert Policy.of(tomllib.loads(policy.describe())) == policy


@pytest.mark.parametrize(("share", "numel", "kept"), [(0.29, 100, 29), (0.7, 10, 7), (0.3, 5, 1), (1, 3, 3), (1e-7, 10**8, 10)])
def test_a_share_keeps_whole_elements_and_never_more(share: float, numel: int, kept: int) -> None:
    assert Policy.of({"optimizer": {"tier": "host", "device_share": share}}).optimizer.kept_on_device(numel) == kept


def test_a_tier_alone_spells_no_stage() -> None:
    assert Policy.of({"parameter": {"tier": "device"}}).stage == 3


def test_every_key_of_a_file_arrives(write: Write) -> None:
    policy = Policy.load(write(WHOLE))
    assert policy.stage == 2
    written = {"param": "bf16", "reduce": "fp32", "output": "fp32", "cast_inputs": False}
    assert policy.precision.model_dump(include=set(written)) == written
    assert policy.units.classes == ("Block", "Stage")
    assert policy.units.names == ("layers.*", "head")
    assert (policy.units.min_numel, policy.units.max_numel) == (0, 1_000_000)
    assert policy.schedule.model_dump() == {"reshard_after_forward": False, "prefetch": 3, "max_reductions": 4, "uneven": False}
    assert policy.optimizer.model_dump() == {
        "partition": "shard", "tier": "disk", "kernel": "numba", "compute": "host", "overlap": True,
        "rounding": "stochastic", "seed": 11, "device_share": 0.25,
    }  # fmt: skip
    assert policy.activation.model_dump() == {
        "tier": "host", "checkpoint": "unit", "partition": "tp", "sharded_inputs": ("layers.[0-3]",), "min_bytes": 64 << 10,
        "keep": 1 << 30,
    }  # fmt: skip
    assert (policy.budget.device, policy.budget.host, policy.budget.disk) == (20 << 30, Share(0.8), 12345)
    assert policy.device.model_dump() == {"arena": "all"}
    assert policy.host.model_dump() == {"pin": False, "slab": 16 << 20}
    assert policy.disk.model_dump() == {"path": "/scratch", "block": 4 << 20, "threads": 7, "direct": True}
    assert [(rule.match, rule.tiers()) for rule in policy.rule] == [
        ("*.embed*", {"gradient": "host", "optimizer": "device"}),
        ("head.*", {"optimizer": "host"}),
    ]
    assert policy.comm.model_dump() == {"transport": "p2p", "timeout_s": 12.5, "bucket": 8 << 20, "buffer": 256 << 20}


def test_toml_json_and_a_mapping_that_say_the_same_are_equal(write: Write) -> None:
    values = tomllib.loads(WHOLE)
    text = json.dumps(values)
    from_toml = Policy.load(write(WHOLE))
    assert from_toml == Policy.of(values) == Policy(**values)
    assert from_toml == Policy.load(write(text, "policy.json")) == Policy.load(write(text, "policy"))
    assert from_toml == Policy.of(str(write(WHOLE)))


def test_a_policy_is_itself() -> None:
    policy = Policy(stage=1)
    assert Policy.of(policy) is policy


def test_a_policy_is_frozen_hashable_and_survives_pickle_and_copy() -> None:
    policy = Policy.of(tomllib.loads(WHOLE))
    with pytest.raises(ValueError, match="frozen"):
        policy.stage = 1
    assert hash(policy) == hash(Policy.of(tomllib.loads(WHOLE)))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


def test_a_file_with_a_byte_order_mark_or_carriage_returns_is_read(write: Write) -> None:
    assert Policy.load(write(b"\xef\xbb\xbfstage = 1\r\n[units]\r\nmin_numel = 0\r\n")).stage == 1


def test_an_empty_file_is_every_default(write: Write) -> None:
    assert Policy.load(write("")) == Policy()


def test_every_key_explains_its_default() -> None:
    def keys(model: type[BaseModel]) -> list[tuple[str, Any]]:
        below = [f.annotation for f in model.model_fields.values()]
        tables = [kind for kind in (*below, Rule) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        tables = tables if model is Policy else [kind for kind in tables if kind is not Rule]
        return [*model.model_fields.items(), *(pair for table in tables for pair in keys(table))]

    assert len(keys(Policy)) > 50
    for name, field in keys(Policy):
        assert field.description and field.description.endswith("."), f"{name} does not say why"


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("20 GiB", 20 << 30),
        ("20GiB", 20 << 30),
        ("20 gib", 20 << 30),
        ("  32 MiB ", 32 << 20),
        ("1.5 GiB", 3 << 29),
        ("1 KB", 1000),
        ("2 MB", 2 * 10**6),
        ("3 GB", 3 * 10**9),
        ("1 TB", 10**12),
        ("1 TiB", 1 << 40),
        ("8 KiB", 8192),
        ("0.1 KiB", 102),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        -1,
        True,
        1.5,
        None,
        "",
        "GiB",
        "20 G",
        "20 Gi",
        "-1 GiB",
        "1e9",
        "1 GiB 2",
        "20 Gb/s",
        "٣ GiB",
        "9" * 30,
        2**63,
        [1],
    ],
)
def test_anything_else_is_no_size(value: object) -> None:
    with pytest.raises(PolicyError, match='expected bytes or a size like "20 GiB"'):
        parse_size(value)


@given(st.integers(0, 2**63 - 1) | st.integers(0, 2**20).map(lambda n: n << 20))
def test_a_formatted_size_parses_back_exactly(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_sizes_are_written_in_the_largest_unit_that_divides_them() -> None:
    assert [format_size(n) for n in (0, 1, 1024, 3 << 29, 20 << 30, 1 << 40)] == [
        "0 B", "1 B", "1 KiB", "1536 MiB", "20 GiB", "1 TiB",
    ]  # fmt: skip


# --- describe ---------------------------------------------------------------------------------------------------------


def test_describe_prints_the_effective_table_and_every_key() -> None:
    text = Policy.of({"stage": 1, "precision": {"param": "bf16"}, "budget": {"device": "1.5 GiB"}}).describe()
    assert text.isascii() and "\x1b" not in text
    assert text.startswith(
        "# what       partition  placed  tier\n"
        "# parameter  replicate  R       device\n"
        "# gradient   replicate  P       device\n"
        "# optimizer  shard      S       device\n"
    )
    for line in (
        "stage = 1",
        "# partition is unset: replicate, which follows from stage 1",
        'param = "bf16"',
        "# reduce is unset: fp32, as param is set",
        '# reshard_after_forward = "auto"  # as [budget] device allows',
        'device = "1536 MiB"',
        '# bucket = "16 MiB"',
        "# check_every is unset: replicas are not compared",
        "# job is unset: torchrun's run id",
    ):
        assert line in text.splitlines(), line
    for section in Policy.model_fields:
        assert section in ("stage", "rule") or f"# [{section}]" in text.splitlines()


def test_describe_prints_the_keys_that_were_changed_first() -> None:
    rule = {"match": "head.*", "optimizer": {"tier": "disk"}}
    text = Policy.of({"stage": 2, "rule": [rule], "comm": {"timeout_s": 9}}).describe()
    changed, _, defaults = text.partition("\n# All other keys have their defaults:\n")
    assert changed.splitlines()[6:] == [
        "stage = 2", "", "[comm]", "timeout_s = 9.0", "", "[[rule]]", 'match = "head.*"', 'optimizer.tier = "disk"',
    ]  # fmt: skip
    assert all(line.startswith("#") for line in defaults.splitlines()) and "timeout_s" not in defaults


NAMES = st.text(min_size=1, max_size=20).filter(str.isprintable)
DTYPES = st.sampled_from(["fp32", "bf16", "fp16"])
SIZES = st.integers(256, 2**62) | st.sampled_from(["20 GiB", "1.5 MiB", "256"])


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


TIERS = st.sampled_from(["device", "host", "disk"])
AMOUNTS = SIZES | st.integers(0, 100).map(lambda n: f"{n}%") | st.floats(0, 1).map(Share)
TOGGLES = st.booleans() | st.just("auto")
RULES = st.builds(
    lambda match, cell, tier, more: {"match": match, cell: {"tier": tier}, **more},
    NAMES,
    st.just("optimizer"),
    TIERS,
    some(gradient=some(tier=TIERS), precision=some(param=DTYPES, reduce=DTYPES)),
)


def computable(values: dict[str, Any]) -> dict[str, Any]:
    """An update on the host needs its values there."""
    if values.get("optimizer", {}).get("compute") != "host":
        return values
    moved = {cell: {**values.get(cell, {}), "tier": "host"} for cell in ("gradient", "optimizer")}
    return {**values, **moved, "precision": {"param": "bf16", **values.get("precision", {})}}


VALUES = some(
    stage=st.integers(0, 3),
    gradient=some(tier=TIERS),
    optimizer=some(
        tier=TIERS,
        kernel=st.sampled_from(["torch", "numba"]),
        compute=st.sampled_from(["device", "host"]),
        overlap=st.booleans(),
        rounding=st.sampled_from(["nearest", "stochastic"]),
        seed=st.integers(0, 2**63 - 1),
    ),
    activation=st.one_of(
        some(tier=TIERS, checkpoint=st.sampled_from(["none", "unit"]), min_bytes=SIZES, keep=SIZES),
        st.just({"checkpoint": "unit", "partition": "tp", "sharded_inputs": ["layers.*"]}),
    ),
    device=some(arena=st.sampled_from(["none", "states", "all"])),
    host=some(pin=TOGGLES, slab=st.integers(4096, 2**62)),
    disk=some(path=NAMES, block=st.integers(256, 2**40).map(lambda n: n * 4096), threads=st.integers(1, 64), direct=TOGGLES),
    rule=st.lists(RULES, max_size=3),
    precision=some(param=DTYPES, reduce=DTYPES, output=DTYPES, cast_inputs=st.booleans()),
    units=some(
        classes=st.lists(NAMES, max_size=3),
        names=st.lists(NAMES, max_size=3),
        min_numel=st.integers(0, 2**40),
        max_numel=st.integers(1, 2**40),
    ),
    schedule=some(
        reshard_after_forward=st.booleans() | st.just("auto"),
        prefetch=st.integers(0, 16),
        max_reductions=st.integers(1, 64),
    ),
    budget=some(device=AMOUNTS, host=AMOUNTS, disk=AMOUNTS),
    comm=some(
        transport=st.sampled_from(["auto", "stock", "p2p", "shm"]),
        timeout_s=st.floats(1e-3, 86400) | st.integers(1, 86400),
        bucket=SIZES,
        buffer=SIZES,
    ),
).map(computable)
FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@FILES
@given(values=VALUES)
def test_describe_is_a_policy_file_that_loads_back_equal(values: dict[str, Any], write: Write) -> None:
    policy = Policy.of(values)
    assert Policy.load(write(policy.describe())) == policy


@FILES
@given(values=VALUES)
def test_json_and_a_mapping_mean_the_same(values: dict[str, Any], write: Write) -> None:
    assert Policy.load(write(json.dumps(values, default=str), "policy.json")) == Policy.of(values)


@given(values=VALUES)
def test_values_are_plain_and_mean_the_same(values: dict[str, Any]) -> None:
    policy = Policy.of(values)
    assert Policy.of(json.loads(json.dumps(policy.values()))) == policy


# --- shares, rules and tiers ------------------------------------------------------------------------------------------


def test_a_budget_is_a_size_or_a_share_of_what_is_free() -> None:
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        return 1000

    budget = Policy.of({"budget": {"device": "20 GiB", "host": "80%"}}).budget
    assert budget.resolve(Tier.DEVICE, available) == 20 << 30
    assert budget.resolve(Tier.DISK, available) is None
    assert asked == [], "only a share needs to know what is free"
    assert budget.resolve(Tier.HOST, available) == 800
    assert asked == [1]


@given(st.floats(0, 1))
def test_a_formatted_share_parses_back_exactly(fraction: float) -> None:
    assert parse_amount(format_amount(Share(fraction))) == Share(fraction)


@pytest.mark.parametrize(("text", "fraction"), [("80%", 0.8), ("7 %", 0.07), ("12.5%", 0.125), ("0%", 0.0), ("100%", 1.0)])
def test_a_percentage_is_a_share(text: str, fraction: float) -> None:
    assert parse_amount(text) == Share(fraction)
    assert str(Share(0.07)) == "7%"


@pytest.mark.parametrize("value", ["101%", "-1%", "%", "80%%", "1e1%", Share(1.5), Share(-0.1), Share(float("nan"))])
def test_a_share_is_between_nothing_and_everything(value: object) -> None:
    with pytest.raises(PolicyError, match="expected"):
        parse_amount(value)


RULED = Policy.of(
    {
        "parameter": {"tier": "disk"},
        "rule": [
            {"match": "*.embed*", "parameter": {"tier": "device"}, "optimizer": {"tier": "host"}},
            {"match": "*.embed*.bias", "parameter.tier": "host"},
            {"match": "HEAD", "gradient.tier": "disk"},
        ],
    }
)


def test_the_last_rule_that_matches_decides_each_cell() -> None:
    device, host, disk = Tier.DEVICE, Tier.HOST, Tier.DISK
    assert RULED.tiers("layers.0.weight") == Tiers(parameter=disk, gradient=device, optimizer=device)
    assert RULED.tiers("model.embed.weight") == Tiers(parameter=device, gradient=device, optimizer=host)
    assert RULED.tiers("model.embed.bias") == Tiers(parameter=host, gradient=device, optimizer=host)
    assert RULED.tiers("head") == RULED.tiers("layers.0.weight"), "case counts"


def test_the_last_rule_that_says_a_dtype_decides_it_key_by_key() -> None:
    rules = [
        {"match": "*norm*", "precision": {"param": "fp32", "reduce": "bf16"}, "optimizer.tier": "host"},
        {"match": "*.norm2.*", "precision.reduce": "fp16"},
    ]
    policy = Policy.of({"precision": {"param": "bf16"}, "rule": rules})
    assert policy.dtypes("blocks.0.weight") == Dtypes("bf16", "fp32"), "sums are fp32 where a dtype of compute is said"
    assert policy.dtypes("blocks.0.norm1.weight") == Dtypes("fp32", "bf16")
    assert policy.dtypes("blocks.0.norm2.weight") == Dtypes("fp32", "fp16")
    assert policy.tiers("blocks.0.norm2.weight").optimizer is Tier.HOST
    assert Policy().dtypes("any") == Dtypes(None, None)
    assert Policy.of({"rule": rules}).dtypes("blocks.0.weight") == Dtypes(None, None)
    assert not Policy.of({"rule": rules[1:]}).tiered
    assert Policy.of(policy.values()) == policy


@pytest.mark.parametrize(
    "values",
    [
        {"parameter": {"tier": "host"}},
        {"gradient": {"tier": "disk"}},
        {"optimizer": {"tier": "host"}},
        {"activation": {"tier": "host"}},
        {"optimizer": {"kernel": "numba"}},
        {"optimizer": {"overlap": True}},
        {"optimizer": {"rounding": "stochastic"}},
        {"rule": [{"match": "*", "optimizer.tier": "disk"}]},
    ],
)
def test_a_policy_says_whether_anything_is_placed(values: dict[str, Any]) -> None:
    assert Policy.of(values).tiered


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ("", "[parameter], [gradient] and [optimizer]"),
        ('tier = "host"\n[precision]\nparam = "bf16"', "[gradient]"),
        ('tier = "disk"\n[gradient]\ntier = "host"', "[parameter]"),
        ('[gradient]\ntier = "host"\n[[rule]]\nmatch = "*"\nparameter.tier = "host"', "[optimizer]"),
    ],
)
def test_an_update_on_the_host_is_refused_where_its_values_are_on_the_device(write: Write, written: str, left: str) -> None:
    with pytest.raises(PolicyError) as raised:
        Policy.load(write(f'[optimizer]\ncompute = "host"\n{written}\n'))
    text = str(raised.value)
    assert f":2: [optimizer] compute: found \"host\" and {left} on the device" in text
    assert f'write tier = "host" or "disk" for {left}' in text and text.endswith(', or compute = "device"')


def test_replicated_parameters_are_not_asked_to_move() -> None:
    cells = {"gradient": {"tier": "host"}, "optimizer": {"tier": "host", "compute": "host"}}
    with pytest.raises(PolicyError, match=r'write param = "bf16" in \[precision\], or compute = "device"$'):
        Policy.of({"stage": 2, **cells})


def test_a_rule_may_move_what_an_update_on_the_host_works_on() -> None:
    cells = {f"{cell}.tier": "host" for cell in ("parameter", "gradient", "optimizer")}
    assert Policy.of({"optimizer": {"compute": "host"}, "rule": [{"match": "*", **cells}]}).tiered


def test_rules_and_keys_that_place_nothing_leave_a_policy_untiered() -> None:
    placed = {"rule": [{"match": "*", "parameter.tier": "device"}], "budget": {"host": "80%"}, "disk": {"threads": 2}}
    assert not Policy.of(placed).tiered


def test_the_folder_of_the_disk_tier_is_the_systems_own_where_none_is_said() -> None:
    assert Disk().folder == Path(tempfile.gettempdir())
    assert Disk(path="/scratch").folder == Path("/scratch")
    assert Policy.of({"disk": {"path": "~/scratch"}}).disk.folder == Path.home() / "scratch", "a tilde is the home folder"


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_may_be_stored_elsewhere_where_the_whole_row_is_sharded_or_none_of_it(stage: int) -> None:
    assert Policy.of({"stage": stage, "parameter": {"tier": "disk"}}).tiers("any").parameter is Tier.DISK


# --- the schema for editors -------------------------------------------------------------------------------------------


def test_the_json_schema_names_every_table_and_key_and_allows_no_other() -> None:
    schema = Policy.json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == {*Policy.model_fields, "extends", "$schema"}
    for definition in (schema, *schema["$defs"].values()):
        if definition.get("type") == "object":
            assert definition["additionalProperties"] is False
            for name, key in definition["properties"].items():
                assert "description" in key or "$ref" in key, f"{name} is not described"
    assert schema["$defs"]["Disk"]["properties"]["threads"]["maximum"] == 64
    assert '"expected"' not in json.dumps(schema)


def test_a_schema_key_and_a_schema_comment_are_harmless(write: Write) -> None:
    assert Policy.load(write('{"$schema": "policy.schema.json", "stage": 1}', "policy.json")) == Policy(stage=1)
    assert Policy.load(write("#:schema policy.schema.json\nstage = 1\n")) == Policy(stage=1)
