"""A DeepSpeed configuration means here what it means there, and nothing it asks for is dropped in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.errors import PolicyError
from offload.policy import IgnoredKeys, Policy, deepspeed
from offload.policy.deepspeed_keys import ALIASES, AMBIGUOUS, HONOURED, LEFT_OPEN, OTHER
from tests.support.policy_texts import EVERYTHING, read

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def into(values: dict[str, Any], name: str = "ds_config.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(values, indent=1))
        return path

    return into


def complaint(value: Any) -> str:
    with pytest.raises(PolicyError) as raised:
        Policy.of(value)
    return str(raised.value)


# --- what it means ----------------------------------------------------------------------------------------------------


def test_every_table_is_translated() -> None:
    policy, _ = read(EVERYTHING)
    assert policy == Policy(
        stage=3,
        parameter={"tier": "disk"},
        gradient={"tier": "host"},
        optimizer={"tier": "host", "compute": "host"},
        activation={"tier": "host", "checkpoint": "unit"},
        precision={"param": "bf16", "reduce": "fp32"},
        units={"max_numel": 100_000_000},
        schedule={"prefetch": 0, "max_reductions": 1},
        host={"pin": False},
        disk={"path": "/nvme", "block": "1 MiB", "threads": 16},
    )


def test_what_has_no_counterpart_is_listed_with_what_to_do_instead() -> None:
    _, ignored = read(EVERYTHING)
    assert ignored == (
        "train_batch_size = 64: set batch_size in the data loader",
        "gradient_clipping = 1: call torch.nn.utils.clip_grad_norm_ in the loop",
        "zero_optimization.offload_param.buffer_count = 5: buffers are counted from the plan; set [schedule] prefetch",
        "zero_optimization.sub_group_size = 1e+09: the step updates buffer by buffer, with a fixed number of buffers",
        "activation_checkpointing.partition_activations = true: on a mesh with a tp axis set [activation] "
        'checkpoint = "unit" and partition = "tp"',
    )


def test_loading_warns_once_on_the_callers_line_and_names_every_key(write: Write) -> None:
    path = write({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "steps_per_print": 10})
    with pytest.warns(IgnoredKeys) as caught:
        Policy.load(path)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert str(caught[0].message) == (
        f"{path}: DeepSpeed keys not honoured: gradient_clipping, steps_per_print; "
        "`zprof policy check` shows what to do instead"
    )


def test_a_mapping_warns_on_the_callers_line_too() -> None:
    with pytest.warns(IgnoredKeys, match=r"^policy: DeepSpeed keys not honoured: steps_per_print; ") as caught:
        Policy.of({"zero_optimization": {"stage": 2}, "steps_per_print": 10})
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({"train_batch_size": "auto"}, 0),
        ({"zero_optimization": {"stage": 2}}, 2),
        ({"zero_optimization": {}}, 0),
        ({"zero_optimization": True}, 1),
        ({"zero_optimization": False}, 0),
        ({"zero_optimization": {"stage": 3.0}}, 3),
        ({"bf16": {"enabled": False}}, 0),
    ],
)
def test_the_stage_is_deepspeeds_and_0_where_it_says_nothing_of_zero(values: dict[str, Any], stage: int) -> None:
    assert read(values) == (Policy(stage=stage), ())


def test_a_stage_left_to_accelerate_is_the_policys_own_and_listed() -> None:
    policy, ignored = read({"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}})
    assert policy == Policy()
    left = "left to transformers or accelerate, which are not used here"
    assert ignored == (
        f'zero_optimization.stage = "auto": {left}; the policy\'s own default, stage 3, applies; write a number',
        f'zero_optimization.offload_optimizer.device = "auto": {left}; it stays on the device; write cpu, nvme or none',
    )


@pytest.mark.parametrize("place", list(LEFT_OPEN), ids=".".join)
def test_a_key_that_decides_what_a_run_computes_is_listed_where_it_is_left_to_a_launcher(place: tuple[str, ...]) -> None:
    """Training in fp32 where a launcher would have put bf16 must not be silent."""
    values: Any = "auto"
    for key in reversed(place):
        values = {key: values}
    with pytest.warns(IgnoredKeys, match=".".join(place)) as caught:
        Policy.of({"train_batch_size": 8, **values})
    lines = [line for line in caught[0].message.ignored if line.startswith(".".join(place))]
    left = "left to transformers or accelerate, which are not used here"
    assert lines == [f'{".".join(place)} = "auto": {left}; {LEFT_OPEN[place]}']


def test_of_two_precisions_the_one_left_open_is_not_listed_where_the_other_is_written() -> None:
    assert read({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}})[1] == ()


@pytest.mark.parametrize(
    ("zero", "parameter", "gradient", "optimizer"),
    [
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "host", "device", "device"),
        ({"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}, "disk", "disk", "disk"),
        ({"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": None}, "device", "device", "device"),
        ({"stage": 3, "offload_param": False, "offload_optimizer": False}, "device", "device", "device"),
        ({"stage": 2, "cpu_offload": True}, "device", "host", "host"),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, "host", "host", "host"),
        ({"stage": 3, "cpu_offload_param": True, "cpu_offload": False}, "host", "device", "device"),
    ],
)
def test_offload_is_a_tier_and_gradients_go_with_the_optimizer(
    zero: dict[str, Any], parameter: str, gradient: str, optimizer: str
) -> None:
    policy, ignored = read({"zero_optimization": zero})
    assert (policy.parameter.tier, policy.gradient.tier, policy.optimizer.tier) == (parameter, gradient, optimizer)
    masters_move = optimizer != "device" and parameter != "device"
    assert policy.optimizer.compute == ("host" if masters_move else "device")
    assert ignored == ()


@pytest.mark.parametrize(("ratio", "share"), [(0.3, 0.7), (0.7, 0.3), (0, 1), (1, 0), (1.0, 0), ("auto", 0)])
def test_the_ratio_that_is_offloaded_leaves_the_rest_on_the_device(ratio: object, share: float) -> None:
    policy, ignored = read({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}}})
    assert (policy.optimizer.tier, policy.optimizer.device_share, ignored) == ("host", share, ())


def test_a_ratio_is_of_stage_3_and_of_what_is_offloaded() -> None:
    policy, ignored = read({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}})
    listed = "zero_optimization.offload_optimizer.ratio = 0.3: DeepSpeed, too, divides the states only at stage 3"
    assert policy.optimizer.device_share == 0 and ignored == (listed,)
    policy, ignored = read({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.3}}})
    assert policy == Policy() and ignored == ()
    for wrong in (1.5, -1, "half", True):
        with pytest.raises(PolicyError, match="expected a number from 0 to 1"):
            read({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": wrong}}})


@pytest.mark.parametrize(
    ("zero", "listed"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, 'zero_optimization.offload_param.device = "cpu"'),
        ({"stage": 1, "cpu_offload_params": True}, "zero_optimization.cpu_offload_params = true"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, 'zero_optimization.offload_optimizer.device = "cpu"'),
    ],
)
def test_offload_that_deepspeed_itself_would_not_do_is_listed(zero: dict[str, Any], listed: str) -> None:
    policy, ignored = read({"zero_optimization": zero})
    assert not policy.tiered
    assert [line.partition(": ")[0] for line in ignored] == [listed]


#: What DeepSpeed does wherever fp16 is on.
DYNAMIC = {"loss_scale": "dynamic", "growth_interval": 1000, "hysteresis": 2}


@pytest.mark.parametrize(
    ("values", "precision"),
    [
        ({"fp16": {"enabled": True}}, {"param": "fp16", **DYNAMIC}),
        ({"fp16": {"enabled": True, "auto_cast": False}}, {"param": "fp16", "cast_inputs": False, **DYNAMIC}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"param": "fp16", "loss_scale": 128.0}),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 500, "min_loss_scale": 8}},
            {"param": "fp16", **DYNAMIC, "initial_scale": 2.0**20, "growth_interval": 500, "min_scale": 8.0},
        ),
        ({"fp16": {"enabled": True, "hysteresis": 3}}, {"param": "fp16", **DYNAMIC, "hysteresis": 3}),
        ({"fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}}, {}),
        ({"fp16": {"enabled": False, "auto_cast": False}, "bf16": {"enabled": False}}, {}),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, {"param": "bf16"}),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {"param": "bf16"}),
        ({"communication_data_type": "bf16"}, {"reduce": "bf16"}),
    ],
)
def test_precision_is_translated(values: dict[str, Any], precision: dict[str, Any]) -> None:
    assert read(values) == (Policy(stage=0, precision=precision), ())


@pytest.mark.parametrize("key", ["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"])
@pytest.mark.parametrize("value", [-1, "much", True, 1e300])
def test_a_loss_scale_that_deepspeed_could_not_use_is_an_error(key: str, value: object) -> None:
    with pytest.raises(PolicyError, match=rf"\[fp16\] {key}: expected a number from .* found"):
        read({"fp16": {"enabled": True, key: value}})


@pytest.mark.parametrize(
    ("aio", "block", "threads"),
    [
        ({"block_size": 262144, "queue_depth": 32, "thread_count": 1}, 1 << 20, 8),
        ({"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 4}, 1 << 20, 64),
        ({"block_size": 8388608}, 8 << 20, 8),
        ({"block_size": 1048577, "queue_depth": 1}, (1 << 20) + 4096, 1),
        ({"queue_depth": 4}, 1 << 20, 4),
    ],
)
def test_as_many_bytes_are_in_flight_on_disk(aio: dict[str, Any], block: int, threads: int) -> None:
    policy, ignored = read({"aio": aio, "zero_optimization": {"stage": 3}})
    assert (policy.disk.block, policy.disk.threads, ignored) == (block, threads, ())


def test_aio_inside_zero_optimization_as_some_pages_have_it_is_read_too() -> None:
    assert read({"zero_optimization": {"stage": 3, "aio": {"queue_depth": 4}}})[0].disk.threads == 4


def test_a_bucket_too_small_to_cut_by_is_listed() -> None:
    policy, ignored = read({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 1000}})
    assert policy.units.max_numel == 500_000_000
    assert [line.partition(":")[0] for line in ignored] == ["zero_optimization.allgather_bucket_size = 1000"]


def test_two_scratch_folders_are_one_and_the_other_is_listed() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}
    policy, ignored = read({"zero_optimization": {**zero, "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}})
    assert policy.disk.path == "/a"
    assert ignored == ('zero_optimization.offload_optimizer.nvme_path = "/b": one scratch file serves both; it is in "/a"',)


def test_the_scratch_folder_is_that_of_what_goes_to_disk() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/unused"}}
    policy, ignored = read({"zero_optimization": {**zero, "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}})
    assert policy.disk.path == "/b"
    assert [line.partition(" = ")[0] for line in ignored] == ["zero_optimization.offload_param.nvme_path"]


@pytest.mark.parametrize("place", list(OTHER), ids=".".join)
def test_every_key_is_translated_or_listed_or_means_what_happens_anyway(place: tuple[str, ...]) -> None:
    strange = {"a value": "that asks for something"}
    for key, other in OTHER[place].items():
        values: dict[str, Any] = {key: strange}
        for table in reversed(place):
            values = {table: {**values, "enabled": True} if table in ("fp16", "bf16") else values}
        values.setdefault("train_batch_size", "auto")
        _, ignored = read(values)
        assert ignored == (f"{'.'.join((*place, key))}: {other.instead}",)
        for same in other.same:
            inner: dict[str, Any] = {key: same}
            for table in reversed(place):
                inner = {table: inner}
            assert read({**inner, "fp16": {"enabled": False}} if "fp16" not in inner else inner)[1] == ()


def test_no_key_is_both_translated_and_listed() -> None:
    for place, keys in OTHER.items():
        assert not HONOURED[place] & keys.keys()
        assert not ALIASES.get(place, {}).keys() & (HONOURED[place] | keys.keys())
    assert OTHER[()].keys() >= AMBIGUOUS
    for table in ALIASES.values():
        for target in table.values():
            assert target[-1] in HONOURED[target[:-1]] | OTHER[target[:-1]].keys()


# --- which files it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {}}},
        {"zero_allow_untested_optimizer": True},
        {"gradient_clipping": "auto"},
    ],
)
def test_a_fragment_is_known_by_any_key_that_is_deepspeeds_alone(values: dict[str, Any]) -> None:
    assert deepspeed.speaks(values, frozenset(Policy.model_fields))
    assert read(values)[0] == Policy(stage=0)


@pytest.mark.parametrize("key", sorted(AMBIGUOUS - {"optimizer"}))
def test_a_misspelt_key_of_ours_is_no_sign_of_deepspeed(key: str) -> None:
    assert "unknown key" in complaint({key: {"prefetch": 2}})


def test_a_policy_of_ours_is_never_taken_for_deepspeeds() -> None:
    own = frozenset(Policy.model_fields)
    assert not any(deepspeed.speaks({key: {}}, own) for key in Policy.model_fields)


def test_a_file_that_speaks_both_dialects_is_refused(write: Write) -> None:
    path = write({"stage": 3, "bf16": {"enabled": True}})
    assert complaint(path) == (
        f"{path}:3: bf16: a DeepSpeed key next to stage, a key of zhooks; use one kind of key, "
        "or name the DeepSpeed file in extends"
    )


def test_a_policy_may_extend_a_deepspeed_configuration(write: Write, tmp_path: Path) -> None:
    write({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 1.0})
    path = tmp_path / "policy.toml"
    path.write_text('extends = "ds_config.json"\n[budget]\nhost = "48 GiB"\n')
    with pytest.warns(IgnoredKeys) as caught:
        policy = Policy.load(path)
    assert policy == Policy(stage=3, parameter={"tier": "host"}, budget={"host": "48 GiB"})
    (warning,) = caught
    assert isinstance(warning.message, IgnoredKeys)
    assert warning.message.ignored[0].startswith(f"{tmp_path / 'ds_config.json'}: gradient_clipping = 1: ")


def test_what_a_layer_breaks_in_a_deepspeed_configuration_leads_to_its_file(write: Write, tmp_path: Path) -> None:
    base = write({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    path = tmp_path / "policy.toml"
    path.write_text('extends = "ds_config.json"\nstage = 2\n')
    assert complaint(path).startswith(f'{base}:2: [parameter] tier: found "host" at stage 2: replicated parameters')


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "misspelt": (
        {"zero_optimization": {"stage": 3, "offload_optimiser": {}}},
        "4: [zero_optimization] offload_optimiser: DeepSpeed has no such key; did you mean offload_optimizer?",
    ),
    "misspelt table": (
        {"train_batch_size": 1, "zero_optimisation": {}},
        "3: zero_optimisation: DeepSpeed has no such key; did you mean zero_optimization?",
    ),
    "in the wrong table": (
        {"bf16": {"enabled": True, "offload_param": {}}},
        "4: [bf16] offload_param: DeepSpeed has no such key; did you mean zero_optimization.offload_param?",
    ),
    "like no other": ({"bf16": {"zzz": 1}}, "3: [bf16] zzz: DeepSpeed has no such key here"),
    "device": (
        {"zero_optimization": {"offload_param": {"device": "gpu"}}},
        '4: [zero_optimization] offload_param.device: expected one of cpu, nvme, none or "auto", found "gpu"',
    ),
    "stage": (
        {"zero_optimization": {"stage": 4}},
        '3: [zero_optimization] stage: expected 0, 1, 2 or 3 or "auto", found 4',
    ),
    "flag": ({"bf16": {"enabled": "yes"}}, '3: [bf16] enabled: expected true or false or "auto", found "yes"'),
    "number": (
        {"zero_optimization": {"reduce_bucket_size": -1}},
        '3: [zero_optimization] reduce_bucket_size: expected a whole number, 0 or more or "auto", found -1',
    ),
    "table": ({"bf16": True}, "2: bf16: expected a table, found true"),
    "both precisions": (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "3: [bf16] enabled: expected fp16 or bf16, not both enabled; set one to false, found true",
    ),
    "twice": (
        {"zero_optimization": {"max_reuse_distance": 1, "stage3_max_reuse_distance": 2}},
        "4: [zero_optimization] stage3_max_reuse_distance: another spelling of zero_optimization.max_reuse_distance, "
        "which is also set; keep one of them",
    ),
}


@pytest.mark.parametrize(("values", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_with_file_line_and_remedy(values: dict[str, Any], expected: str, write: Write) -> None:
    path = write(values)
    assert complaint(path) == f"{path}:{expected}"
    assert complaint(values) == f"policy: {expected.partition(': ')[2]}"


def test_all_mistakes_are_listed_at_once(write: Write) -> None:
    path = write({"bf16": {"enabled": 3}, "zero_optimization": {"stage": 9, "overlap_com": True}})
    assert [line.removeprefix(f"{path}:").partition(":")[0] for line in complaint(path).splitlines()] == ["3", "6", "7"]


COMMENTED = """
// DeepSpeed reads its configurations as Hjson. {
{
  "zero_optimization": {  # the stage
    /* of ZeRO,
       in "words" */
    "stage": 3, // not 2,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt//a#b/,}"},
  },
  "bf16": {"enabled": true, },
}
"""


@pytest.mark.parametrize("name", ["ds_config.json", "ds_config"])
def test_comments_and_trailing_commas_are_read_as_deepspeed_does(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(COMMENTED)
    policy = Policy.of(path)
    assert (policy.stage, policy.disk.path, policy.precision.param) == (3, "/mnt//a#b/,}", "bf16")


def test_an_error_beside_comments_has_the_line_and_column_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{ // first\n  "zero_optimization": {"stage": 3,}, # second\n  "bf16": oops\n}\n')
    assert complaint(path) == f"{path}:3: not valid JSON: Expecting value (column 11)"
    path.write_text('{ // first\n  # second\n  "zero_optimization": {"stage": 7}\n}\n')
    assert complaint(path).startswith(f"{path}:3: ")


ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ACCELERATE, r"found Accelerate's own configuration, .*; pass the stage and tiers that it asks for as TOML"),
        (ACCELERATE + "  deepspeed_config_file: conf/ds.json\n", r"; pass conf/ds\.json, the DeepSpeed configuration that it"),
        ("stage: 3\n", r"expected a policy in TOML or JSON, found YAML; write it in one of these"),
    ],
)
def test_yaml_is_named_as_what_it_is_with_what_to_pass(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(text)
    assert re.search(expected, complaint(path))


def test_comments_and_a_schema_key_are_left_alone() -> None:
    values = {"$schema": "x", "_comment": "y", "zero_optimization": {"stage": 1, "_why": "z"}}
    assert read(values) == (Policy(stage=1), ())
