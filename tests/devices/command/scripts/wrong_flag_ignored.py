import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1, help="gradient accumulation steps (TODO)")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
inputs, targets = torch.randn(512, 64), torch.randint(10, (512,))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step, index in enumerate(torch.randperm(512).split(args.batch_size)):
    loss = nn.functional.cross_entropy(model(inputs[index].to(device)), targets[index].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"{step}: {loss.item():.3f}")
