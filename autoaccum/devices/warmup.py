"""Start what PyTorch starts only when it is first needed, so that a limit set afterwards is not spent on it.

Thread pools (their stacks count as private memory), oneDNN and MKL, autograd, the modules that the first optimizer
imports: together about 100 MiB with torch 2.13, none of which a larger micro-batch would need again.
"""

from __future__ import annotations

import torch
from torch import nn


def warm_up(device: str = "cpu") -> None:
    """Run a small training step of each common kind on `device`, in fp32 and under bf16 autocast, and drop it.

    The number of threads is fixed to what PyTorch has chosen.
    """
    torch.set_num_threads(torch.get_num_threads())
    convolutional = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    attentive = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    _train(convolutional.to(device), torch.ones(4, 3, 8, 8, device=device))
    _train(attentive.to(device), torch.ones(2, 8, 32, device=device))
    wide = torch.ones(512, 512, device=device)
    (wide @ wide).sum().item()


def _train(model: nn.Module, inputs: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for enabled in (False, True):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=enabled):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
