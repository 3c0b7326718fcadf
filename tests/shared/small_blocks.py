"""Residual blocks that savers recompute, and a workload file of them: each keeps `length * hidden` numbers a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two linear layers beside a skip connection; takes and returns (samples, width)."""

    def __init__(self, width: int = 6, *, norm: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = norm or nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.as_tensor(x + scale * self.drop(self.down(torch.tanh(self.up(self.norm(x))))))


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
