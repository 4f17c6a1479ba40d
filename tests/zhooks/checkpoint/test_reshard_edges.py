"""What else moves with a checkpoint that is loaded on other ranks, and what is refused by name on all of them.

pytest runs it, on one, two and four ranks; losses and whole states are test_reshard.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zhooks
from offload.shards import ShardReader
from tests.support.on_ranks import folder, from_first, on_ranks, place
from tests.support.ranks import Pool
from tests.support.resharding import Resharded, differences
from tests.support.torches import not_with_2_8
from tests.support.tp_gpt import divide, plain_gpt
from tests.support.values import full, same, sharded

Ranks = Callable[[int], Pool]
RESHARD = "tests.support.resharding"


def case(world: int, *more: Any, other: int, slow: bool = False) -> Any:
    """Saved on ``world`` ranks and loaded on ``other``; named by the largest pool that it asks for (tests/selection.py)."""
    named = "-".join(map(str, more))
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(world, other, *more, id=f"world{max(world, other)}-{world} to {other}-{named}", marks=marks)


ON_FOUR = pytest.mark.parametrize("world", [pytest.param(4, id="world4")])


# ---- what else moves


@pytest.mark.parametrize(
    ("world", "other", "kind", "common"),
    [
        case(2, "muon", {"tier": "host"}, other=4),
        case(1, "muon", {}, other=2, slow=True),
        case(2, "lbfgs", {}, other=1),
        case(2, "lbfgs", {"stage": 2}, other=4, slow=True),
        case(2, "lbfgs", {"stage": 0}, other=2, slow=True),
        case(4, "sgd", {"half": True}, other=2, slow=True),
        case(2, "adamw", {"dtype": "bfloat16", "more": {"optimizer": {"rounding": "stochastic"}}}, other=1),
    ],
)
def test_whole_matrices_vectors_and_narrow_masters_move(
    ranks: Ranks, tmp_path: Path, world: int, other: int, kind: str, common: dict[str, Any]
) -> None:
    went_on = ranks(world).run(f"{RESHARD}:save", path=str(tmp_path), kind=kind, **common)[0]
    resumed = ranks(other).run(f"{RESHARD}:load", path=str(tmp_path), kind=kind, **common)[0]
    assert resumed == pytest.approx(went_on, abs=5e-2 if common.get("half") or common.get("dtype") else 2e-6)


def saves_gradients(path: str) -> None:
    run = Resharded(Path(path))
    run.train(0, 1)
    run.forward(1).backward()
    run.attachment.save(Path(path) / "run", run.optimizer)
    grads = [param.grad.full_tensor() for param in run.model.parameters()]
    if place()[0] == 0:
        torch.save(grads, Path(path) / "grads.pt")


def loads_gradients(path: str, **setup: Any) -> None:
    run = Resharded(Path(path), seed=5, **setup)
    run.attachment.load(Path(path) / "run", run.optimizer)
    grads = [param.grad.full_tensor() for param in run.model.parameters()]
    assert same(grads, torch.load(Path(path) / "grads.pt"))
    run.optimizer.step()


@pytest.mark.parametrize(
    ("world", "other", "setup"),
    [
        case(2, {"tier": "disk"}, other=1),
        case(2, {"stage": 0}, other=4, slow=True),
        case(2, {"tp": 2}, other=4),
    ],
)
def test_gradients_that_are_held_move(ranks: Ranks, tmp_path: Path, world: int, other: int, setup: dict[str, Any]) -> None:
    ranks(world).run(f"{__name__}:saves_gradients", path=str(tmp_path))
    ranks(other).run(f"{__name__}:loads_gradients", path=str(tmp_path), **setup)


@on_ranks(2, stage=(0, 3))
def test_sums_inside_no_sync_move_to_another_stage_on_as_many_ranks(stage: int) -> None:
    with folder() as path:
        runs = Resharded(path, stage=1), Resharded(path, stage=stage, units=64, seed=5)
        runs[0].train(0, 1)
        with runs[0].attachment.no_sync():
            runs[0].forward(1).backward()
        runs[0].attachment.save(path / "run", runs[0].optimizer)
        runs[1].attachment.load(path / "run", runs[1].optimizer)
    for run in runs:
        run.forward(2).backward()
        run.optimizer.step()
    assert same(full(runs[0].model), full(runs[1].model))


def saves_sums(path: str) -> None:
    run = Resharded(Path(path), stage=1)
    with run.attachment.no_sync():
        run.forward(1).backward()
    run.attachment.save(Path(path) / "run", run.optimizer)
    run.forward(1).backward()


def refused(path: str, match: str, **setup: Any) -> None:
    run = Resharded(Path(path), seed=5, **setup)
    before = full(run.model)
    with pytest.raises(zhooks.CheckpointError, match=match):
        run.attachment.load(Path(path) / "run", run.optimizer)
    assert same(full(run.model), before) and not run.optimizer.state
    run.train(0, 1)


def test_sums_inside_no_sync_are_refused_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(f"{__name__}:saves_sums", path=str(tmp_path))
    match = r"as many ranks as saved, 2 x 1 \(data x tp\), because gradients accumulated inside no_sync .*found 1 x 1"
    ranks(1).run(f"{__name__}:refused", path=str(tmp_path), match=match)


def test_masters_of_another_dtype_are_exact_where_they_are_wider(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(f"{RESHARD}:save", path=str(tmp_path))
    ranks(1).run(f"{__name__}:loads_wider", path=str(tmp_path))


def loads_wider(path: str) -> None:
    run = Resharded(Path(path), seed=5, dtype="float64")
    run.attachment.load(Path(path) / "run", run.optimizer)
    found, wanted = run.full(), torch.load(Path(path) / "full.pt")
    assert all(torch.equal(found["model"][name], value.double()) for name, value in wanted["model"].items())
    for index, states in wanted["optimizer"]["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found["optimizer"]["state"][index][key], states[key].double())
    run.train(2, 1)


@pytest.mark.parametrize("what", ["value", "gradient", "exp_avg_sq"])
def test_a_number_that_narrower_masters_cannot_hold_is_refused(tmp_path: Path, what: str) -> None:
    def made(dtype: torch.dtype) -> tuple[nn.Module, zhooks.Attachment, torch.optim.Optimizer]:
        model = nn.Linear(4, 4).to(dtype)
        attachment = zhooks.attach(model, policy={"stage": 3})
        return model, attachment, torch.optim.AdamW(model.parameters())

    wide, saving, optimizer = made(torch.float32)
    for _ in range(2):
        wide(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    param = next(wide.parameters())
    held = {"value": param, "gradient": param.grad, **optimizer.state[param]}
    with torch.no_grad():
        held[what].mul_(0).add_(1e5)
    saving.save(tmp_path / "run", optimizer)
    narrow, attachment, other = made(torch.float16)
    before = full(narrow)
    with pytest.raises(zhooks.CheckpointError, match=rf"numbers that torch.float16 can hold, found larger ones in .*{what}"):
        attachment.load(tmp_path / "run", other)
    assert same(full(narrow), before) and not other.state
    with torch.no_grad():
        held[what].fill_(1)
    saving.save(tmp_path / "run", optimizer)
    attachment.load(tmp_path / "run", other)


class Drawing(nn.Module):
    """A linear layer whose buffer is each rank's own."""

    rank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rank", torch.zeros(()))


