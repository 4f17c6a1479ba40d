"""Unusual models: parameters that are frozen or shared, modules used in unusual ways, outputs of unusual kinds.

pytest runs it, each story on one rank and on two or on two alone, against plain replicas (see adversity.py).
It never tests the training loop's own tricks, nor autograd's: test_training_loops.py and test_autograd.py do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.parity.adversity import Block, Net, Side, adam, adversity, batch, rows, sgd, train_noting_gradients

STEPS = 3


def train(side: Side, model: nn.Module) -> None:
    """Attach, train a few ordinary steps, note the losses and the state."""
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(STEPS):
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2, 1, 0))
def test_frozen_parameters_keep_their_values_and_the_others_train(side: Side) -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    model.leave.bias.requires_grad_(False)
    train(side, model)


@adversity(stages=(3, 2))
def test_parameters_may_be_frozen_and_unfrozen_in_mid_run(side: Side) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(6):
        if step == 2:
            model.blocks[0].requires_grad_(True)
            model.blocks[1].linear.requires_grad_(False)
        if step == 4:
            model.blocks[1].linear.requires_grad_(True)
        side.step(model, optimizer, step)
    side.note_state(attachment)


class Idle(Net):
    """A module that is never called, and in a used module a parameter that is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.blocks[1].unread = nn.Parameter(torch.ones(5))


@adversity(stages=(3, 2, 1))
def test_a_parameter_that_no_rank_uses_is_not_touched_by_the_optimizer(side: Side) -> None:
    train(side, Idle())


class Choosy(Net):
    """Uses the blocks it is told to."""

    chosen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for place in self.chosen:
            x = self.blocks[place](x)
        return self.leave(x)


@adversity(stages=(3, 2, 1, 0), worlds=(2,))
def test_ranks_may_use_different_parameters_in_the_same_step(side: Side) -> None:
    model = Choosy()
    attachment = side.attach(model)
    optimizer = adam(model)
    # First together, so that the order of use is settled; then apart, then one rank with a block that nobody has used.
    for step, chosen in enumerate([((0, 1), (0, 1)), ((0,), (1,)), ((0, 1), (1, 2)), ((), (0, 1, 2))]):
        model.chosen = chosen[side.rank]
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_model_may_take_another_path_from_step_to_step(side: Side) -> None:
    model = Choosy()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step, chosen in enumerate([(0, 1), (1, 0), (2,), (0, 1, 2, 0), (0, 1)]):
        model.chosen = chosen
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_module_may_be_used_several_times_and_sit_in_two_places(side: Side) -> None:
    model = Net()
    model.blocks[2] = model.blocks[0]
    model.blocks.append(model.blocks[1])
    train(side, model)


class Reader(nn.Module):
    """A block that reads another block's weight without calling it."""

    def __init__(self, other: Block) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.lent = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own(F.linear(x, self.lent[0].linear.weight).tanh())


@adversity(stages=(3, 2))
def test_a_weight_may_be_read_from_another_module(side: Side) -> None:
    model = Net()
    model.blocks[2] = Reader(model.blocks[0])
    model.blocks.append(Reader(uncalled := Block()))
    model.uncalled = uncalled
    train(side, model)


