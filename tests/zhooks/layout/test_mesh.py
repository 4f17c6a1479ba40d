"""Which ranks hold which part of the model, for every arrangement of the axes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.on_ranks import on_ranks
from zhooks import AttachError
from zhooks.layout import Axis, axis_names, resolve


@on_ranks(4)
def test_the_data_ranks_of_a_slice_share_their_places_on_tp_and_pp() -> None:
    rank = dist.get_rank()
    mesh = resolve(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert mesh.shard.ranks == mesh.data.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
    assert mesh.tp.ranks == ((0, 1) if rank < 2 else (2, 3)) and mesh.tp.rank == rank % 2
    assert mesh.stage.ranks == (0, 1, 2, 3) and mesh.stage.rank == rank
    assert mesh.replicate.ranks == mesh.pp.ranks == (rank,)


@on_ranks(4)
def test_stages_of_a_pipeline_have_ranks_of_their_own() -> None:
    rank = dist.get_rank()
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for mesh in (resolve(whole), resolve(whole["dp"])):
        assert mesh.stage.ranks == mesh.data.ranks == ((0, 1) if rank < 2 else (2, 3))
        assert mesh.pp.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))


@on_ranks(4)
def test_replicate_and_shard_make_up_the_data_ranks() -> None:
    mesh = resolve(init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp")))
    assert mesh.data.ranks == (0, 1, 2, 3) and mesh.shard.world == mesh.replicate.world == 2 and mesh.tp.world == 1


@on_ranks(2)
def test_an_axis_that_is_named_twice_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "shard"))
    with pytest.raises(AttachError, match=r"each axis at most once, found \('dp', 'shard'\)"):
        resolve(mesh)


@on_ranks(2)
def test_a_mesh_that_leaves_ranks_out_is_refused() -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    with pytest.raises(AttachError, match=r"every rank of the process group \(0 to 1\), found ranks \[0\]"):
        resolve(mesh)


@on_ranks(2)
def test_axes_without_names_are_refused_but_for_the_only_one() -> None:
    assert resolve(DeviceMesh("cpu", [0, 1])).shard.ranks == (0, 1)
    with pytest.raises(AttachError, match="found no names"):
        resolve(DeviceMesh("cpu", [[0, 1]]))


@on_ranks(4)
def test_an_arrangement_is_the_same_text_on_every_rank_and_gradients_are_averaged_over_data_ranks_or_experts() -> None:
    said = {}
    for names in (("pp", "dp"), ("ep", "dp"), ("replicate", "shard")):
        mesh = resolve(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        said[mesh.arrangement] = mesh.averaged
    assert said == {"pp 2 x dp 2": 2, "ep 2 x dp 2": 4, "replicate 2 x shard 2": 4}
    turned = resolve(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")))
    assert turned.arrangement == "dp 2 x tp 2 with ranks [0, 2, 1, 3]"
    assert turned.tp.ranks == ((0, 2) if dist.get_rank() in (0, 2) else (1, 3))
    assert [turned.tp.place(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [turned.shard.place(rank) for rank in range(4)] == [0, 1, 0, 1]
    everyone = resolve(None)
    assert everyone.shard.ranks == everyone.data.ranks == everyone.stage.ranks == (0, 1, 2, 3)
    assert everyone.tp.ranks == (dist.get_rank(),) and everyone.averaged == 4 and everyone.arrangement == "shard 4"


def test_without_a_process_group_one_rank_is_on_every_axis() -> None:
    mesh = resolve(None)
    for axis in (mesh.shard, mesh.replicate, mesh.tp, mesh.pp, mesh.data, mesh.stage):
        assert (axis.ranks, axis.rank, axis.world, axis.place(0)) == ((0,), 0, 1, 0)
    assert (mesh.names, mesh.averaged, mesh.arrangement) == (("shard",), 1, "shard 1")


def test_axes_may_be_called_as_other_libraries_call_them() -> None:
    assert axis_names(("dp_replicate", "dp_shard", "tp")) == ("replicate", "shard", "tp")
    assert axis_names(("fsdp",)) == axis_names(("dp",)) == ("shard",)
    assert axis_names(("ep",)) == ("pp",)


@pytest.mark.parametrize(
    ("names", "found"), [((), "no names"), (("dp", "cp"), r"\('dp', 'cp'\)"), (("pp", "ep"), r"\('pp', 'ep'\)")]
)
def test_axes_of_no_name_of_another_or_of_one_twice_are_refused(names: tuple[str, ...], found: str) -> None:
    with pytest.raises(AttachError, match=f"each axis at most once, found {found}"):
        axis_names(names)


def test_two_axes_of_one_name_are_told_apart_by_their_size() -> None:
    assert Axis("shard", (1, 3), 0).name_among == "axis shard of 2 ranks"
