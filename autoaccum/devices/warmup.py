"""Start what PyTorch starts only when it is first needed, so that a limit set afterwards is not spent on it.

Thread pools (their stacks count as private memory), oneDNN and MKL, autograd, the modules that the first optimizer
imports: together about 100 MiB with torch 2.13, none of which a larger micro-batch would need again.
"""

from __future__ import annotations

import torch
from torch import nn

from autoaccum.accumulation.recovery import find_shortage, is_context_dead


def warm_up(device: torch.device | str = "cpu") -> None:
    """Run a small training step of each common kind on `device`, in fp32 and under autocast, and drop it.

    On a card this loads the libraries and kernels of convolutions, attention and products, which take some hundred
    MiB outside of PyTorch's allocator. What a card cannot do is left out: the workload may not need it. The number of
    threads is fixed to what PyTorch has chosen.
    """
    torch.set_num_threads(torch.get_num_threads())
    device = torch.device(device)
    for train in (_train_convolutional, _train_attentive, _multiply):
        try:
            train(device)
        except RuntimeError as error:
            if device.type == "cpu" or find_shortage(error) is not None or is_context_dead(error):
                raise
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _train_convolutional(device: torch.device) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    _train(model.to(device), torch.ones(4, 3, 8, 8, device=device))


def _train_attentive(device: torch.device) -> None:
    _train(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).to(device), torch.ones(2, 8, 32, device=device))


def _multiply(device: torch.device) -> None:
    wide = torch.ones(512, 512, device=device)
    (wide @ wide).sum().item()


def _train(model: nn.Module, inputs: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    lower = torch.bfloat16 if inputs.device.type == "cpu" or torch.cuda.is_bf16_supported(False) else torch.float16
    for enabled in (False, True):
        with torch.autocast(inputs.device.type, lower, enabled=enabled):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
