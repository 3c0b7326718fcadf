"""A loss that uses another model than it is given leaves no gradient in that: refused, wherever one is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum import Accumulator, Workload, verify
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import WorkloadError

REFUSED = "no gradient reaches the model: the loss does not use the model it is given, .*train that module: model ="


def net(dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, dtype=dtype), nn.Tanh(), nn.Linear(3, 2, dtype=dtype))


def batch(size: int) -> Tensor:
    return torch.randn(size, 4)


class Held(nn.Module):
    """A loss module that holds the model, as those of sentence-transformers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.model(x).square().mean())


def workload(loss: Any, model: Any = net) -> Workload:
    return Workload(model=model, batch=batch, loss=loss)


def test_the_first_step_refuses_and_changes_nothing() -> None:
    model, held, made = net(), Held(net()), batch(4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_digest(model, optimizer)
    accumulator = Accumulator(model, optimizer, lambda model, batch: held(batch), micro_batch=2)
    with pytest.raises(WorkloadError, match=REFUSED):
        accumulator.step(made)
    assert state_digest(model, optimizer) == before


def test_plan_and_verify_refuse() -> None:
    model = net()
    held = Held(model)
    made = workload(lambda model, batch: held(batch), model)
    with pytest.raises(WorkloadError, match=REFUSED):
        inspect_workload(made, 8)
    with pytest.raises(WorkloadError, match=REFUSED):
        verify(made)


class Lora(nn.Module):
    """Frozen weights, and an update of which one factor begins at zero, so that the other has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 2).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.zeros(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.base(x) + x @ self.a @ self.b)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch.to(next(model.parameters()).dtype)).square().mean())


def zero(model: nn.Module, batch: Any) -> Tensor:
    return mean(model, batch) * 0


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Lora, mean),
        (lambda: net(torch.bfloat16), mean),
        (net, zero),
        (net, lambda model, batch: model[2](batch[:, :3]).square().mean()),
    ],
    ids=["LoRA", "sums in float32", "zeros", "a head alone"],
)
def test_some_gradient_is_enough_to_train(model: Any, loss: Any) -> None:
    made = model()
    optimizer = torch.optim.SGD([one for one in made.parameters() if one.requires_grad], lr=0.1)
    assert Accumulator(made, optimizer, loss, micro_batch=2).step(batch(4)).updated
    if loss is not zero and made.state_dict()[next(iter(made.state_dict()))].dtype == torch.float32:
        assert verify(workload(loss, model)).equivalent


def test_parameters_that_the_loss_holds_may_be_trained_beside_a_frozen_model() -> None:
    model, head = net().requires_grad_(False), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    accumulator = Accumulator(model, optimizer, lambda model, batch: head(model(batch)).mean(), micro_batch=2)
    assert accumulator.step(batch(4)).updated
