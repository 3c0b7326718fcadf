"""Workloads that commands plan within seconds."""

from itertools import pairwise


def layers_file(*widths: int | str, classes: bool = False) -> str:
    """A workload of linear layers of these widths, with ReLU between them, for rows of numbers or `classes`."""
    layers = ", nn.ReLU(), ".join(f"nn.Linear({before}, {after})" for before, after in pairwise(widths))
    targets = f"torch.randint(0, {widths[-1]}, (size,))" if classes else f"torch.randn(size, {widths[-1]})"
    return f"""
import torch
from torch import nn

def model():
    return nn.Sequential({layers})

def batch(size):
    return torch.randn(size, {widths[0]}), {targets}

criterion = nn.{"CrossEntropy" if classes else "MSE"}Loss()
"""


MODEL = layers_file(64, 256, 10, classes=True)

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
