"""A graph network of torch_geometric that predicts one number for each graph of a `Batch`."""

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GCNConv(8, 32), GCNConv(32, 32), nn.Linear(32, 3)

    def forward(self, graphs):
        x = self.first(graphs.x, graphs.edge_index).relu()
        x = self.second(x, graphs.edge_index).relu()
        return self.head(global_mean_pool(x, graphs.batch))


model = Net


def batch(size):
    ring = torch.arange(8)
    edges = torch.stack([ring, ring.roll(1)])
    return Batch.from_data_list(
        [Data(x=torch.randn(8, 8), edge_index=edges, y=torch.tensor([at % 3])) for at in range(size)]
    )


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch), batch.y)


def size(batch):
    return batch.num_graphs


def split(batch, sizes):
    graphs = iter(batch.to_data_list())
    return [Batch.from_data_list([next(graphs) for _ in range(size)]) for size in sizes]
