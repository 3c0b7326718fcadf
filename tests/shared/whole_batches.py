"""Compare one update in parts that need the whole batch with the full batch's backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.accumulation.accumulator import Accumulator, StepResult


class Recorded:
    """An update of a copy of `model`; `gradients` has those at the optimizer's step, by name."""

    def __init__(self, model: nn.Module, loss: Any = None, **options: Any) -> None:
        self.model: Any = copy.deepcopy(model)
        self.gradients: dict[str, Tensor] = {}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(self._record)
        self.accumulator = Accumulator(self.model, optimizer, loss, **options)

    def step(self, batch: Any) -> StepResult:
        return self.accumulator.step(batch)

    def _record(self, *_: object) -> None:
        self.gradients = {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}


def check_equal(
    recorded: Recorded, model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, tolerance: float = 1e-9
) -> None:
    """Assert that gradients and buffers of a recorded update are those of `loss(model, batch)` and its backward."""
    whole = copy.deepcopy(model)
    loss(whole, batch).backward()  # type: ignore[no-untyped-call]
    expected = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    # A part without weight, or a frozen parameter, may have a gradient of zeros in place of none.
    for name, gradient in recorded.gradients.items():
        zeros = torch.zeros_like(gradient)
        torch.testing.assert_close(gradient, expected.pop(name, zeros), rtol=0, atol=tolerance, msg=name)
    assert not any(gradient.abs().max() > tolerance for gradient in expected.values()), list(expected)
    check_buffers(recorded.model, whole, min(tolerance, 1e-12) if tolerance < 1e-6 else tolerance)


def check_buffers(mine: nn.Module, theirs: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, one), other in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=name)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def images(size: int, *, side: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, side, side, dtype=torch.float64), torch.randint(0, 5, (size,))


def rows(samples: int) -> Any:
    """Return rows of six numbers in five classes."""
    return torch.randn(samples, 6).double(), torch.arange(samples) % 5


class Pairs(nn.Module):
    """A criterion of all pairs, with a running mean."""

    center: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(width).double())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        z = functional.normalize(outputs)
        self.center.lerp_(z.detach().mean(0), 0.5)
        return functional.mse_loss((z - self.center) @ z.T, (targets[:, None] == targets).to(z.dtype))