@adversity()
def test_a_weight_may_be_read_by_the_loss_alone(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = batch(step, side.rank)
        loss = F.mse_loss(model(x), y) + F.linear(x, model.enter.weight, model.enter.bias).square().mean()
        loss.backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    side.note_state(attachment)


class Encoder(Net):
    """Called by methods of its own, never through ``forward``."""

    def encode(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.enter.weight, self.enter.bias)
        for block in self.blocks:
            x = block.forward(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.leave.weight.t() + self.leave.bias


@adversity(stages=(3, 2))
def test_methods_other_than_forward_train_as_well(side: Side) -> None:
    model = Encoder()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(STEPS):
        x, y = batch(step, side.rank)
        loss = F.mse_loss(model.decode(model.encode(x)), y)
        loss.backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    side.note_state(attachment)


class Parcel:
    """An object that no tree walk of tensors looks into."""

    __slots__ = ("content",)

    def __init__(self, content: Tensor) -> None:
        self.content = content


@dataclass
class Output:
    hidden: Tensor
    parts: dict[str, list[Tensor]]


class ParcelBlock(Block):
    def forward(self, x: Tensor | Parcel) -> Any:
        return Parcel(super().forward(x.content if isinstance(x, Parcel) else x))


class OutputBlock(Block):
    def forward(self, x: Tensor | Output) -> Any:
        given = x.hidden + x.parts["half"][0] if isinstance(x, Output) else x
        hidden = super().forward(given)
        return Output(hidden=hidden, parts={"half": [hidden / 2]})


class Unpacking(Net):
    """Blocks that hand on objects; the last one is unpacked here."""

    def forward(self, x: Tensor) -> Tensor:
        handed = self.enter(x)
        for block in self.blocks:
            handed = block(handed)
        return self.leave(handed.content if isinstance(handed, Parcel) else handed.hidden)


@adversity(stages=(3, 2))
def test_a_block_may_return_an_opaque_object(side: Side) -> None:
    train(side, Unpacking(block=ParcelBlock))


@adversity(stages=(3, 2))
def test_a_block_may_return_a_dataclass_of_containers(side: Side) -> None:
    train(side, Unpacking(block=OutputBlock))


class InPlace(Net):
    """Changes its blocks' outputs, and views of them, in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
            x[:, :4].mul_(0.5)
            x = x.clone().relu_()
        return self.leave(x).sub_(0.1)


@adversity(stages=(3, 2))
def test_outputs_may_be_changed_in_place(side: Side) -> None:
    train(side, InPlace())


class Slicing(Net):
    """Uses parts and reshapes of its weights, so that autograd saves views of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            upper, lower = block.linear.weight.chunk(2)
            x = torch.cat([x @ upper.t(), (lower.unsqueeze(0) @ x.unsqueeze(-1)).squeeze(-1)], dim=-1)
            x = block(x * block.norm.weight.view(1, 8))
        return self.leave(x)


@adversity(stages=(3, 2))
def test_views_of_a_weight_may_be_saved_by_autograd(side: Side) -> None:
    train(side, Slicing())


@adversity(stages=(3, 2))
def test_parametrised_weights_train(side: Side) -> None:
    model = Net()
    parametrizations.weight_norm(model.blocks[0].linear)
    parametrizations.orthogonal(model.blocks[1].linear, use_trivialization=False)
    train(side, model)


class Odd(Net):
    """A 0-d, an empty, a one-element, a non-contiguous and a channels-last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.scale + self.shift + self.empty.sum()
        seen = F.conv2d(x[:, :, None, None].expand(-1, -1, 2, 2), self.image).mean((1, 2, 3))
        return x + self.turned.mean() + seen[:, None]


@adversity(stages=(3, 2, 1, 0))
def test_scalar_empty_transposed_and_channels_last_parameters_train(side: Side) -> None:
    train(side, Odd())


class Switching(Net):
    """Dropout and BatchNorm: what ``eval`` switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(self.norm(x)))


@adversity(stages=(3, 2))
def test_evaluation_between_steps_changes_nothing(side: Side) -> None:
    model = Switching()
    attachment = side.attach(model)
    optimizer = adam(model)
    # Dropout draws from torch's generator: both sides must draw alike.
    torch.manual_seed(1)
    for step in range(STEPS):
        side.step(model, optimizer, step)
        model.eval()
        side.note("evaluated", model(batch(100 + step, side.rank)[0]))
        model.train()
    side.note_state(attachment)


class Attending(nn.Module):
    """Layers whose evaluation takes a fast path that reads weights of modules it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(x).unsqueeze(0)).squeeze(0))


@adversity(stages=(3, 2))
def test_the_fast_path_of_a_transformer_in_evaluation_finds_its_weights(side: Side) -> None:
    model = Attending()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(STEPS):
        side.step(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            side.note("evaluated", model(batch(100 + step, side.rank)[0]))
        model.train()
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_the_last_batches_may_be_uneven(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step, lengths in enumerate([(4, 4), (4, 3), (1, 2)]):
        x, y = batch(step, side.rank, rows=lengths[side.rank])
        loss = F.mse_loss(model(x), y)
        loss.backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    side.note_state(attachment)


class Keywords(Net):
    """Inputs by keyword and in containers, outputs in containers, a block given nothing by position."""

    def forward(self, *, given: dict[str, Tensor], shift: float = 0.0) -> Any:  # type: ignore[override]
        return [super().forward(given["x"] + shift)], None


@adversity(stages=(3, 2))
def test_inputs_by_keyword_and_outputs_in_containers(side: Side) -> None:
    model = Keywords()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(STEPS):
        x, y = batch(step, side.rank)
        (output,), nothing = model(given={"x": x}, shift=0.1)
        assert nothing is None
        loss = F.mse_loss(output, y)
        loss.backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    side.note_state(attachment)


# ---- what modules return and take


class Bias(nn.Linear):
    """Hands out its bias, which is used beside it."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), self.bias


class Outputs(nn.Module):
    """A generator that runs after its module, an object, None, and a parameter used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy, self.silent, self.bias = nn.Linear(8, 8), nn.Linear(8, 8), Bias(8, 8)
        self.lazy.forward = self._lazy  # type: ignore[method-assign, assignment]
        self.silent.forward = self._silent  # type: ignore[method-assign, assignment]
        self.kept: Tensor | None = None

    def _lazy(self, x: Tensor) -> Iterator[Tensor]:
        return (F.linear(half, self.lazy.weight, self.lazy.bias) for half in x.chunk(2))

    def _silent(self, x: Tensor) -> None:
        self.kept = F.linear(x, self.silent.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat(list(self.lazy(x)))
        assert self.silent(y) is None and self.kept is not None
        out, bias = self.bias(torch.tanh(self.kept))
        return out + bias


@adversity(worlds=(2,), exact=False)
def test_modules_may_return_generators_none_and_their_own_parameters(side: Side) -> None:
    model = Outputs()
    side.attach(model)
    train_noting_gradients(side, model, lambda step: model(rows(side, step)).square().mean())


class Chosen(nn.Module):
    """Rows go to the expert that a gate chooses; ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (logits.argmax(-1) == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return out + logits.sum(-1, keepdim=True)


@adversity(worlds=(2,), exact=False)
def test_experts_that_rows_choose_train_whichever_ranks_use_them(side: Side) -> None:
    model = Chosen()
    side.attach(model)
    train_noting_gradients(side, model, lambda step: model(rows(side, step)).square().mean())
