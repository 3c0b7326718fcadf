"""8-bit weights of bitsandbytes between layers that train; a threshold for outliers would read values."""

import bitsandbytes as bnb
import torch
from torch import nn


def model():
    eight_bits = bnb.nn.Linear8bitLt(256, 512, has_fp16_weights=False, threshold=0.0)
    eight_bits.bias.requires_grad_(False)
    return nn.Sequential(nn.Linear(256, 256), eight_bits, nn.GELU(), nn.Linear(512, 10))


def batch(size):
    return torch.randn(size, 256), torch.randint(0, 10, (size,))


criterion = nn.CrossEntropyLoss()
