"""Which ranks hold which part of the model, for every arrangement of the axes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.on_ranks import on_ranks
from zhooks import AttachError
from zhooks.layout import resolve


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
    with pytest.raises(AttachError, match=r"each once, found \('dp', 'shard'\)"):
        resolve(mesh)
