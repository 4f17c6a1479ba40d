"""Collectives of a simulated step over tensors of the real host: what ranks would get that all say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import SimulationError
from tests.support.virtual import machine, on_virtual
from zhooks.simulate.virtual_group import ranks_on_paper


def reduced(op: Any) -> list[float]:
    tensor = torch.tensor([3.0])
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def made(collective: Callable[..., Any], output: Any, *given: Any) -> Any:
    collective(output, *given)
    return output


def pair() -> list[Tensor]:
    return [torch.zeros(1), torch.zeros(1)]


@on_virtual()
def test_tensors_of_the_host_get_what_alike_ranks_would_give_them() -> None:
    op, ones = dist.ReduceOp, [torch.ones(1), torch.zeros(1)]
    with machine(), ranks_on_paper(2):
        assert [reduced(each) for each in (op.SUM, op.AVG, op.MAX, op.MIN, op.PRODUCT)] == [[6], [3], [3], [3], [9]]
        with pytest.raises(SimulationError, match="expected a sum, product, mean, maximum or minimum over ranks"):
            dist.all_reduce(torch.tensor([3]), op.BXOR)
        assert made(dist.all_gather, pair(), torch.ones(1)) == [torch.ones(1)] * 2
        assert made(dist.gather, torch.ones(1), objects := pair()) == torch.ones(1) and objects == [torch.ones(1)] * 2
        assert made(dist.all_to_all, pair(), ones) == [torch.ones(1)] * 2
        assert made(dist.all_to_all_single, torch.zeros(4), torch.arange(4.0)).tolist() == [0, 1, 0, 1]
        assert made(dist.reduce_scatter, torch.zeros(1), ones).tolist() == [2]
        assert made(dist.scatter, torch.zeros(1), ones).tolist() == [1]
        assert made(dist.all_gather_object, [None, None], {"a": 1}) == [{"a": 1}] * 2
        assert made(dist.reduce, torch.ones(1), 0).tolist() == [2]
        with pytest.raises(SimulationError, match=r"expected 1 element from every rank, as all send the same; found \[1, 3\]"):
            dist.all_to_all_single(torch.zeros(4), torch.arange(4.0), [1, 3], [1, 3])
        dist.barrier()
