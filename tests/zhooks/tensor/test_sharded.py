"""The sharded tensor of law 2 between steps: what it says of itself, its totals, its hooks, and what it refuses.

pytest runs it, on one rank and on two. It never tests training itself: the parity matrix does; what is saved, copied
and written is in test_sharded_state.py.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.inside import comm_of
from tests.support.on_ranks import on_ranks, place
from tests.support.values import full, grad_of, same, sharded, whole

STAGES = (0, 1, 2, 3)


class Mixed(nn.Module):
    """Parameters of all shapes: a matrix, a vector shorter than a rank's alignment, 0-d, empty, turned, channels-last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.short = nn.Parameter(torch.tensor([-3.0]))
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale + self.short + self.empty.sum()
        return y @ self.turned + self.image.square().mean((2, 3)).sum()


def data() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def attached(stage: int = 3) -> tuple[Mixed, zhooks.Attachment, Mixed]:
    """An attached model, its attachment, and a plain copy; both with the gradients of the same batch."""
    model = Mixed()
    plain = copy.deepcopy(model)
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    for either in (model, plain):
        either(data()).square().mean().backward()
    return model, attachment, plain


def pairs(model: nn.Module, plain: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    named = zip(model.named_parameters(), plain.parameters(), strict=True)
    return [(name, ours, theirs) for (name, ours), theirs in named]


# ---- what it says of itself


@on_ranks(1, 2, stage=STAGES)
def test_a_parameter_keeps_identity_shape_dtype_device_and_strides(stage: int) -> None:
    model = Mixed()
    plain, before = copy.deepcopy(model), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zhooks.attach(model, policy={"stage": stage})
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert all(held is then for held, then in zip(optimizer.param_groups[0]["params"], before, strict=True))
    for name, ours, theirs in pairs(model, plain):
        assert isinstance(ours, nn.Parameter) and isinstance(ours, zhooks.ShardedTensor), name
        assert (ours.shape, ours.dtype, ours.device, ours.ndim) == (theirs.shape, theirs.dtype, theirs.device, theirs.ndim)
        assert (ours.stride(), ours.numel(), ours.size()) == (theirs.stride(), theirs.numel(), theirs.size())
        assert ours.is_leaf and ours.requires_grad and ours.layout is torch.strided


@on_ranks(1, 2, stage=STAGES)
def test_the_ranges_are_disjoint_at_the_stages_that_shard_and_join_to_the_full_tensor(stage: int) -> None:
    model, _, plain = attached(stage)
    _, world = place()
    for name, ours, theirs in pairs(model, plain):
        assert sharded(ours).to_local().dim() == 1
        assert torch.equal(sharded(ours).full_tensor(), theirs), name
        assert type(sharded(ours).full_tensor()) is Tensor and not sharded(ours).full_tensor().requires_grad
    if stage > 0 and world > 1:
        held = sum(sharded(param).to_local().numel() for param in model.parameters())
        assert held < sum(param.numel() for param in plain.parameters())


@on_ranks(1, 2)
def test_its_repr_says_the_parameter_the_shape_and_the_share_and_costs_no_collective() -> None:
    model, _, _ = attached()
    rank, _ = place()
    if rank == 0:
        text = repr(model.linear.weight)
        assert text.startswith("ShardedTensor(parameter of linear.weight, shape=(5, 6), dtype=torch.float32, local=")
        assert text.endswith("of 30 elements, requires_grad=True)")
        assert "tensor of linear.weight" in repr(model.linear.weight.grad)
        assert "Linear(in_features=6" in repr(model)


# ---- totals and norms


@on_ranks(1, 2, stage=(1, 3))
def test_norms_of_any_order_are_those_of_the_whole_tensor(stage: int) -> None:
    model, _, plain = attached(stage)
    for name, ours, theirs in pairs(model, plain):
        for order in (1.0, 2.0, 3.0, math.inf, -math.inf, 0.0):
            # An infinity norm of nothing has no value in plain torch either.
            if theirs.numel() == 0 and math.isinf(order):
                continue
            for got, wanted in ((ours, theirs), (ours.grad, theirs.grad)):
                norm = torch.linalg.vector_norm(got.detach(), order)
                torch.testing.assert_close(norm + 0.0, torch.linalg.vector_norm(wanted.detach(), order), msg=f"{name} {order}")


@on_ranks(2, stage=(0, 2, 3))
def test_sums_means_and_extremes_of_a_gradient_are_those_of_the_whole(stage: int) -> None:
    model, _, plain = attached(stage)
    for name, ours, theirs in pairs(model, plain):
        if theirs.numel() == 0:
            continue
        got, wanted = grad_of(ours), grad_of(theirs)
        for total in (torch.sum, torch.mean, torch.max, torch.min, torch.count_nonzero):
            torch.testing.assert_close(total(got), total(wanted), msg=f"{name} {total.__name__}")
        assert bool(torch.isfinite(got).all())
        assert not bool(torch.isnan(got).any())
        assert got.abs().sum().item() == pytest.approx(wanted.abs().sum().item())


@on_ranks(2, stage=(1, 2, 3))
def test_clipping_makes_one_all_reduce(stage: int) -> None:
    model, attachment, _ = attached(stage)
    assert model.scale.grad is not None
    transport = comm_of(attachment).shard
    calls = []
    reduce = transport.all_reduce
    transport.all_reduce = lambda call, tensor, op: (calls.append(call.what), reduce(call, tensor, op))[1]  # type: ignore[method-assign]
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert calls == ["all-reduce sum"]


# ---- what a loop may do with it


@on_ranks(1, 2)
def test_what_optimizers_do_in_place_changes_every_range_as_in_plain_torch_and_counts_as_a_write() -> None:
    model, _, plain = attached()
    tenth = torch.tensor(0.1)
    with torch.no_grad():
        for name, ours, theirs in pairs(model, plain):
            for one in (ours, theirs):
                version, grad = one._version, grad_of(one)
                assert one.add_(grad, alpha=-0.5) is one, name
                one.mul_(tenth).mul_(2)
                one.lerp_(grad, 0.25).addcmul_(grad, grad, value=0.5).addcdiv_(grad, grad + 3, value=-1)
                assert one._version == version + 6
            assert torch.equal(sharded(ours).full_tensor(), theirs), name
    assert torch.equal(model(data()), plain(data()))


@on_ranks(1, 2)
def test_user_attributes_and_hooks_are_carried_over() -> None:
    model: Any = Mixed()
    model.linear.weight.no_decay = True
    seen: list[tuple[int, ...]] = []
    model.linear.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    model.linear.bias.register_post_accumulate_grad_hook(lambda param: seen.append(tuple(param.grad.shape)))
    attachment = zhooks.attach(model)
    assert model.linear.weight.no_decay is True
    model.linear.bias.group = "biases"
    model(data()).mean().backward()
    assert model.linear.weight.grad is not None
    assert sorted(seen) == [(5,), (5, 6)]
    attachment.detach()
    assert model.linear.weight.no_decay is True and model.linear.bias.group == "biases"
    model(data()).mean().backward()
    assert sorted(seen) == [(5,), (5,), (5, 6), (5, 6)]


@on_ranks(1, 2)
def test_a_frozen_parameter_keeps_its_hooks_through_detach_and_an_attach() -> None:
    model = Mixed()
    seen: list[str] = []
    weight, bias = model.linear.weight, model.linear.bias
    weight.register_hook(lambda grad: seen.append("hook"))
    bias.register_post_accumulate_grad_hook(lambda param: seen.append("post"))
    for freeze_first in (False, True):
        model.linear.requires_grad_(not freeze_first)
        attachment = zhooks.attach(model)
        model.linear.requires_grad_(False)
        model(data()).mean().backward()
        assert attachment.detach() is model and type(weight) is type(bias) is nn.Parameter
        model(data()).mean().backward()
        assert not weight.requires_grad and not bias.requires_grad and not seen
        model.linear.requires_grad_(True)
        model(data()).mean().backward()
        assert sorted(seen) == ["hook", "post"]
        seen.clear()


@on_ranks(1, 2)
def test_hooks_of_before_and_after_attach_run_together_and_their_handles_remove_them_at_any_time() -> None:
    model = Mixed()
    seen: list[str] = []

    def hooked(name: str) -> list[Any]:
        """A hook of each kind; the numbers of their handles are those of a fresh process."""
        weight = model.linear.weight
        return [
            weight.register_hook(lambda grad: seen.append(f"{name} hook")),
            weight.register_post_accumulate_grad_hook(lambda param: seen.append(f"{name} post")),
        ]

    def heard() -> list[str]:
        seen.clear()
        model(data()).mean().backward()
        assert model.linear.weight.grad is not None
        return sorted(seen)

    both = ["early hook", "early post", "late hook", "late post"]
    with pytest.MonkeyPatch.context() as fresh:
        fresh.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
        early = hooked("early")
        attachment = zhooks.attach(model)
        late = hooked("late")
    assert heard() == both
    early[0].remove()
    late[1].remove()
    assert heard() == both[1:3]
    attachment.detach()
    assert heard() == both[1:3]
    early[1].remove()
    late[0].remove()
    assert heard() == []


@on_ranks(1)
def test_a_hook_on_a_frozen_parameter_is_the_same_error_as_in_plain_pytorch() -> None:
    model, plain = Mixed(), Mixed()
    attachment = zhooks.attach(model)
    for either in (model, plain):
        either.linear.weight.requires_grad_(False)
        for register in (either.linear.weight.register_hook, either.linear.weight.register_post_accumulate_grad_hook):
            with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require grad"):
                register(print)
    attachment.detach()


@on_ranks(1, 2)
def test_a_gradient_kept_before_attach_is_carried_over() -> None:
    model = Mixed()
    model(data()).mean().backward()
    before = [param.grad.clone() for param in model.parameters()]
    zhooks.attach(model)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)