def draws(path: str) -> tuple[list[float], list[float], float]:
    """What the ranks draw after a save, or after a load where there is a folder; and what the buffer is."""
    torch.manual_seed(place()[0])
    numpy.random.seed(place()[0])
    model = Drawing()
    attachment = zhooks.attach(model, policy={"stage": 3})
    model.rank.fill_(place()[0])
    run = Path(path) / "run"
    attachment.load(run) if from_first(run.exists()) else attachment.save(run)
    return torch.rand(2).tolist(), numpy.random.rand(2).tolist(), float(model.rank)


@ON_FOUR
def test_random_states_and_buffers_stay_with_their_place_and_new_ranks_draw_their_own(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    saved = ranks(2).run(f"{__name__}:draws", path=str(tmp_path))
    loaded = ranks(world).run(f"{__name__}:draws", path=str(tmp_path))
    assert loaded[:2] == saved and ranks(1).run(f"{__name__}:draws", path=str(tmp_path)) == saved[:1]
    assert [buffer for _, _, buffer in loaded] == [0, 1, 0, 1]
    for which in (0, 1):
        assert len({tuple(row[which]) for row in loaded}) == 4
    assert ranks(world).run(f"{__name__}:draws", path=str(tmp_path)) == loaded


class Leaving(nn.Module):
    """A sharded layer beside one that [units] ignore leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(4, 4), nn.Linear(4, 4)


def leaves(path: str, name: str, held: bool, own: bool, match: str = "") -> None:
    """Save where there is no such folder; ``own``: the ignored parameters are each rank's, ``held``: they have gradients."""
    torch.manual_seed(0)
    model = Leaving()
    attachment = zhooks.attach(model, policy={"stage": 3, "units": {"ignore": ["left"]}})
    run = Path(path) / name
    if not from_first(run.exists()):
        with torch.no_grad():
            model.left.weight.add_(place()[0] if own else 1)
        if held:
            model.left.weight.grad = torch.ones(4, 4)
        attachment.save(run, ())
    elif match:
        with pytest.raises(zhooks.CheckpointError, match=match):
            attachment.load(run, ())
    else:
        before = model.left.weight.detach().clone()
        attachment.load(run, ())
        assert torch.equal(model.left.weight, before + 1)


def test_what_is_each_ranks_own_is_refused_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for name, held, own, match in (
        ("same", False, False, ""),
        ("own", False, True, r"because each rank has its own parameters in \[units\] ignore .*left\.weight.*, found 1 x 1"),
        ("held", True, False, r"2 x 1 \(data x tp\), because .* own gradients of parameters in \[units\] ignore, found 1 x 1"),
    ):
        ranks(2).run(f"{__name__}:leaves", path=str(tmp_path), name=name, held=held, own=own)
        ranks(1).run(f"{__name__}:leaves", path=str(tmp_path), name=name, held=held, own=own, match=match)


# ---- what is read


def counts_reads(path: str) -> None:
    run = Resharded(Path(path), seed=5)
    read: list[int] = []
    real = ShardReader.read

    def into(self: ShardReader, name: str, start: int, out: torch.Tensor) -> None:
        read.append(out.nbytes)
        real(self, name, start, out)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardReader, "read", into)
        run.attachment.load(Path(path) / "run", run.optimizer)
    ranges = [sharded(param).to_local() for param in run.model.parameters()]
    states = [value.to_local() for states in run.optimizer.state.values() for value in states.values() if value.dim()]
    owned = sum(value.nbytes for value in (*ranges, *states))
    # Between ranges of parameters there is padding, of less than 16 bytes a parameter.
    assert owned <= sum(read) <= owned + 16 * len(ranges) * 3 and max(read) <= 8 << 20


