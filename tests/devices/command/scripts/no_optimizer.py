"""Updates its weights by hand, as PyTorch's tutorials do."""
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()

model = torch.nn.Linear(64, 10)
for step in range(100):
    for _ in range(args.accum):
        (model(torch.randn(args.batch_size, 64)).square().mean() / args.accum).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
