"""ZeRO over a model that ``parallelize_module`` has divided, against the plain model in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.on_ranks import on_ranks
from tests.tp_gpt import batch, divide, loss_of, plain_gpt


@on_ranks(2, sequence=(False, True))
def test_the_divided_model_computes_what_the_plain_one_does(sequence: bool) -> None:
    plain, mesh = plain_gpt(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = divide(plain_gpt(), mesh, sequence=sequence)
    expected, found = (loss_of(each, *batch(0)) for each in (plain, model))
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        grad: Any = two.grad
        torch.testing.assert_close(grad.full_tensor() if isinstance(grad, DTensor) else grad, one.grad)
