"""Graph classification with torch_geometric: which of two random processes generated a graph?

    python examples/graph.py
    torchrun --nproc-per-node 2 examples/graph.py
"""

# torch leaves Tensor.backward without annotations.
# mypy: untyped-calls-exclude=torch
from __future__ import annotations

from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.utils import barabasi_albert_graph, degree, erdos_renyi_graph

import zhooks
from ranks import launched

#: Degrees that are told apart, the last one standing for all above it.
DEGREES = 16


def graphs(count: int, nodes: int) -> Batch:
    """As many graphs of either kind, of about as many edges; a node knows its number of neighbours."""
    made = []
    for label in torch.randint(2, (count,)).tolist():
        edges = barabasi_albert_graph(nodes, 3) if label else erdos_renyi_graph(nodes, 6 / nodes)
        features = F.one_hot(degree(edges[0], nodes, dtype=torch.long).clamp(max=DEGREES - 1), DEGREES).float()
        made.append(Data(x=features, edge_index=edges, y=torch.tensor([label])))
    return Batch.from_data_list(made)


class Network(nn.Module):
    """Three rounds of messages, then the mean over each graph's nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GCNConv(DEGREES, width), GCNConv(width, width), GCNConv(width, width)])
        self.head = nn.Linear(width, 2)

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = F.relu(layer(x, batch.edge_index))
        logits: Tensor = self.head(global_mean_pool(x, batch.batch))
        return logits


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=60, type=click.IntRange(1), help="Training steps.")
@click.option("--batch", default=16, type=click.IntRange(1), help="Graphs per step and rank.")
@click.option("--nodes", default=40, type=click.IntRange(8), help="Nodes of each graph.")
@click.option("--width", default=64, type=click.IntRange(1), help="Width of the model.")
@click.option("--policy", default=None, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A policy file.")
def main(steps: int, batch: int, nodes: int, width: int, policy: Path | None) -> None:
    """Tell graphs grown by preferential attachment from graphs of independent edges."""
    with launched() as place:
        torch.manual_seed(0)
        model = Network(width).to(place.device)
        zhooks.attach(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1 + place.rank)  # every rank its own graphs
        for step in range(steps):
            found = graphs(batch, nodes).to(place.device)
            loss = F.cross_entropy(model(found), found.y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            place.show(step, steps, loss.item())


if __name__ == "__main__":
    main()
