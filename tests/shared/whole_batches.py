"""Models and losses that need the whole batch, and updates in parts that are compared with the full batch's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import whole_batch
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


class Experts(nn.Module):
    """A mixture of experts; the balance of its load is a loss of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.Linear(6, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(x).softmax(-1)
        everyone = whole_batch(gates)
        counts = functional.one_hot(everyone.argmax(-1), 4).to(x.dtype).mean(0)
        balance = 4 * (counts * everyone.mean(0)).sum()
        return (self.experts(x).unflatten(-1, (4, 5)) * gates[..., None]).sum(-2), balance


class Failing(nn.Module):
    """Meets at two BatchNorms; `fail` is called with the number of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5)])
        self.fail: Callable[[int], None] = lambda number: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            self.fail(number)
            x = torch.tanh(layer(x))
        return x


def centred(model: nn.Module, batch: Any) -> Tensor:
    """A loss that meets at `whole_batch`, too."""
    outputs = model(batch[0])
    return functional.cross_entropy(outputs - whole_batch(outputs).mean(0), batch[1])


def check_nothing_left(model: nn.Module) -> None:
    """Assert that an update has left no part that waits, and no change of a module or of `whole_batch`."""
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is greenlet and one and one.parent is not None]
    assert not any("forward" in vars(module) for module in model.modules())
    x = torch.ones(1)
    assert whole_batch(x) is x
