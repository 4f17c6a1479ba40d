"""Every operation of torch's registry that writes into an argument, on attached parameters beside plain PyTorch.

pytest runs it, on one rank and on two.  Each is right, or refused before anything changed.  The arguments are made by type from
the schema; what plain PyTorch does not take is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow

#: Of other backends, or of memory that has no values; some end the process on arguments that make no sense.
_LEFT_OUT = (
    "sparse", "mkldnn", "cudnn", "miopen", "nested", "quantiz", "fake", "mps", "cslt", "csr", "record_stream", "_resize",
    "hspmm", "_batch_norm_no_update", "empty", "set_data", "_compute_linear_combination",
    "linalg_matrix_rank",  # torch's own code forgets out= where the input is of a subclass
)  # fmt: skip
_MADE: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.linspace(0.5, 2.0, 15).view(3, 5),
    "List[Tensor]": lambda: [torch.linspace(0.5, 2.0, 15).view(3, 5), torch.linspace(1.0, 3.0, 15).view(3, 5)],
    "number": lambda: 0.5,
    "float": lambda: 0.5,
    "int": lambda: 0,
    "bool": lambda: False,
    "List[int]": lambda: [0],
    "List[float]": lambda: [0.5, 0.25],
    "List[number]": lambda: [0.5, 0.25],
}


def writing() -> Iterator[tuple[Any, frozenset[str]]]:
    """Every overload of aten that writes into a tensor, and the names of what it writes."""
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, name = full_name.partition("::")
        if space != "aten" or any(word in name for word in _LEFT_OUT):
            continue
        op, _, overload = name.partition(".")
        try:
            func = getattr(getattr(torch.ops.aten, op), overload or "default")
        except AttributeError:
            continue
        written = {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        if written:
            yield func, frozenset(written)


def arguments(func: Any) -> dict[str, Any] | None:
    """A value of each argument, by its type; None where one cannot be made."""
    made: dict[str, Any] = {}
    for one in func._schema.arguments:
        kind = str(one.type)
        if one.has_default_value() and kind not in ("Tensor", "Optional[Tensor]"):
            continue
        if kind.startswith("Optional"):
            made[one.name] = None
        elif kind in _MADE:
            made[one.name] = _MADE[kind]()
        else:
            return None
    return made


def call(func: Any, given: dict[str, Any]) -> Any:
    names = [one.name for one in func._schema.arguments if not one.kwarg_only and one.name in given]
    torch.manual_seed(0)
    with torch.no_grad():
        return func(*(given[name] for name in names), **{name: given[name] for name in given.keys() - set(names)})


def alike(ours: Any, theirs: Any) -> bool:
    pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=True)
    values = [(one, other) for one, other in pairs if isinstance(other, Tensor)]
    return all(torch.allclose(a.to(b.dtype), b, rtol=1e-5, atol=1e-7, equal_nan=True) for a, b in values)


def whole(value: Any) -> Any:
    return tree_map_only(zhooks.ShardedTensor, lambda one: one.full_tensor(), value)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(3, 5))


def set_to(model: Two, value: Any) -> Any:
    """The data of the first parameter, or of both for a list, which get these values."""
    params = [model.one, model.two]
    with torch.no_grad():
        for param, one in zip(params, value if isinstance(value, list) else [value], strict=False):
            param.copy_(one)
    return [param.data for param in params] if isinstance(value, list) else model.one.data


def in_plain() -> Iterator[tuple[Any, str, dict[str, Any], dict[str, Any]]]:
    """Operations that plain PyTorch carries out with made arguments and that write into one of the parameters' shape: the
    operation, the name of what it writes, the arguments before and after."""
    for func, written in writing():
        before, after = arguments(func), arguments(func)
        if before is None or after is None or len(names := written & before.keys()) != 1:
            continue
        (name,) = names
        targets = [one for one in tree_leaves(before[name]) if isinstance(one, Tensor)]
        try:
            call(func, after)
        except Exception:
            continue
        shapes = {one.shape for one in tree_leaves(after[name]) if isinstance(one, Tensor)}
        if targets and shapes == {targets[0].shape}:
            yield func, name, before, after


def outcome(func: Any, given: dict[str, Any]) -> str:
    """Nothing of a call that was carried out, "refused", or another error."""
    try:
        call(func, given)
    except zhooks.ShardedOpError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@on_ranks(1, 2, stage=(0, 1, 3))
def test_every_operation_that_writes_into_a_parameter_is_right_or_refused(stage: int) -> None:
    model = Two()
    zhooks.attach(model, policy={"stage": stage})
    wrong, ends = [], []
    for func, name, before, after in in_plain():
        given = {**before, name: set_to(model, before[name])}
        ends.append(outcome(func, given))
        right = alike(whole(given[name]), before[name] if ends[-1] else after[name])
        if ends[-1] not in ("", "refused") or not right:
            wrong.append(f"{func}: {ends[-1] or 'another value'}")
    assert not wrong, "\n".join(wrong)
    assert ends.count("") > 500, len(ends)


@on_ranks(1, 2, stage=(*slow(0), 1, *slow(3)))
def test_every_operation_that_writes_into_a_view_of_a_parameter_is_refused(stage: int) -> None:
    model = Two()
    zhooks.attach(model, policy={"stage": stage})
    wrong, ends = [], []
    for func, name, before, after in in_plain():
        if alike(after[name], before[name]):
            continue
        of = set_to(model, before[name])
        given = {**before, name: tree_map_only(Tensor, lambda one: one.view(5, 3).view(3, 5), of)}
        ends.append(outcome(func, given))
        if ends[-1] != "refused" or not alike(whole(of), before[name]):
            wrong.append(f"{func}: {ends[-1] or 'carried out'}")
    assert not wrong, "\n".join(wrong)
    assert len(ends) > 500, len(ends)


@on_ranks(1, 2, stage=(*slow(0, 1), 3), of=("parameter", *slow("state")))
def test_every_operation_that_writes_a_plain_tensor_reads_parameters_and_states_whole(stage: int, of: str) -> None:
    model = Two()
    zhooks.attach(model, policy={"stage": stage})
    wrong, ends = [], []
    for func, name, before, after in in_plain():
        read = [other for other, value in before.items() if other != name and isinstance(value, Tensor)]
        if not read:
            continue
        value = set_to(model, before[read[0]])
        given = {**before, read[0]: value if of == "parameter" else value.clone()}
        ends.append(outcome(func, given))
        if ends[-1] not in ("", "refused") or (ends[-1] == "" and not alike(given[name], after[name])):
            wrong.append(f"{func}: {ends[-1] or 'another value'}")
    assert not wrong, "\n".join(wrong)
    assert ends.count("") > 100, ends.count("")
