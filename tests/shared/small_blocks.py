"""A workload file of equal residual blocks; savers recompute what a sample keeps in each, `length * hidden` numbers."""

from __future__ import annotations

_SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({width}, {hidden}), nn.Linear({hidden}, {width})

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range({count})))

def batch(size):
    return torch.randn(size, {length}, {width})

def loss(model, batch):
    return model(batch).square().mean()
"""


def blocks_source(count: int, *, hidden: int, length: int, width: int = 64) -> str:
    """Return the source of a workload with `count` blocks."""
    return _SOURCE.format(count=count, hidden=hidden, length=length, width=width)
