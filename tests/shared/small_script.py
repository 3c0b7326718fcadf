"""A small training script with flags, and the words of a command that runs it."""

from __future__ import annotations

import sys
from typing import Final

SCRIPT: Final = """
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    for _ in range(args.accum):
        x = torch.randn(args.batch_size, 256, 64, device=device)
        (model(x).square().mean() / args.accum).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

WORDS: Final = (sys.executable, "train.py", "--batch-size={micro_batch}", "--accum={iter_size}")
"""The command, in the folder of `train.py`."""

LARGEST_BATCH: Final = WORDS[:-1]
"""The same, with one micro-batch in an update."""
