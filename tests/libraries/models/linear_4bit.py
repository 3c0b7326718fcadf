"""Layers of 4-bit weights from bitsandbytes, put into a model by hand, below a head that trains."""

import bitsandbytes as bnb
import torch
from torch import nn


def model():
    four_bits = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    layers = [bnb.nn.Linear4bit(256, 512, **four_bits), nn.GELU(), bnb.nn.Linear4bit(512, 256, **four_bits)]
    for layer in layers[::2]:
        layer.bias.requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(256, 10))


def batch(size):
    return torch.randn(size, 256), torch.randint(0, 10, (size,))


criterion = nn.CrossEntropyLoss()