@on_ranks(2, kind=("LSTM", "GRU", "RNN"))
def test_the_flat_weights_of_recurrent_networks_follow_the_parameters(kind: str) -> None:
    torch.manual_seed(0)
    model = getattr(nn, kind)(5, 8, 2, batch_first=True)
    plain = copy.deepcopy(model)
    attachment = zhooks.attach(model)
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.1) for either in (model, plain)]
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for either, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            either(x)[0].square().mean().backward()
            optimizer.step()
    assert all(
        held is model._parameters[name] for held, name in zip(model._flat_weights, model._flat_weights_names, strict=True)
    )
    attachment.detach()
    assert torch.equal(model(x)[0], plain(x)[0])


@on_ranks(1, 2, how=("foreach", "fused"), kind=("Adam", "SGD"))
def test_a_step_over_lists_updates_ranges_beside_a_plain_parameter_and_what_is_gathered_follows(how: str, kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, how: True, **({"momentum": 0.9} if kind == "SGD" else {"amsgrad": True})}
    model, _, plain = attached()
    beside = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    chosen = zip((model, plain), beside, strict=True)
    optimizers = [getattr(torch.optim, kind)([*either.parameters(), extra], **options) for either, extra in chosen]
    for _ in range(3):
        for either, extra, optimizer in zip((model, plain), beside, optimizers, strict=True):
            extra.grad = torch.ones(3)
            optimizer.step()
            optimizer.zero_grad()
            either(data()).square().mean().backward()
    assert torch.equal(*beside)
    for name, ours, theirs in pairs(model, plain):
        # A fused kernel's vectors end elsewhere on a range.
        torch.testing.assert_close(sharded(ours).full_tensor(), theirs.detach(), rtol=1e-6, atol=1e-7, msg=name)


