from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.gradients import GradientBuffers, clip_gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [0.5, 1e9, math.inf])
def test_clips_as_torch_does(dtype: torch.dtype, clip_norm: float) -> None:
    gradients = [torch.randn(7).to(dtype), torch.randn(3, 2).to(dtype)]
    exact = [nn.Parameter(torch.zeros_like(gradient, dtype=torch.float64)) for gradient in gradients]
    for parameter, gradient in zip(exact, gradients, strict=True):
        parameter.grad = gradient.double().clone()
    expected = torch.nn.utils.clip_grad_norm_(exact, min(clip_norm, 1e12))
    norm = clip_gradients(gradients, clip_norm)
    assert norm.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    for parameter, gradient in zip(exact, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(
            gradient.double(), parameter.grad, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0
        )


def test_mixed_precisions_have_one_norm() -> None:
    gradients = [torch.full((4,), 3.0, dtype=torch.bfloat16), torch.full((4,), 4.0), torch.zeros(2).double()]
    assert float(clip_gradients(gradients, 5.0)) == pytest.approx(10.0)
    assert float(gradients[0][0]) == pytest.approx(1.5)
    assert float(gradients[1][0]) == pytest.approx(2.0)


def test_an_infinite_gradient_is_measured_and_left() -> None:
    gradient = torch.tensor([1.0, math.inf])
    assert math.isinf(clip_gradients([gradient], math.inf))
    assert float(gradient[0]) == 1.0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_of_sparse_gradients(dtype: torch.dtype) -> None:
    layer = nn.Embedding(10, 2, sparse=True).to(dtype)
    with GradientBuffers([layer.weight]) as buffers:
        buffers.share = 0.5
        for tokens in ([1, 1, 2], [2, 9]):
            torch.autograd.backward(layer(torch.tensor(tokens)).sum())
    assert layer.weight.grad is None
    (values,) = buffers.values()
    assert values.dtype == torch.float32
    values.mul_(2)
    buffers.settle()
    gradient = layer.weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.dtype is dtype
    assert gradient.to_dense()[:, 0].tolist() == [0, 2, 2, 0, 0, 0, 0, 0, 0, 1]


def test_buffers_let_go_as_they_settle() -> None:
    layer = nn.Linear(2, 2).bfloat16()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with GradientBuffers([*layer.parameters(), frozen]) as buffers:
        for _ in range(3):
            torch.autograd.backward(layer(torch.ones(1, 2).bfloat16()).sum())
    torch.autograd.backward(layer(torch.ones(1, 2).bfloat16()).sum())
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [1.0, 1.0], "outside, gradients go where autograd puts them"
    assert [value.dtype for value in buffers.values()] == [torch.float32] * 2
    buffers.settle()
    assert buffers.values() == []
    assert layer.bias.grad.tolist() == [3.0, 3.0]
