"""A workload that commands plan within seconds."""

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

def batch(size):
    return torch.randn(size, 64), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""
