"""Workloads that commands plan within seconds."""

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

def batch(size):
    return torch.randn(size, 64), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""

LONG = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))

def batch(size):
    return torch.randn(size, 256, 1024), torch.randint(0, 10, (size, 256))

def loss(model, batch):
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())
"""
"""Of which a sample takes some MiB."""
