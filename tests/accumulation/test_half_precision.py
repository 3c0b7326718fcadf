"""Gradients: clipped, summed in float32 or in their own dtype, of half precision, sparse or tied."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from factories import CRITERION, labelled_rows, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.gradients import HALF_DTYPES, GradientBuffers, clip_gradients
from autoaccum.accumulation.step_result import AccumulationWarning


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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_buffers_of_sparse_gradients(dtype: torch.dtype) -> None:
    layer = nn.Embedding(10, 2, sparse=True).to(dtype)
    with GradientBuffers([layer.weight]) as buffers:
        buffers.factor = 0.5
        for tokens in ([1, 1, 2], [2, 9]):
            torch.autograd.backward(layer(torch.tensor(tokens)).sum())
    assert layer.weight.grad is None
    (values,) = buffers.values()
    assert values.dtype == torch.float32
    values.mul_(2)
    buffers.write_gradients()
    gradient = layer.weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.dtype is dtype
    assert gradient.to_dense()[:, 0].tolist() == [0, 2, 2, 0, 0, 0, 0, 0, 0, 1]


def test_buffers_are_freed_as_gradients_are_written() -> None:
    layer = nn.Linear(2, 2).bfloat16()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with GradientBuffers([*layer.parameters(), frozen]) as buffers:
        for _ in range(3):
            torch.autograd.backward(layer(torch.ones(1, 2).bfloat16()).sum())
    torch.autograd.backward(layer(torch.ones(1, 2).bfloat16()).sum())
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [1.0, 1.0], "outside, gradients go where autograd puts them"
    assert [value.dtype for value in buffers.values()] == [torch.float32] * 2
    buffers.write_gradients()
    assert buffers.values() == []
    assert layer.bias.grad.tolist() == [3.0, 3.0]


def gradient_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.double() for p in model.parameters() if p.grad is not None)
    )
    return seen


def relative_error(mine: list[Tensor], theirs: list[Tensor]) -> float:
    flat, wanted = (torch.cat([gradient.flatten().double() for gradient in side]) for side in (mine, theirs))
    return float((flat - wanted).norm() / wanted.norm())


def test_a_factor_is_not_rounded_to_half_precision() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = sgd(model, 0.0)
    accumulator = Accumulator(model, optimizer, lambda m, b: m(b).mean(), micro_batch=1, clip_norm=math.inf)
    result = accumulator.step(torch.ones(49, 1, dtype=torch.bfloat16))
    assert result.grad_norm == pytest.approx(1.0, abs=1e-6)


def test_a_part_in_which_one_of_two_terms_counts_nothing() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = sgd(model, 0.0)
    accumulator = Accumulator(
        model,
        optimizer,
        lambda m, b: {"all": m(b).mean(), "above one": m(b[b > 1.5, None]).mean()},
        weight=lambda b: {"all": len(b), "above one": int((b > 1.5).sum())},
        micro_batch=1,
        clip_norm=math.inf,
    )
    batch = torch.tensor([[1.0], [1.0], [2.0]], dtype=torch.bfloat16)
    assert accumulator.step(batch).grad_norm == pytest.approx(4 / 3 + 2, rel=4e-3)


class Tied(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer = nn.Linear(6, 6)
        self.twin = nn.Linear(6, 6)
        self.twin.weight = self.layer.weight
        self.out = nn.Linear(6, 4)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twin(torch.tanh(self.layer(x))))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.use_reentrant is None:
                x = self.block(x)
            else:
                x = torch.as_tensor(checkpoint(self.block, x, use_reentrant=self.use_reentrant))
        return torch.as_tensor(self.out(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_tied_weights_and_checkpoints(dtype: torch.dtype, use_reentrant: bool | None) -> None:
    model = Tied(use_reentrant).to(dtype)
    exact = copy.deepcopy(model).double()
    exact.use_reentrant = None
    x, y = labelled_rows(8, dtype)
    x.requires_grad_(use_reentrant is True)  # the reentrant kind needs an input that requires a gradient
    optimizer = sgd(model, 0.0)
    mine = gradient_of(model, optimizer)
    Accumulator(model, optimizer, CRITERION, micro_batch=2).step((x, y))
    torch.autograd.backward(CRITERION(exact(x.detach().double()), y))
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    assert len(mine) == len(wanted)
    assert relative_error(mine, wanted) < (2e-2 if dtype in HALF_DTYPES else 1e-10)


ROUNDED = "gradients are summed in bfloat16, as accumulate_in=.parameters. asks: .* only to that"


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 64).to(dtype)


def half_batch(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (size, 64)
    return torch.randn(shape, generator=draw).bfloat16(), torch.randn(shape, generator=draw).bfloat16()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1].float())


def gradient(accumulate_in: Any, parts: int = 256) -> Tensor:
    model = linear()
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(next(model.parameters()).grad.double()))  # type: ignore[union-attr]
    Accumulator(model, optimizer, loss, micro_batch=1, accumulate_in=accumulate_in).step(half_batch(parts))
    return seen[0]


def test_sums_in_float32_are_closer_and_sums_in_bf16_raise_a_warning() -> None:
    model = linear().double()
    x, y = half_batch(256)
    torch.autograd.backward(nn.functional.mse_loss(model(x.double()), y.double()))
    true = next(model.parameters()).grad
    assert true is not None
    with pytest.warns(AccumulationWarning, match=ROUNDED):
        half = gradient("parameters")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide = gradient("fp32")
        assert torch.equal(wide, gradient(None))
        gradient("parameters", parts=1)  # Nothing is summed.
    off = [float((found - true).norm() / true.norm()) for found in (wide, half)]
    assert off[0] < 0.005 < off[1] < 0.1
