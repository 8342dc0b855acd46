"""PyTorch Geometric: graphs of varied sizes, an own loop as in its examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GCNConv,
    GINConv,
    SAGEConv,
    TopKPooling,
    global_add_pool,
    global_mean_pool,
)

from tests.libraries.ways import Way


class Net(nn.Module):
    """Three convolutions, and a pool over each graph."""

    def __init__(self, convolution: Callable[[int, int], nn.Module], width: int) -> None:
        super().__init__()
        self.first = convolution(16, width)
        self.second, self.third = convolution(width, width), convolution(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Any, edges: Any, batch: Any) -> Any:
        x = self.first(x, edges).relu()
        x = self.second(x, edges).relu()
        x = self.third(x, edges).relu()
        return self.head(global_mean_pool(x, batch))


class Pooled(nn.Module):
    """A pool that keeps half of the nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = GCNConv(16, width), GCNConv(width, width)
        self.pool, self.head = TopKPooling(width, 0.5), nn.Linear(width, 4)

    def forward(self, x: Any, edges: Any, batch: Any) -> Any:
        x = self.first(x, edges).relu()
        x, edges, _, batch, _, _ = self.pool(x, edges, None, batch)
        return self.head(global_add_pool(self.second(x, edges).relu(), batch))


class OfData(Net):
    """The same, called with the library's own object."""

    def forward(self, data: Any) -> Any:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.batch)


def _graphs(large: bool) -> list[Data]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(512 if large else 256):
        nodes = int(torch.randint(*((40, 80) if large else (5, 20)), (), generator=draw))
        edges = torch.randint(0, nodes, (2, nodes * 4), generator=draw)
        x = torch.randn(nodes, 16, generator=draw)
        found.append(Data(x=x, edge_index=edges, y=torch.randint(0, 4, (1,), generator=draw)))
    return found


def _train(way: Way, made: Callable[[int], nn.Module], whole: bool = False) -> None:
    torch.manual_seed(0)
    inner = made(256 if way.large else 16)
    model = way.module(inner)
    optimizer = torch.optim.Adam(inner.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    loader = DataLoader(
        _graphs(way.large), batch_size=128 if way.large else 16, shuffle=True, generator=draw
    )
    while len(way.losses) < way.steps:
        for data in loader:
            out = model(data) if whole else model(data.x, data.edge_index, data.batch)
            loss = nn.functional.cross_entropy(out, data.y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            way.losses.append(float(loss.detach()))
            if len(way.losses) == way.steps:
                break


def gcn(way: Way) -> None:
    """Graph convolutions."""
    _train(way, lambda width: Net(GCNConv, width))


def gin(way: Way) -> None:
    """Isomorphism networks."""

    def convolution(given: int, width: int) -> nn.Module:
        return GINConv(nn.Sequential(nn.Linear(given, width), nn.ReLU(), nn.Linear(width, width)))

    _train(way, lambda width: Net(convolution, width))


def sage(way: Way) -> None:
    """GraphSAGE."""
    _train(way, lambda width: Net(SAGEConv, width))


def pooling(way: Way) -> None:
    """A pool by the data."""
    _train(way, Pooled)


def data_objects(way: Way) -> None:
    """The library's objects as arguments."""
    _train(way, lambda width: OfData(GCNConv, width), whole=True)
