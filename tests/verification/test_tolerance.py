"""Tolerances: no false alarm from an optimizer's rounding, and no mistake that counts as rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.verification.update_comparison import (
    Tolerances,
    compare,
    find_tolerances,
    with_move,
    with_optimizer_spread,
)
from autoaccum.verification.update_run import UNCHANGED, Ablation, UpdateResult
from autoaccum.verification.verification_result import Difference

TARGETS = torch.arange(16) % 3
INPUTS = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class PairedRuns:
    """One batch of a small model whose first bias, in front of a BatchNorm, has a gradient of zero."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.model, self.make = model.double(), make
        self.before = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        loss: Any = nn.functional.cross_entropy(self.model(INPUTS), TARGETS)
        loss.backward()
        gradients: dict[str, Tensor | None] = {
            name: None if tensor.grad is None else tensor.grad.clone() for name, tensor in self.model.named_parameters()
        }
        parameters = self.update_from(gradients)
        self.outcome = UpdateResult(loss.item(), {"loss": loss.item()}, gradients, {}, parameters)

    def full(self, ablation: Ablation = UNCHANGED) -> UpdateResult:
        return self.outcome

    def initial(self) -> Mapping[str, Tensor]:
        return self.before

    def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.before[name])
                parameter.grad = gradients[name]
        self.make(self.model.parameters()).step()
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def with_gradients(self, gradients: Mapping[str, Tensor | None]) -> UpdateResult:
        return dataclasses.replace(self.outcome, gradients=gradients, parameters=self.update_from(gradients))

    def compared(self, other: UpdateResult) -> tuple[Difference, ...]:
        runs: Any = self
        tolerances = with_move(find_tolerances("fp64", []), runs)
        return compare(self.outcome, other, with_optimizer_spread(tolerances, runs, other))


class Signs(torch.optim.Optimizer):
    """Step by the sign of the gradient, like Lion's first update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad.sign()


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.parametrize("make", [momentum, adamw, torch.optim.Rprop, Signs])
def test_rounding_is_no_fault_of_the_update(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    runs, noise = PairedRuns(make), torch.Generator().manual_seed(2)
    rounded: dict[str, Tensor | None] = {
        name: None if one is None else one + 1e-16 * torch.randn(one.shape, generator=noise)
        for name, one in runs.outcome.gradients.items()
    }
    assert all(difference.equal for difference in runs.compared(runs.with_gradients(rounded)))


def test_a_gradient_that_is_off_is_seen() -> None:
    runs = PairedRuns(adamw)
    wrong = {name: None if one is None else 0.25 * one for name, one in runs.outcome.gradients.items()}
    gradients = runs.compared(runs.with_gradients(wrong))[1]
    assert not gradients.equal
    assert gradients.error == pytest.approx(0.75)
    assert gradients.first == "0.weight"


def test_a_parameter_without_a_gradient_that_decays_is_seen_in_the_update() -> None:
    runs = PairedRuns(momentum)
    gradients = {**runs.outcome.gradients, "0.weight": None}
    runs.outcome = runs.with_gradients(gradients)
    zeros = {**gradients, "0.weight": torch.zeros(8, 5, dtype=torch.float64)}
    _, gradient, _, update = runs.compared(runs.with_gradients(zeros))
    assert gradient.equal
    assert (update.equal, update.where) == (False, "0.weight")


def test_errors_of_an_update_are_relative_to_how_far_it_moves() -> None:
    runs: Any = PairedRuns(adamw)
    assert with_move(Tolerances(relative=1e-10), runs).largest_move == pytest.approx(0.1, rel=1e-2)
    off = {**runs.outcome.parameters, "3.bias": runs.outcome.parameters["3.bias"] + 0.001}
    update = runs.compared(dataclasses.replace(runs.outcome, parameters=off))[3]
    assert (update.where, update.equal) == ("3.bias", False)
    assert update.error == pytest.approx(0.01, rel=2e-2)
    assert 1e-10 <= update.tolerance < 1e-8
