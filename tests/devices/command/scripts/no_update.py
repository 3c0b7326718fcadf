"""Looks like training, but the optimizer never makes an update: there are fewer batches than an update needs."""
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

model = torch.nn.Linear(64, 10).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
num_batches = args.accum  # the last batch is dropped
for step in range(num_batches):
    loss = model(torch.randn(args.batch_size, 64, device=device)).square().mean() / args.accum
    loss.backward()
    if (step + 1) % (args.accum + 1) == 0:
        optimizer.step()
        optimizer.zero_grad()
print(f"done: loss {loss.item():.4f}")
