"""Memory that a process takes of a card outside of the allocator.

Each probe takes the device, so that it also runs on the CPU, where figures of the first kind are 0.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.devices.meters import read_card
from autoaccum.devices.nvml import ask_nvml


def measure_context(place: torch.device) -> dict[str, Any]:
    """The context of this process, with nothing loaded into it yet, as NVML and the driver see it."""
    if place.type == "cpu":
        return {}
    torch.zeros(1, device=place)
    card = read_card(place.index)
    nvml = ask_nvml(card.uuid)
    known = card.with_processes(nvml, own_pid=os.getpid())
    return {"nvml": dataclasses.asdict(nvml), **dataclasses.asdict(known)}


def measure_growth(place: torch.device) -> dict[str, Any]:
    """Measure what the first use of each kind of kernel takes outside of the allocator, and leaves in it, in order."""
    image = torch.randn(8, 16, 32, 32, device=place, requires_grad=True)
    convolution = nn.Conv2d(16, 16, 3, padding=1).to(place)
    square = torch.randn(256, 256, device=place, requires_grad=True)
    queries = torch.randn(2, 4, 128, 64, device=place, dtype=torch.bfloat16, requires_grad=True)
    cells = nn.LSTM(64, 64).to(place)
    classes = torch.zeros(256, dtype=torch.long, device=place)
    steps: dict[str, Callable[[], Tensor]] = {
        "pointwise": lambda: square.relu().sum(),
        "product, fp32": lambda: (square @ square).sum(),
        "product, bf16": lambda: (square.bfloat16() @ square.bfloat16()).sum(),
        "reduction": lambda: square.sum(0).square().sum(),
        "convolution": lambda: convolution(image).sum(),
        "attention": lambda: nn.functional.scaled_dot_product_attention(queries, queries, queries).sum(),
        "recurrent": lambda: cells(square.view(4, 256, 64))[0].sum(),
        "softmax": lambda: nn.functional.cross_entropy(square, classes),
        "optimizer": lambda: _update(square),
    }
    grown = {}
    for name, step in steps.items():
        before = held_bytes(place)
        torch.autograd.backward(step())
        square.grad = image.grad = queries.grad = None
        convolution.zero_grad()
        cells.zero_grad()
        outside, inside = (after - held for after, held in zip(held_bytes(place), before, strict=True))
        grown[name] = {"outside_bytes": outside, "left_in_allocator_bytes": inside}
    return grown


def held_bytes(place: torch.device) -> tuple[int, int]:
    """Return what is used outside of this process's allocator, by whomever, and within, once the card has finished."""
    if place.type == "cpu":
        return 0, 0
    torch.cuda.synchronize(place)
    return read_card(place.index).held_outside_bytes, torch.cuda.memory_allocated(place)


def _update(parameter: Tensor) -> Tensor:
    weights = nn.Parameter(torch.zeros_like(parameter))
    optimizer = torch.optim.AdamW([weights])
    torch.autograd.backward(weights.sum())
    optimizer.step()
    return parameter.sum()
