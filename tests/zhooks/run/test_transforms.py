"""torch.func around an attached model: what is right works, the rest is refused by its name and leaves the model usable.

pytest runs it over real ranks. Parameters put in the place of attached ones for good are test_members.py's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zhooks
from offload.errors import AttachError, ShardedOpError
from tests.support.on_ranks import on_ranks

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "vmap": lambda model: vmap(lambda x: model(x))(X),
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "grad, vmap": lambda model: vmap(grad(lambda x: model(x).sum()))(X),
    "jvp": lambda model: jvp(model, (X,), (X,)),
    "jvp, vmap": lambda model: jacfwd(model)(X[0]),
    "grad, jvp, vmap": lambda model: hessian(lambda x: model(x).sum())(X[0]),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@on_ranks(1, 2)
def test_transforms_are_refused_by_name_and_the_model_goes_on() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model)
    for named, call in REFUSED.items():
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # torch's own, as it loads what jvp decomposes
                warnings.simplefilter("ignore", kind)
            with pytest.raises(ShardedOpError, match=rf"inside torch\.func \({named}\)\. Use backward\(\)"):
                call(model)
    for refused in (lambda: jacrev(model)(X[0]), lambda: vjp(model, X)):
        with pytest.raises(ShardedOpError, match=r"torch\.func \(grad\)"):
            refused()
    for run in (model, plain):
        run(X).sum().backward()
    attachment.detach()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@on_ranks(1, 2)
def test_vmap_without_gradients_and_a_call_with_its_own_parameters_are_as_plain() -> None:
    model, plain = net(), net()
    zhooks.attach(model)
    with torch.no_grad():
        assert torch.equal(vmap(lambda x: model(x))(X), vmap(lambda x: plain(x))(X))
    assert torch.equal(functional_call(model, dict(model.named_parameters()), (X,)), plain(X))


@on_ranks(1, 2)
def test_a_call_with_other_values_is_refused_as_what_it_is() -> None:
    model = net()
    values: dict[str, Tensor] = {name: param.detach().clone() for name, param in copy.deepcopy(model).named_parameters()}
    zhooks.attach(model)
    with pytest.raises(AttachError, match=r"Parameter 0\.weight was .*torch\.func\.functional_call puts into the model"):
        functional_call(model, values, (X,))
    assert model(X).shape == (4, 2)