@ON_FOUR
def test_a_rank_reads_the_ranges_it_owns_and_little_else(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(2).run(f"{RESHARD}:save", path=str(tmp_path))
    ranks(world).run(f"{__name__}:counts_reads", path=str(tmp_path))


# ---- meshes in another order


def saves_turned(path: str) -> None:
    """On a mesh whose axes are in an unusual order."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    attachment = zhooks.attach(model, policy={"stage": 3}, mesh=mesh)
    attachment.save(Path(path) / "run", ())
    value = sharded(model.weight).full_tensor()
    if place()[0] == 0:
        torch.save(value, Path(path) / "value.pt")


def loads_turned(path: str) -> None:
    model = nn.Linear(16, 16)
    attachment = zhooks.attach(model, policy={"stage": 3})
    attachment.load(Path(path) / "run", ())
    assert torch.equal(sharded(model.weight).full_tensor(), torch.load(Path(path) / "value.pt"))


@ON_FOUR
def test_a_mesh_in_another_order_is_read_right(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world).run(f"{__name__}:saves_turned", path=str(tmp_path))
    ranks(2).run(f"{__name__}:loads_turned", path=str(tmp_path))


def saves_tp_first(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = divide(plain_gpt(1), mesh["tp"])
    with torch.no_grad():
        model.norm.weight.copy_(torch.arange(16.0))
    attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}}, mesh=mesh)
    attachment.save(Path(path) / "run", ())
    values = {name: sharded(param).full_tensor() for name, param in model.named_parameters()}
    if place()[0] == 0:
        torch.save(values, Path(path) / "values.pt")


def loads_tp_first(path: str) -> None:
    run = Resharded(Path(path), seed=5)
    run.attachment.load(Path(path) / "run", ())
    values = torch.load(Path(path) / "values.pt")
    assert all(torch.equal(sharded(param).full_tensor(), values[name]) for name, param in run.model.named_parameters())


@not_with_2_8("parallelize_module itself refuses such a mesh")
@ON_FOUR
def test_a_mesh_with_tp_first_is_read_right(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world).run(f"{__name__}:saves_tp_first", path=str(tmp_path))
    ranks(2).run(f"{__name__}:loads_tp_first", path=str(tmp_path))


# ---- stages of a pipeline


class Staged(nn.Module):
    """Layers by the names they have in the whole model."""

    def __init__(self, layers: range, *, relative: bool = False) -> None:
        super().__init__()
        made = {str(layer - (layers.start if relative else 0)): nn.Linear(6, 6) for layer in layers}
        self.layers = nn.ModuleDict(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def staged(stages: int, *, relative: bool = False, layers: int = 4, tp: int = 1) -> tuple[Any, Any, nn.Module, int]:
    """A stage of so many layers in all, attached over pp x dp x tp: (attachment, optimizer, model, its number)."""
    ranks = place()[1] // stages
    axes = {"pp": stages, "dp": ranks // tp, "tp": tp} if tp > 1 else {"pp": stages, "dp": ranks}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) if stages * tp > 1 else None
    stage, size = place()[0] // ranks, layers // stages
    torch.manual_seed(10 + stage)
    model = Staged(range(stage * size, (stage + 1) * size), relative=relative)
    if tp > 1 and mesh is not None:
        halves: Any = {f"layers.{name}": ColwiseParallel(output_layouts=Replicate()) for name in model.layers}
        parallelize_module(model, mesh["tp"], halves)
    attachment = zhooks.attach(model, policy={"stage": 3}, mesh=mesh)
    return attachment, torch.optim.AdamW(model.parameters(), lr=0.1), model, stage


def state_of(attachment: Any, optimizer: Any) -> dict[str, Any]:
    """Parameters and states by name, whole, on the first rank of each stage."""
    whole = attachment.state_dict(optimizer)
    if not whole:
        return {}
    states = whole["optimizer"]["state"].values()
    return {name: [value, state] for (name, value), state in zip(whole["model"].items(), states, strict=True)}


def saves_stages(path: str, stages: int, **made: Any) -> None:
    attachment, optimizer, model, stage = staged(stages, **made)
    model(torch.randn(2, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    attachment.save(Path(path) / (f"stage{stage}" if stages > 1 else "run"), optimizer)
    found = state_of(attachment, optimizer)
    if found:
        torch.save(found, Path(path) / f"full{stage}.pt")


def loads_stages(path: str, stages: int, names: tuple[str, ...], match: str = "", **made: Any) -> None:
    attachment, optimizer, model, _ = staged(stages, **made)
    before = full(model)
    folders = [Path(path) / name for name in names]
    if match:
        with pytest.raises(zhooks.CheckpointError, match=match):
            attachment.load(folders, optimizer)
        assert same(full(model), before) and not optimizer.state
        return
    attachment.load(folders, optimizer)
    wanted: dict[str, Any] = {}
    for file in sorted(Path(path).glob("full*.pt")):
        wanted |= torch.load(file)
    found = state_of(attachment, optimizer)
    assert not differences(found, {name: wanted[name] for name in found})
    model(torch.randn(2, 6)).square().mean().backward()
    optimizer.step()


STAGES = ("stage0", "stage1")


@pytest.mark.parametrize(
    ("world", "other", "stages", "into"),
    [case(2, 2, 1, other=1), case(1, 1, 2, other=2), case(4, 2, 4, other=4), case(2, 1, 2, other=4, slow=True)],
)
def test_stages_of_a_pipeline_are_divided_anew(
    ranks: Ranks, tmp_path: Path, world: int, other: int, stages: int, into: int
) -> None:
    ranks(world).run(f"{__name__}:saves_stages", path=str(tmp_path), stages=stages)
    names = STAGES if stages > 1 else ("run",)
    ranks(other).run(f"{__name__}:loads_stages", path=str(tmp_path), stages=into, names=names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "other", "stages", "tp", "into", "over"),
    [case(4, 2, 2, 1, 1, other=1), case(2, 1, 1, 2, 2, other=4), case(4, 2, 2, 1, 2, other=2), case(4, 2, 1, 2, 2, other=4)],
)
def test_stages_that_are_divided_over_tp_are_divided_anew(
    ranks: Ranks, tmp_path: Path, world: int, other: int, stages: int, tp: int, into: int, over: int
) -> None:
    ranks(world).run(f"{__name__}:saves_stages", path=str(tmp_path), stages=stages, tp=tp)
    names = STAGES if stages > 1 else ("run",)
    ranks(other).run(f"{__name__}:loads_stages", path=str(tmp_path), stages=into, names=names, tp=over)


def loads_narrow_matrices(path: str) -> None:
    run = Resharded(Path(path), seed=5, kind="muon", dtype="bfloat16")
    run.attachment.load(Path(path) / "run", run.optimizer)
    kept = run.full().get("optimizer", {}).get("state", {})
    for number, wanted in torch.load(Path(path) / "full.pt")["optimizer"]["state"].items() if kept else ():
        assert torch.equal(kept[number]["momentum_buffer"], wanted["momentum_buffer"].to(torch.bfloat16))
    run.train(2, 1)


def test_states_of_whole_matrices_follow_the_masters_dtype(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(f"{RESHARD}:save", path=str(tmp_path), kind="muon")
    ranks(1).run(f"{__name__}:loads_narrow_matrices", path=str(tmp_path))


def saves_layers(path: str) -> None:
    for layer in range(3):
        zhooks.attach(Staged(range(layer, layer + 1))).save(Path(path) / f"layer{layer}", ())


def loads_overlapping_layers(path: str) -> None:
    stage = place()[0]
    model = Staged(range(stage, stage + 2))
    attachment = zhooks.attach(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")))
    before = full(model)
    with pytest.raises(zhooks.CheckpointError, match="found different folders on some stages"):
        attachment.load([Path(path) / f"layer{stage + each}" for each in range(2)], ())
    assert same(full(model), before)


def test_stages_that_share_some_folders_and_not_others_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Each takes all that its folders hold, and the layer in the folder of both would be in both."""
    ranks(1).run(f"{__name__}:saves_layers", path=str(tmp_path))
    ranks(2).run(f"{__name__}:loads_overlapping_layers", path=str(tmp_path))


def test_names_that_stages_share_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(f"{__name__}:saves_stages", path=str(tmp_path), stages=2, relative=True)
    match = r"found parameter layers\.0\.weight in stage0 and in stage1.*load each stage's own folder"
    ranks(1).run(f"{__name__}:loads_stages", path=str(tmp_path), stages=1, names=STAGES, match=match)
    ranks(1).run(f"{__name__}:saves_stages", path=str(tmp_path), stages=1)
    match = r"each parameter in one stage.*found parameter layers\.0\.bias in more than one stage"
    ranks(2).run(f"{__name__}:loads_stages", path=str(tmp_path), stages=2, names=("run",), match=match, relative=True)
    ranks(2).run(f"{__name__}:loads_stages", path=str(tmp_path), stages=2, names=("stage0",), match=match, relative=True)


def test_a_layer_that_no_stage_has_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(f"{__name__}:saves_stages", path=str(tmp_path), stages=1)
    match = r"each parameter in one stage.*found parameter layers\.2\.bias in no stage"
    ranks(2).run(f"{__name__}:loads_stages", path=str(tmp_path), stages=2, names=("run",), match=match, layers=2)


# ---- bad input


@ON_FOUR
def test_a_missing_or_changed_file_of_another_world_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path, world: int) -> None:
    def refused_here(match: str) -> None:
        ranks(world).run(f"{__name__}:refused", path=str(tmp_path), match=match)

    ranks(2).run(f"{RESHARD}:save", path=str(tmp_path))
    file = tmp_path / "run" / "rank-00001.safetensors"
    raw = bytearray(file.read_bytes())
    file.write_bytes(raw[:3000] + bytes([raw[3000] ^ 1]) + raw[3001:])
    refused_here(r"rank \d: .*rank-00001.safetensors. Expected the shard file .*checksum does not match")
    file.unlink()
    refused_here(r"rank \d: .*rank-00001.safetensors. Expected the shard file .*found No such file")


@on_ranks(2)
def test_no_folder_and_one_folder_twice_are_refused() -> None:
    with folder() as path:
        run = Resharded(path)
        run.attachment.save(path / "run", ())
        twice = [path / "run"] * 2
        for given, match in (([], "expected a folder, or the folders of all stages, found none"), (twice, "in run and in run")):
            with pytest.raises(zhooks.CheckpointError, match=match):
                run.attachment.load(given, ())
        run.attachment.load([path / "run"], ())
