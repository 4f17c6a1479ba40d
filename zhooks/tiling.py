"""A Linear whose weight is too large to be gathered whole: tiles of it, each gathered, used and released by itself.

``layout/units.py`` makes every tile a unit of its own, wherever it lies; models hold a ``TiledLinear`` where they held the
Linear.  It never knows of ranks or policies: without ``attach`` it is an ordinary module.

Source: DeepSpeed's memory-centric tiling, ZeRO-Infinity, arXiv:2104.07857, section 5.1.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import LayoutError


class Tile(nn.Linear):
    """A block of a large weight; a unit of its own in every model.

    Args:
        fan_in: inputs of the whole weight, which say how its values are drawn.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, *, fan_in: int, device: Any, dtype: Any) -> None:
        self.fan_in = fan_in
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw values as ``nn.Linear`` draws those of the whole."""
        bound = self.fan_in**-0.5
        for param in self.parameters():
            param.uniform_(-bound, bound)


class TiledLinear(nn.Module):
    """An ``nn.Linear`` made of smaller ones, ``tiles[0]`` over its outputs times ``tiles[1]`` over its inputs.

    Only one tile, and those that ``[schedule] prefetch`` fetches ahead, is gathered at a time, in forward and in backward.
    Divided over outputs the result is the same; divided over inputs it is a sum of partial sums, so the last bits may differ.

    Args:
        in_features: as in ``nn.Linear``, and so are ``out_features``, ``bias``, ``device`` and ``dtype``.
        tiles: into how many tiles to divide outputs and inputs, each at least 1 and at most the number of features.
    Raises:
        LayoutError: ``tiles`` is not a pair, or asks for tiles without a feature.

    Source: memory-centric tiling, ZeRO-Infinity, arXiv:2104.07857, section 5.1.3.
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
        if not (isinstance(tiles, (tuple, list)) and len(tiles) == 2 and all(isinstance(count, int) for count in tiles)):
            raise LayoutError(f"TiledLinear expected tiles=(chunks of the outputs, chunks of the inputs), found {tiles!r}.")
        self.in_features, self.out_features, self.shape = in_features, out_features, tiles
        self._outs, self._ins = _parts(out_features, tiles[0]), _parts(in_features, tiles[1])
        # The first tile of a row of them has the bias: it is added once.
        self.tiles = nn.ModuleList(
            Tile(cols, rows, bias=bias and number == 0, fan_in=in_features, device=device, dtype=dtype)
            for rows in self._outs
            for number, cols in enumerate(self._ins)
        )

    @classmethod
    def of(cls, linear: nn.Linear, *, tiles: tuple[int, int]) -> TiledLinear:
        """Divide an existing layer; the values stay the same.

        Args:
            linear: the layer.
            tiles: as in the class.
        Raises:
            LayoutError: ``linear`` is not an ``nn.Linear``.
        """
        if not isinstance(linear, nn.Linear):
            raise LayoutError(f"TiledLinear.of expected an nn.Linear, found {type(linear).__name__}. Only a Linear is tiled.")
        weight = linear.weight
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            tiles=tiles,
            device=weight.device,
            dtype=weight.dtype,
        )
        if weight.device.type != "meta":
            made.load_state_dict(made.cut_state(linear.state_dict()))
        for tile in made.tiles:
            tile.requires_grad_(weight.requires_grad)
        return made.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` with these values; for a model that is not attached."""
        first = self.tiles[0]
        assert isinstance(first, Tile)
        made = nn.Linear(
            self.in_features, self.out_features, first.bias is not None, device=first.weight.device, dtype=first.weight.dtype
        )
        made.load_state_dict(self.whole_state(self.state_dict()))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        parts, rows = x.split(self._ins, dim=-1) if len(self._ins) > 1 else (x,), []
        tiles = iter(self.tiles)
        for _ in self._outs:
            total: Tensor | None = None
            for part in parts:
                product = next(tiles)(part)
                total = product if total is None else total + product
            assert total is not None
            rows.append(total)
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def cut_state(self, state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Convert a state dict of a plain layer to one of tiles.

        Args:
            state: has the plain layer's ``weight`` and ``bias`` under ``prefix``; other keys are kept.
            prefix: of the layer's names, such as "head.".
        Returns:
            A new dict; its tiles are copies.
        """
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
        """Convert a state dict of tiles to one of a plain layer.

        Args:
            state: has this module's tiles under ``prefix``; other keys are kept.
            prefix: of the layer's names, such as "head.".
        Returns:
            A new dict with new tensors ``weight`` [out_features, in_features] and ``bias`` [out_features].
        """
        out = {key: value for key, value in state.items() if not key.startswith(f"{prefix}tiles.")}
        cols = len(self._ins)

        def tile(row: int, col: int, what: str) -> Tensor:
            return state[f"{prefix}tiles.{row * cols + col}.{what}"]

        rows = range(len(self._outs))
        out[f"{prefix}weight"] = torch.cat([torch.cat([tile(r, c, "weight") for c in range(cols)], 1) for r in rows])
        if f"{prefix}tiles.0.bias" in state:
            out[f"{prefix}bias"] = torch.cat([tile(r, 0, "bias") for r in rows])
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tiles={self.shape}"


def _parts(features: int, count: int) -> Sequence[int]:
    """``features`` in ``count`` parts as even as can be."""
    if not 1 <= count <= features:
        raise LayoutError(
            f"TiledLinear expected from 1 to {features} tiles over {features} features, found {count}. Choose fewer tiles."
        )
    small, more = divmod(features, count)
    return [small + 1] * more + [small] * (count - more)
