"""AdamW of bitsandbytes, whose two states take one byte for each number and four for each 256."""

import bitsandbytes as bnb
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.GELU(), nn.Linear(256, 10))


def batch(size):
    return torch.randn(size, 256), torch.randint(0, 10, (size,))


def optimizer(params):
    return bnb.optim.AdamW8bit(params, lr=1e-3)


criterion = nn.CrossEntropyLoss()
