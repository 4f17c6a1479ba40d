"""Every operation of torch that writes to a tensor, on everything of ours that stands for one, beside plain PyTorch.

The operations are those of torch's operator registry: overloads whose schema says that an argument is written to (in place,
``out=``, foreach and fused ones), and views, through which something is written then.  Arguments are made from the schema; what
plain tensors do not accept is not judged.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import ShardedOpError
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow

#: A call with such arguments ends the process, of plain tensors too or of any wrapper of one: kernels of another device, and
#: what takes the memory of its argument without asking it.  ``view(dtype)`` drops the class of what it is given, and
#: ``_fw_primal`` is not for callers.
CRASHES = {"_nnpack_spatial_convolution", "set_data", "set_.source_Tensor_storage_offset", "view.dtype", "_fw_primal"}
#: What they leave in memory is not defined.
UNDEFINED = ("empty", "new_empty", "resize", "_compute_linear_combination", "_pdist_backward", "_weight_norm_interface")
#: Arguments of other kinds than numbers, by name.
MASKS, INDICES = ("mask", "condition"), ("index", "indices")


class Net(nn.Module):
    """Two matrices, whose sizes no number of ranks divides, and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.rand(5, 7) + 0.5), nn.Parameter(torch.rand(5, 7) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one * self.two * x).sum() + self.one.square().sum()


Two = Callable[[Net], list[Tensor]]


def grads(net: Net) -> list[Any]:
    return [net.one.grad, net.two.grad]


#: What has values that are not combined over the ranks yet: equal, whatever is done to it.
NORMS: dict[str, tuple[Two, tuple[int, ...]]] = {
    "norm": (lambda net: [grad.norm() for grad in grads(net)], ()),
    "alias of a norm": (lambda net: [grad.norm().detach() for grad in grads(net)], ()),
    "stack of norms": (lambda net: [torch.stack([one.norm() for one in two]) for two in (grads(net), grads(net)[::-1])], (2,)),
}
#: What is a range of a tensor: equal, or refused with nothing changed.
RANGES: dict[str, tuple[Two, tuple[int, ...]]] = {
    "gradient": (lambda net: [grad.clone() for grad in grads(net)], (5, 7)),
    "vector": (lambda net: [torch.cat([one.clone().view(-1) for one in two]) for two in (grads(net), grads(net)[::-1])], (70,)),
    "parameter": (lambda net: [net.one, net.two], (5, 7)),
}


def overloads() -> Iterator[Any]:
    """Those that write to an argument, and views."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and not {packet, f"{packet}.{overload}"} & CRASHES:
            found = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if found is not None and (found._schema.is_mutable or found.is_view):
                yield found


def written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def made(overload: Any, shape: tuple[int, ...], tensor: Callable[[Any], Tensor]) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments by the schema; None where it asks for something that nobody can make up (a storage, a generator)."""
    plain: dict[str, Any] = {
        "number": 0.5, "float": 0.5, "int": 0, "bool": False, "List[int]": [0], "List[number]": [0.5, 0.5], "str": "sum",
    }  # fmt: skip
    args, named = list[Any](), dict[str, Any]()
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            value: Any = [tensor(argument), tensor(argument)]
        elif kind == "Tensor" or (kind == "Optional[Tensor]" and not argument.has_default_value()):
            value = tensor(argument)
        elif argument.has_default_value():
            continue
        elif argument.name in ("size", "sizes", "shape") and kind == "List[int]":
            value = list(shape)
        elif kind in plain or kind.startswith("Optional"):
            value = plain.get(kind)
        else:
            return None
        if argument.kwarg_only or named:
            named[argument.name] = value
        else:
            args.append(value)
    return args, named


@dataclass
class End:
    """What a call came to."""

    error: Exception | None
    returned: Any
    subjects: list[Tensor]
    others: list[Tensor]


def called(overload: Any, net: Net, two: Two, shape: tuple[int, ...], which: str) -> End | None:
    """Call it with subjects where it writes, where it reads, or for all tensors; None where none would be given."""
    subjects, used, others = two(net), list[Tensor](), list[Tensor]()
    generator = torch.Generator().manual_seed(3)

    def tensor(argument: Any) -> Tensor:
        if argument.name in MASKS:
            return torch.ones(shape, dtype=torch.bool)
        if argument.name in INDICES:
            return torch.zeros(shape, dtype=torch.long)
        if (which == "all" or (which == "written") == written(argument)) and len(used) < len(subjects):
            used.append(subjects[len(used)])
            return used[-1]
        others.append(torch.rand(shape, generator=generator) + 0.5)
        return others[-1]

    arguments = made(overload, shape, tensor)
    if arguments is None or not used:
        return None
    torch.default_generator.manual_seed(1)
    returned, error = None, None
    try:
        with torch.no_grad():
            returned = overload(*arguments[0], **arguments[1])
            if overload.is_view:
                for view in returned if isinstance(returned, (list, tuple)) else [returned]:
                    view.add_(1)
    except Exception as raised:
        error = raised
    return End(error, returned, used, others)


