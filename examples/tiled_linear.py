"""A layer too large to gather: a Linear in tiles, each a unit that is gathered, used and released by itself.

    python examples/tiled_linear.py
    torchrun --nproc-per-node 2 examples/tiled_linear.py

Copy ``Tile`` and ``TiledLinear`` into your own code.  Without ``attach`` they are ordinary modules.

Source: DeepSpeed's memory-centric tiling, ZeRO-Infinity, arXiv:2104.07857, section 5.1.3.
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from ranks import launched


class Tile(nn.Linear):
    """A block of a large weight; ``fan_in``: inputs of the whole weight, which say how its values are drawn."""

    #: attach makes a module of such a class a unit, wherever it lies.
    zhooks_tile = True

    def __init__(self, in_features: int, out_features: int, bias: bool, *, fan_in: int, device: Any, dtype: Any) -> None:
        self.fan_in = fan_in
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw values as ``nn.Linear`` draws those of the whole."""
        for param in self.parameters():
            param.uniform_(-(self.fan_in**-0.5), self.fan_in**-0.5)


class TiledLinear(nn.Module):
    """An ``nn.Linear`` made of smaller ones, ``tiles[0]`` over its outputs times ``tiles[1]`` over its inputs.

    Divided over outputs the result is the same; divided over inputs it is a sum of partial sums, so the last bits may differ.

    Raises:
        ValueError: ``tiles`` asks for tiles without a feature.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tiles: tuple[int, int],
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._outs, self._ins = divided(out_features, tiles[0]), divided(in_features, tiles[1])
        # The first tile of a row of them has the bias: it is added once.
        self.tiles = nn.ModuleList(
            Tile(cols, rows, bias=bias and number == 0, fan_in=in_features, device=device, dtype=dtype)
            for rows in self._outs
            for number, cols in enumerate(self._ins)
        )

    @classmethod
    def of(cls, linear: nn.Linear, *, tiles: tuple[int, int]) -> TiledLinear:
        """Divide an existing layer; the values stay the same."""
        weight, bias = linear.weight, linear.bias is not None
        made = cls(
            linear.in_features, linear.out_features, bias, tiles=tiles, device=weight.device, dtype=weight.dtype
        )
        if weight.device.type != "meta":
            made.load_state_dict(made.cut_state(linear.state_dict()))
        for tile in made.tiles:
            tile.requires_grad_(weight.requires_grad)
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        inputs = x.split(self._ins, dim=-1)
        tiles, rows = iter(self.tiles), []
        for _ in self._outs:
            total = next(tiles)(inputs[0])
            for each in inputs[1:]:
                total = total + next(tiles)(each)
            rows.append(total)
        return torch.cat(rows, dim=-1)

    def cut_state(self, state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """From the state dict of a plain layer, whose names begin with ``prefix``, to one of tiles; other keys are kept."""
        out = {key: value for key, value in state.items() if key not in (f"{prefix}weight", f"{prefix}bias")}
        rows = state[f"{prefix}weight"].split(self._outs)
        biases = state[f"{prefix}bias"].split(self._outs) if f"{prefix}bias" in state else None
        for row, block in enumerate(rows):
            for col, tile in enumerate(block.split(self._ins, dim=1)):
                name = f"{prefix}tiles.{row * len(self._ins) + col}"
                out[f"{name}.weight"] = tile.clone()
                if biases is not None and col == 0:
                    out[f"{name}.bias"] = biases[row].clone()
        return out

    def whole_state(self, state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """From the state dict of tiles to that of a plain layer: the reverse of ``cut_state``."""
        out = {key: value for key, value in state.items() if not key.startswith(f"{prefix}tiles.")}
        cols, firsts = len(self._ins), range(0, len(self.tiles), len(self._ins))
        rows = [[state[f"{prefix}tiles.{first + col}.weight"] for col in range(cols)] for first in firsts]
        out[f"{prefix}weight"] = torch.cat([torch.cat(row, 1) for row in rows])
        if f"{prefix}tiles.0.bias" in state:
            out[f"{prefix}bias"] = torch.cat([state[f"{prefix}tiles.{first}.bias"] for first in firsts])
        return out


def divided(features: int, count: int) -> Sequence[int]:
    """``features`` in ``count`` tiles as even as can be."""
    if not 1 <= count <= features:
        raise ValueError(f"TiledLinear expected from 1 to {features} tiles over {features} features, found {count}.")
    small, more = divmod(features, count)
    return [small + 1] * more + [small] * (count - more)


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=30, type=click.IntRange(1), help="Training steps.")
@click.option("--classes", default=4096, type=click.IntRange(8), help="Outputs of the last layer.")
@click.option("--tiles", default=8, type=click.IntRange(1), help="Tiles of the last layer.")
def main(steps: int, classes: int, tiles: int) -> None:
    """Learn random labels over many classes with an output layer that is never gathered whole."""
    with launched() as place:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), TiledLinear(64, classes, tiles=(tiles, 1))).to(place.device)
        inputs, labels = torch.randn(64, 64, device=place.device), torch.randint(classes, (64,), device=place.device)
        attachment = zhooks.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            place.show(step, steps, loss.item())
        units = attachment.describe()
        if place.rank == 0:
            print(units)
        attachment.detach()


if __name__ == "__main__":
    main()
