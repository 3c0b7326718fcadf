"""Channels-last models stay channels last through convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.simulation import simulate

CARD = Card(name="a", title="A", total_bytes=2**34, capability=(8, 0), multiprocessors=108, source="a test's own")
LAST = torch.channels_last


@pytest.mark.parametrize(("tensor_last", "weight_last"), [(True, True), (True, False), (False, True), (False, False)])
def test_one_operand_in_channels_last_decides(tensor_last: bool, weight_last: bool) -> None:
    with simulate(CARD):
        tensor, weight = torch.empty(2, 8, 6, 6, device="cuda:0"), torch.empty(4, 8, 3, 3, device="cuda:0")
        tensor = tensor.to(memory_format=LAST) if tensor_last else tensor
        weight = weight.to(memory_format=LAST) if weight_last else weight
        operands = tensor.requires_grad_(), weight.requires_grad_()
        out = F.conv2d(*operands)
        gradients = torch.autograd.grad(out, operands, torch.empty_like(out))
    assert {each.is_contiguous(memory_format=LAST) for each in (out, *gradients)} == {tensor_last or weight_last}


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 4, 1)],
    ids=["depthwise", "transposed", "pointwise"],
)
def test_every_convolution_of_cudnn(layer: nn.Module) -> None:
    with simulate(CARD):
        tensor = torch.empty(2, 8, 6, 6, device="cuda:0").to(memory_format=LAST)
        out = layer.to("cuda")(tensor)
    assert out.is_contiguous(memory_format=LAST)


def test_doubles_and_sequences_are_contiguous() -> None:
    with simulate(CARD):
        double = torch.empty(2, 8, 6, 6, dtype=torch.double, device="cuda:0").to(memory_format=LAST)
        assert F.conv2d(double, double[:, :, :3, :3]).is_contiguous()
        assert nn.Conv1d(8, 4, 3, device="cuda:0")(torch.empty(2, 8, 6, device="cuda:0")).is_contiguous()


def test_nothing_stays_behind() -> None:
    before = torch._C._conv_determine_backend_memory_format
    with simulate(CARD):
        assert torch._C._conv_determine_backend_memory_format is not before
    assert torch._C._conv_determine_backend_memory_format is before
