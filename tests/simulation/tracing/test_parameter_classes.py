"""Weights that a class of parameters packs when they are moved, as bitsandbytes does: their bytes on the card."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode


class Packed(nn.Parameter):
    """Two numbers in a byte, and a scale for each 64, once it is on a device."""

    scales: Tensor | None

    def __new__(cls, data: Tensor) -> Packed:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scales = None
        return made

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if self.scales is not None:
            return super().to(device, *args, **kwargs)
        moved = self.data.to(device)
        self.scales = moved.view(-1, 64).abs().amax(1)
        self.data = torch.empty(moved.numel() // 2, 1, dtype=torch.uint8, device=device)
        return self


class Layer(nn.Module):
    """A layer of packed weights, made from values of the host or of the card."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.weight: Any = Packed(torch.randn(128, 64, device=device))

    def forward(self, x: Tensor) -> Any:
        return x @ (self.weight.view(torch.int8).float().repeat(2, 1).view(64, 128) * self.weight.scales.sum())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packed_weights_take_their_bytes_and_stay_of_their_class(mode: FakeCudaMode, device: str) -> None:
    layer = Layer(device)
    if device == "cpu":
        layer = layer.to("cuda")
    else:
        layer.weight = layer.weight.to("cuda")
    gc.collect()
    weight: Any = layer.weight
    assert isinstance(weight, Packed)
    assert isinstance(weight, nn.Parameter)
    assert type(weight).__name__ == "Packed"
    assert (str(weight.device), weight.dtype, weight.shape) == ("cuda:0", torch.uint8, (128 * 64 // 2, 1))
    assert mode.recorder.live_bytes == 128 * 64 // 2 + 4 * 128
    x = torch.ones(3, 64, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    del layer, weight, x
    gc.collect()
    assert mode.recorder.live_bytes == 0
