"""Parameters of half precision, tied or recomputed: gradients are summed in float32, and no hooks are left."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from small_training import CRITERION, batch_of, net, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.changes import state_digest
from autoaccum.accumulation.gradients import HALF_DTYPES
from autoaccum.accumulation.update import TemporariesRecorder


def gradient_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.double() for p in model.parameters() if p.grad is not None)
    )
    return seen


def relative_error(mine: list[Tensor], theirs: list[Tensor]) -> float:
    flat, wanted = (torch.cat([gradient.flatten().double() for gradient in side]) for side in (mine, theirs))
    return float((flat - wanted).norm() / wanted.norm())


def test_half_precision_gradients_are_summed_in_float32() -> None:
    count = 1024
    model = nn.Linear(16, 4).bfloat16()
    exact = copy.deepcopy(model).double()
    x, y = torch.randn(count, 16).bfloat16() + 1, torch.randn(count, 4).bfloat16()
    optimizer = sgd(model, 0.0)
    mine = gradient_of(model, optimizer)
    Accumulator(model, optimizer, nn.MSELoss(), micro_batch=1).step((x, y))
    torch.autograd.backward(nn.functional.mse_loss(exact(x.double()), y.double()))
    naive = copy.deepcopy(model)
    for row in range(count):
        torch.autograd.backward(nn.functional.mse_loss(naive(x[row : row + 1]), y[row : row + 1]) / count)
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    lost = [p.grad for p in naive.parameters() if p.grad is not None]
    assert relative_error(mine, wanted) < 4e-3 < 1e-2 < relative_error(lost, wanted)


def test_a_share_is_not_rounded_to_half_precision() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = sgd(model, 0.0)
    accumulator = Accumulator(model, optimizer, lambda m, b: m(b).mean(), micro_batch=1, clip_norm=math.inf)
    result = accumulator.step(torch.ones(49, 1, dtype=torch.bfloat16))
    assert result.grad_norm == pytest.approx(1.0, abs=1e-6)


class Tied(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer = nn.Linear(5, 5)
        self.twin = nn.Linear(5, 5)
        self.twin.weight = self.layer.weight
        self.out = nn.Linear(5, 3)

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
    x, y = batch_of(8, dtype)
    x.requires_grad_(use_reentrant is True)  # the reentrant kind needs an input that requires a gradient
    optimizer = sgd(model, 0.0)
    mine = gradient_of(model, optimizer)
    Accumulator(model, optimizer, CRITERION, micro_batch=2).step((x, y))
    torch.autograd.backward(CRITERION(exact(x.detach().double()), y))
    wanted = [p.grad for p in exact.parameters() if p.grad is not None]
    assert len(mine) == len(wanted)
    assert relative_error(mine, wanted) < (2e-2 if dtype in HALF_DTYPES else 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_hooks_are_left(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = sgd(model, 0.0)
    batch, bad = batch_of(8, dtype), (torch.randn(8, 5, dtype=dtype), torch.full((8,), 9))
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=3)
    before = state_digest(model, optimizer)
    accumulator.step(batch)
    assert state_digest(model, optimizer) == before
    with pytest.raises(IndexError):
        accumulator.step(bad)
    assert state_digest(model, optimizer) == before


def test_half_precision_buffers_are_not_needed_for_one_part() -> None:
    model = nn.Linear(64, 64).bfloat16()
    optimizer = sgd(model, 0.0)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8)
    x = torch.randn(8, 64).bfloat16()
    accumulator.step((x, x))
    with TemporariesRecorder() as recorder:
        accumulator.step((x, x))
    assert max(size for _, size in recorder.largest_set()) < 4 * 64 * 64