@on_ranks(1, 2)
def test_lists_that_meet_a_number_first_or_a_vector_of_numbers_give_the_ranges_of_what_plain_torch_gives() -> None:
    model, _, plain = attached()
    ours, theirs = ([param.grad for param in net.parameters() if param.grad is not None] for net in (model, plain))
    made, expected = (torch._foreach_pow(2.0, grads) for grads in (ours, theirs))
    for grads in (ours, theirs):
        torch._foreach_addcmul_(grads, grads, grads, torch.arange(len(grads)) * 0.5)
    for one, other in zip([*made, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(sharded(one).full_tensor(), other, rtol=1e-6, atol=1e-7)


# ---- what it refuses, by name


@on_ranks(1, 2)
def test_rows_and_matrices_of_a_gradient_are_refused_by_name() -> None:
    model, _, _ = attached()
    grad = grad_of(model.linear.weight)
    for name, needs_rows in {
        "mean": lambda: grad.mean(dim=-1),
        "sum": lambda: grad.sum(0),
        "mm": lambda: grad @ grad.t(),
        "norm": lambda: grad.norm(dim=1),
        "select": lambda: grad[0],
        "view": lambda: grad.view(6, 5),
    }.items():
        with pytest.raises(zhooks.ShardedOpError, match=r"linear\.weight \(5, 6\)") as raised:
            needs_rows()
        assert "full_tensor()" in str(raised.value), name
    # As torch 2.8's asynchronous save copies a state.
    torch_copies: dict[str, Any] = {"__name__": "torch.distributed._state_dict_utils"}
    exec("def copy(into, state): into.copy_(state)", torch_copies)
    with pytest.raises(zhooks.ShardedOpError, match=r"linear\.weight \(5, 6\) into a plain tensor.*async_save of torch 2\.8"):
        torch_copies["copy"](torch.empty(5, 6), grad)


def imul(grad: Tensor) -> None:
    grad[1:3] *= 2


@on_ranks(1, 2)
def test_a_write_to_rows_of_a_gradient_is_refused_with_what_to_write_which_works() -> None:
    model, _, _ = attached()
    with torch.no_grad():
        grad: Any = grad_of(model.linear.weight)
        rows = torch.tensor([0, 4])
        for write in (imul, lambda grad: grad[0].zero_(), lambda grad: grad.index_fill_(0, rows, 1.0)):
            with pytest.raises(zhooks.ShardedOpError, match=r"assign.* ?\(?tensor\[index\] = value"):
                write(grad)
        wanted = grad.full_tensor()
        imul(wanted)
        wanted[rows] = 1.0
        grad[1:3] = grad.full_tensor()[1:3] * 2
        grad[rows] = 1.0
        assert torch.equal(grad.full_tensor(), wanted)


@on_ranks(1, 2)
def test_a_list_and_an_array_of_a_gradient_are_refused() -> None:
    model, _, _ = attached()
    with torch.no_grad():
        grad = grad_of(model.linear.weight)
        for read in (grad.tolist, grad.numpy, grad.__array__):
            with pytest.raises(zhooks.ShardedOpError, match=r"linear\.weight"):
                read()


@on_ranks(1, 2, stage=(0, 3))
def test_a_state_of_another_shape_is_named_with_both_shapes_before_anything_is_updated(stage: int) -> None:
    other, model = nn.Linear(4, 4), nn.Linear(4, 6)
    theirs = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 4)).sum().backward()
    theirs.step()
    attachment = zhooks.attach(model, policy={"stage": stage})
    before = full(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(zhooks.CheckpointError, match=r"AdamW.step.*exp_avg of weight .*\(6, 4\), found \(4, 4\)"):
        optimizer.step()
    assert same(full(model), before)
    attachment.detach()


@on_ranks(1, 2)
def test_an_error_says_what_really_failed() -> None:
    model, _, _ = attached()
    grad = grad_of(model.linear.weight)
    with torch.no_grad():
        for read, said in {
            (lambda: torch.ones(3, 3).lerp_(grad, 0.5)): r"tensors of one shape, found \(3, 3\), \(5, 6\)",
            (lambda: grad.mean(0)): r"full_tensor\(\), on every rank",
            (lambda: model.linear.weight.cumsum_(0)): r"write=True",
        }.items():
            with pytest.raises(zhooks.ShardedOpError, match=said) as raised:
                read()
            assert "optimizer needs" not in str(raised.value) and "linear.weight" in str(raised.value)


@on_ranks(1)
def test_tracing_scripting_and_exporting_an_attached_model_is_refused_and_it_trains_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    attachment = zhooks.attach(model)
    captures: dict[str, Callable[[], Any]] = {
        "trace": lambda: torch.jit.trace(model, torch.ones(1, 4)),
        "script": lambda: torch.jit.script(model),
        "export": lambda: torch.export.export(model, (torch.ones(1, 4),)),
    }
    for verb, capture in captures.items():
        with warnings.catch_warnings(), pytest.raises(zhooks.ShardedOpError, match=rf"Cannot {verb} .*detach\(\), {verb} the"):
            warnings.simplefilter("ignore", DeprecationWarning)
            capture()
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert attachment.detach() is model


@on_ranks(2)
def test_a_list_operation_that_is_refused_has_changed_nothing() -> None:
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    attachment = zhooks.attach(net, policy={"units": {"classes": ["Sequential"], "min_numel": 0}})
    net(torch.ones(2, 6)).sum().backward()
    first, other = (param.grad for param in net.parameters())
    assert first is not None and other is not None
    means = [first.clone(), first.clone()]
    before = [whole(mean).clone() for mean in means]
    with pytest.raises(zhooks.ShardedOpError, match="do not match"):
        # The second is of another range of elements.
        torch._foreach_lerp_(means, [first * 2, other], 0.5)
    assert all(torch.equal(whole(mean), value) for mean, value in zip(means, before, strict=True))
    attachment.detach()


@on_ranks(1, 2)
def test_a_copy_of_a_gradient_that_is_held_back_is_a_tensor_of_its_own() -> None:
    net = nn.Linear(4, 4, bias=False)
    attachment = zhooks.attach(net, policy={"stage": 1, "units": {"min_numel": 0}})
    with attachment.no_sync():
        net(torch.ones(2, 4)).sum().backward()
        grad = net.weight.grad
        assert grad is not None
        for one in (grad.clone(), grad * 1.0, copy.deepcopy(grad)):
            assert torch.equal(whole(one.detach()), torch.full((4, 4), 2.0))
            assert torch.equal(whole(one.data), torch.full((4, 4), 2.0))
            assert not one.requires_grad_(False).requires_grad
            assert whole(one.zero_()).eq(0).all()
        assert torch.equal(whole(grad), torch.full((4, 4), 2.0))
    attachment.detach()


@on_ranks(2)
def test_a_list_with_a_plain_tensor_gives_expressions_of_its_parameters() -> None:
    net = nn.Linear(4, 4, bias=False)
    values = net.weight.detach().clone()
    attachment = zhooks.attach(net, policy={"units": {"min_numel": 0}})
    with torch.inference_mode():
        doubled, plain = torch._foreach_mul([net.weight, torch.ones(3)], 2.0)
        assert torch.equal(doubled.sum(0), (values * 2).sum(0)) and torch.equal(plain, torch.full((3,), 2.0))
    attachment.detach()
