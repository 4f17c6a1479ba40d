"""What tests use of torch that its oldest supported version lacks: stand-ins, and skips that say what is lacking.

Tests, their models and conftest.py take it from here.  It never changes what is tested under a torch that has it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import backend_registration

__all__ = [
    "OWN_WARNINGS",
    "Muon",
    "forget_redistributions",
    "ignore_its_own_warnings",
    "not_with_2_8",
    "on_a_device_in_python",
    "refusal",
    "where_torch_has",
    "without_chatter",
]


_OLD = Version(torch.__version__).release[:2] == (2, 8)
#: By which torch warns of itself: in LBFGS, as it loads a checkpoint, in SequentialLR.
OWN_WARNINGS = (
    "Converting a tensor with requires_grad=True to a scalar", "TypedStorage is deprecated", "The epoch parameter",
) if _OLD else ()  # fmt: skip
_DEVICES = "_setup_privateuseone_for_python_backend"
#: How a refusal begins, and whether this torch is one that is refused.
_REFUSALS = {
    "The virtual device needs a torch that takes devices written in Python": not hasattr(backend_registration, _DEVICES),
    r"parameter [\w.]+. Expected a torch that keeps a parameter's hooks": Version(torch.__version__) < Version("2.13"),
}


def where_torch_has(owner: Any, name: str) -> pytest.MarkDecorator:
    """Skips where torch's module or class ``owner`` has no ``name``."""
    lacking = f"torch {torch.__version__} has no {name}"
    return pytest.mark.skipif(not hasattr(owner, name), reason=lacking)


def refusal(said: str) -> str | None:
    """The line by which the product refused what this torch lacks, of what a failed test says; None where torch has it all."""
    lacking = [text for text, lacks in _REFUSALS.items() if lacks]
    found = re.search(f"({'|'.join(lacking)}).*", said) if lacking else None
    return found and found.group()


def forget_redistributions() -> None:
    """Call it before a model is divided: torch 2.8 fails for embeddings of one size in two dtypes, over rows, in one process.

    It takes the placement of the first, with the mask of the rows that are not here, for that of the second.
    """
    if _OLD:
        from torch.distributed.tensor import _redistribute

        _redistribute._gen_transform_infos.cache_clear()


def not_with_2_8(why: str) -> pytest.MarkDecorator:
    """Skips under torch 2.8, because of ``why``."""
    return pytest.mark.skipif(_OLD, reason=f"torch {torch.__version__}: {why}")


def ignore_its_own_warnings() -> None:
    """Torch 2.8 warns of what it does itself; from now on that is no error in this process."""
    for message in OWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def without_chatter(printed: str) -> str:
    """What a program printed but for what torch 2.8's Gloo prints whenever ranks meet."""
    return re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", printed, flags=re.MULTILINE) if _OLD else printed


#: Above a test that must get as far as to simulate.
on_a_device_in_python = where_torch_has(backend_registration, _DEVICES)


class _Muon(Optimizer):
    """Muon as its author wrote it: momentum, made orthogonal by Newton and Schulz's iteration in bfloat16."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps})
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() != 2:
                    raise ValueError(f"Muon: expected matrices, found a parameter of {param.dim()} dims.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
                momentum = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                ahead = param.grad.lerp(momentum, group["momentum"])
                rate = group["lr"] * max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(_orthogonal(ahead, group["ns_steps"]), alpha=-rate)
        return loss


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    if steps >= 100:
        raise ValueError(f"Muon: expected fewer than 100 ns_steps, found {steps}.")
    tall = matrix.shape[0] > matrix.shape[1]
    found = (matrix.T if tall else matrix).bfloat16()
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = found @ found.T
        factor = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        found = torch.addmm(found, factor, found, beta=3.4445)
    return found.T if tall else found


_Muon.__name__ = _Muon.__qualname__ = "Muon"
#: Before torch 2.9 users bring their own.
Muon: Callable[..., Optimizer] = getattr(torch.optim, "Muon", _Muon)