@torch.no_grad()
def values(found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return [values(one) for one in found]
    if not isinstance(found, Tensor):
        return found
    return found.full_tensor() if hasattr(found, "full_tensor") else found + 0


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 1e-5, 1e-6, equal_nan=True)
    return type(one) is type(other)


def judged(subjects: dict[str, tuple[Two, tuple[int, ...]]], places: tuple[str, ...]) -> tuple[Counter[str], list[str]]:
    """How many calls with subjects at these places were equal or refused, and what was neither."""
    plain, model = Net(), Net()
    zhooks.attach(model, policy={"stage": 3})
    first = [param.detach().clone() for param in plain.parameters()]
    x = torch.rand(5, 7, generator=torch.Generator().manual_seed(2))
    for net in (plain, model):
        net(x).backward()
    counts, wrong = Counter[str](), list[str]()

    def fresh() -> None:
        plain.one.data, plain.two.data = (value.clone() for value in first)
        with torch.no_grad():
            for param, value in zip(model.parameters(), first, strict=True):
                param.copy_(value)

    for name, (two, shape) in subjects.items():
        for overload in overloads():
            for which in places:
                if name == "parameter":
                    fresh()
                want = called(overload, plain, two, shape, which)
                if want is None or want.error is not None:
                    continue
                got = called(overload, model, two, shape, which)
                assert got is not None
                case = f"{name}: {overload} with it {which}"
                try:
                    if _is_refusal(got.error) and name in RANGES:
                        counts["refused"] += 1
                        if name == "parameter":
                            plain.one.data, plain.two.data = (value.clone() for value in first)
                        if not same(values(two(plain)[: len(got.subjects)]), values(got.subjects)):
                            wrong.append(f"{case}: refused, and changed")
                    elif got.error is not None:
                        wrong.append(f"{case}: {type(got.error).__name__}: {got.error}")
                    elif overload._schema.name.removeprefix("aten::").startswith(UNDEFINED):
                        continue
                    else:
                        ends = [[values(one) for one in (end.returned, end.subjects, end.others)] for end in (want, got)]
                        counts["equal"] += 1
                        if not same(*ends):
                            wrong.append(f"{case}: expected {ends[0]}, found {ends[1]}")
                except Exception as error:
                    wrong.append(f"{case}: left something that raises {type(error).__name__}: {error}")
    return counts, wrong


def _is_refusal(error: Exception | None) -> bool:
    """By us; or torch's own of what would resize a parameter, whose result would be lost here."""
    return isinstance(error, ShardedOpError) or "cannot resize variables that require grad" in str(error)


PLACES = (("written",), *slow(("read", "all")))


@on_ranks(2, places=PLACES, name=("norm", *slow("stack of norms", "alias of a norm")))
def test_whatever_writes_to_a_norm_writes_to_it_as_to_a_plain_tensor(places: tuple[str, ...], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, wrong = judged({name: NORMS[name]}, places)
    assert not wrong, "\n".join(wrong[:20])
    assert counts["equal"] > 800 and not counts["refused"], counts


@pytest.mark.slow
@on_ranks(2, 1, places=PLACES, name=tuple(RANGES))
def test_whatever_writes_to_a_range_is_as_of_a_plain_tensor_or_refused_before_it_writes(
    places: tuple[str, ...], name: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, wrong = judged({name: RANGES[name]}, places)
    assert not wrong, "\n".join(wrong[:20])
    assert counts["equal"] > 200, counts


@on_ranks(1, 2)
def test_a_norm_written_to_a_tensor_of_the_user_is_there() -> None:
    plain, model = Net(), Net()
    zhooks.attach(model, policy={"stage": 3})
    found: list[list[Tensor]] = []
    for net in (plain, model):
        net(torch.ones(5, 7)).backward()
        with torch.no_grad():
            out, foreach = torch.zeros(()), [torch.zeros(()), torch.zeros(())]
            torch.linalg.vector_norm(net.one, out=out)
            torch.ops.aten._foreach_norm.Scalar_out(grads(net), 2, out=foreach)
            double = torch._foreach_norm(grads(net), 2, torch.float64)
            kept = net.one.norm(dim=(0, 1), keepdim=True)
        found.append([out, *foreach, *(one + 0 for one in double), kept + 0])
    assert same(*found)
