"""What a layout wastes at N = 1,024: our flat one beside dim-0 sharding and a row-aligned one, on real architectures.

A person runs it: `python benchmarks/padding.py`. It is arithmetic over shapes: models are built on meta, no weight is
allocated and nothing is downloaded.

Note: [Three layouts]
    flat         ours: the parameters of a unit in one buffer, cut at any element into N equal ranges.
    dim-0        FSDP2: every parameter alone, its first dimension rounded up to a multiple of N rows.
    row-aligned  veScale, Megatron-FSDP: the parameters of a unit in one buffer of N equal ranges, but no range ends
                 within a row (one index of the first dimension), so every rank holds whole rows. A parameter stays
                 in one piece, as views without a copy-out need, so padding lies before parameters and at the end. We
                 take the shortest shard that works for the declared order of the parameters or for longest rows
                 first, whichever wastes less.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

ITEMSIZE = 4
# A search that has tried this many shard lengths is at fault: every model here needs fewer than a hundred.
MOST_TRIALS = 1_000_000
Unit = Sequence[torch.Size]


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter's part in a row-aligned layout: `numel` elements in rows of `length`."""

    numel: int
    length: int


def flat_padding(unit: Unit, world: int) -> int:
    """Padding elements of our layout; segments as the policy's default `[units] max_numel` cuts them."""
    from zhooks.layout import flat_layout

    numels = [size.numel() for size in unit]
    return flat_layout(numels, world=world, itemsize=ITEMSIZE, max_numel=2**26).padding


def dim0_padding(unit: Unit, world: int) -> int:
    """Padding elements when each parameter's dimension 0 is rounded up to a multiple of `world`."""
    return sum(_up_to(row.numel // row.length, world) * row.length - row.numel for row in _rows(unit))


def row_aligned_padding(unit: Unit, world: int) -> int:
    """Padding elements when no row is split between ranks: see Note [Three layouts]."""
    rows = _rows(unit)
    orders = (rows, sorted(rows, key=lambda row: -row.length))
    shard_numel = min(_shortest_shard(order, world) for order in orders)
    return shard_numel * world - sum(row.numel for row in rows)


def _rows(unit: Unit) -> list[Row]:
    sizes = [size if len(size) > 0 else torch.Size([1]) for size in unit if size.numel() > 0]
    return [Row(size.numel(), size.numel() // size[0]) for size in sizes]


def _shortest_shard(rows: list[Row], world: int) -> int:
    """The least elements a rank must hold so that all rows, in this order, fit without one being split."""
    shard = -(-sum(row.numel for row in rows) // world)
    for _ in range(MOST_TRIALS):
        # More than two shards long: two boundaries fall within it, a shard apart, so a shard must be whole rows of it.
        step = math.lcm(*(row.length for row in rows if row.numel > 2 * shard))
        rounded = _up_to(shard, step)
        if rounded == shard and _fits(rows, shard, world):
            return shard
        shard = rounded if rounded > shard else shard + step
    raise AssertionError(f"no row-aligned shard of {world} ranks after {MOST_TRIALS} lengths")


def _fits(rows: list[Row], shard: int, world: int) -> bool:
    offset = 0
    for row in rows:
        start = _aligned_start(offset, row, shard)
        if start is None:
            return False
        offset = start + row.numel
    return offset <= shard * world


def _aligned_start(offset: int, row: Row, shard: int) -> int | None:
    """The first place at or after `offset` from where no shard boundary falls within a row; None if there is none."""
    boundary = _up_to(offset, shard)
    for start in (offset, offset + (boundary - offset) % row.length, boundary):
        first = _up_to(start + 1, shard)
        boundaries = range(first, start + row.numel, shard)
        # Boundaries a shard apart: the first two decide for all.
        if all((cut - start) % row.length == 0 for cut in boundaries[:2]):
            return start
    return None


def _up_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def units_of(model: nn.Module) -> list[Unit]:
    """A unit for every element of an outermost list of blocks, and one for what is left; tied weights once.

    The same units for every layout: only the cutting is compared here.
    """
    units: dict[str, list[torch.Size]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        units.setdefault("" if place is None else ".".join(parts[: place + 1]), []).append(parameter.shape)
    return list(units.values())


def gpt2_xl() -> nn.Module:
    """GPT-2 XL: 1.6 billion parameters, dimension 1,600."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25))


def llama_8b() -> nn.Module:
    """Llama 3 8B: grouped-query attention, untied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config)


def resnet_50() -> nn.Module:
    """ResNet-50: convolutions, whose dimension 0 is small and whose rows are long."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()
    config.num_labels = 1000
    return ResNetForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT-2 XL": gpt2_xl, "Llama-8B": llama_8b, "ResNet-50": resnet_50}
LAYOUTS: dict[str, Callable[[Unit, int], int]] = {
    "flat (zhooks)": flat_padding,
    "dim-0 (FSDP2)": dim0_padding,
    "row-aligned": row_aligned_padding,
}


def main() -> None:
    """Print padding for every model and layout, elements and per cent of the parameters."""
    parser = argparse.ArgumentParser(description="Padding of three layouts, in per cent of the parameters.")
    parser.add_argument("--world", type=int, default=1024, help="ranks the parameters are sharded over")
    world = parser.parse_args().world
    table = Table(title=f"padding at N = {world:,}, elements", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "parameters", "units", "layout", "padding", "share"):
        table.add_column(heading, justify="left" if heading in ("model", "layout") else "right")
    for name, build in MODELS.items():
        with torch.device("meta"):
            model = build()
        units = units_of(model)
        psi = sum(size.numel() for unit in units for size in unit)
        for layout, padding in LAYOUTS.items():
            wasted = sum(padding(unit, world) for unit in units)
            table.add_row(name, f"{psi:,}", str(len(units)), layout, f"{wasted:,}", f"{wasted / psi:.3%}")
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
