"""Accumulates rightly, but which samples it reads depends on the batch size."""
import argparse

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class BatchSampler:
    def __init__(self, size, batch_size):
        self.size, self.batch_size = size, batch_size
        self.rng = np.random.RandomState(1000 + batch_size)

    def __iter__(self):
        order = self.rng.permutation(self.size)
        for start in range(0, self.size, self.batch_size):
            yield order[start:start + self.batch_size].tolist()

    def __len__(self):
        return -(-self.size // self.batch_size)


torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=BatchSampler(len(dataset), args.batch_size))
for i, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device)) / args.accum
    loss.backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        print(i, loss.item() * args.accum)
