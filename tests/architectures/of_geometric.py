"""Subjects of torch_geometric: three layers of one kind of convolution on a small graph, and whole models of molecules.

``train.py`` asks for one by its name.  A graph is drawn anew for every batch, so that ranks have different edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.subject import Inputs, Skipped, Subject

NODES, EDGES, WIDTH, HIDDEN = 12, 30, 8, 16


class Convolutions(nn.Module):
    """Three blocks of a convolution, a norm and an activation, then a linear layer."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make(width, HIDDEN)) for width in (WIDTH, HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edge_index)
        out: Tensor = self.head(x)
        return out


class Block(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = convolution, nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.convolution(x, edge_index)))


def types() -> list[str]:
    """All that are here."""
    return [*_CONVOLUTIONS, *_MODELS]


def subject(name: str) -> Subject:
    """The subject of one kind of convolution, or one model.

    Raises:
        Skipped: this torch_geometric has no such class.
    """
    import torch_geometric.nn

    cls = getattr(torch_geometric.nn, name, None)
    if cls is None:
        raise Skipped(f"torch_geometric {torch_geometric.__version__} has no {name}")
    if name in _MODELS:
        settings, draw = _MODELS[name]
        return Subject(f"geometric/{name}", name, lambda: cls(**settings()), draw)
    return Subject(f"geometric/{name}", name, lambda: Convolutions(lambda i, o: _CONVOLUTIONS[name](cls, i, o)), _graph)


def _graph(generator: torch.Generator) -> Inputs:
    ends = torch.randint(0, NODES, (2, EDGES), generator=generator)
    return {"x": torch.randn(NODES, WIDTH, generator=generator), "edge_index": ends}


def _molecules(generator: torch.Generator) -> Inputs:
    kinds = torch.randint(1, 9, (NODES,), generator=generator)
    batch = torch.arange(NODES) // (NODES // 2)
    return {"z": kinds, "pos": torch.randn(NODES, 3, generator=generator), "batch": batch}


def _everybody_near(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of one molecule and their distances: torch_geometric's own search needs another library."""
    ends = torch.nonzero((batch[:, None] == batch[None, :]) & ~torch.eye(len(batch), dtype=torch.bool)).t().contiguous()
    return ends, (pos[ends[0]] - pos[ends[1]]).norm(dim=-1)


def _schnet() -> dict[str, Any]:
    return {
        "hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 8,
        "interaction_graph": _everybody_near,
    }  # fmt: skip


def _degrees() -> Tensor:
    return torch.tensor([1, 2, 4, 3, 2])


def _network(cls: Any, width: int, out: int) -> Any:
    return cls(nn.Sequential(nn.Linear(width, out), nn.Tanh(), nn.Linear(out, out)))


def _plain(cls: Any, width: int, out: int) -> Any:
    return cls(width, out)


_CONVOLUTIONS: dict[str, Callable[[Any, int, int], nn.Module]] = {
    "GCNConv": _plain,
    "GATConv": lambda cls, width, out: cls(width, out // 4, heads=4, dropout=0.1),
    "GATv2Conv": lambda cls, width, out: cls(width, out // 4, heads=4),
    "GINConv": _network,
    "EdgeConv": lambda cls, width, out: cls(nn.Sequential(nn.Linear(2 * width, out), nn.Tanh(), nn.Linear(out, out))),
    "SAGEConv": _plain,
    "GraphConv": _plain,
    "PNAConv": lambda cls, width, out: cls(
        width, out, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=_degrees()
    ),
    "TransformerConv": lambda cls, width, out: cls(width, out // 4, heads=4),
    "ChebConv": lambda cls, width, out: cls(width, out, K=2),
    "ARMAConv": _plain,
    "TAGConv": _plain,
    "SGConv": _plain,
    "ResGatedGraphConv": _plain,
    "LEConv": _plain,
    "ClusterGCNConv": _plain,
    "FeaStConv": _plain,
    "GENConv": _plain,
}
_MODELS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[torch.Generator], Inputs]]] = {
    "SchNet": (_schnet, _molecules),
}
