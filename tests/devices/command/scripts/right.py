"""Accumulates rightly, with dropout."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(2048, 64), torch.randint(10, (2048,)))
model = nn.Sequential(
    nn.Linear(64, args.width), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(args.width, args.width), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(args.width, 10),
).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(args.epochs):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)):
        loss = nn.functional.cross_entropy(model(x.to(args.device)), y.to(args.device))
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch} update {(i + 1) // args.accum} loss {loss.item():.4f}")
