"""Tolerances: no false alarm from an optimizer's rounding, and no mistake that counts as rounding."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.errors import NotMeasuredError
from autoaccum.verification.update_comparison import Tolerances, compare, find_tolerances, with_update
from autoaccum.verification.update_run import UNCHANGED, Ablation, UpdateResult

TARGETS = torch.arange(16) % 3
INPUTS = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class PairedRuns:
    """One batch of a small model whose first bias, in front of a BatchNorm, has a gradient of zero."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float64) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.model, self.make, self.dtype = model.to(dtype), make, dtype
        self.before = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        loss: Any = nn.functional.cross_entropy(self.model(INPUTS.to(dtype)), TARGETS)
        loss.backward()
        gradients = {
            name: None if tensor.grad is None else tensor.grad.clone() for name, tensor in self.model.named_parameters()
        }
        self.outcome = UpdateResult(
            loss=loss.item(),
            terms={"loss": loss.item()},
            connected=frozenset({"loss"}),
            gradients=gradients,
            buffers={},
            parameters=self.update_from(gradients),
        )

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.make(self.model.parameters()).step()
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def with_gradients(self, gradients: Mapping[str, Tensor | None]) -> UpdateResult:
        return dataclasses.replace(self.outcome, gradients=gradients, parameters=self.update_from(gradients))


class Signs(torch.optim.Optimizer):
    """Step by the sign of the gradient, like Lion's first update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad.sign()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "Signs": Signs,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rounding_is_no_fault_of_the_update(name: str) -> None:
    runs = PairedRuns(OPTIMIZERS[name])
    noise = torch.Generator().manual_seed(2)
    rounded = {
        key: tensor if tensor is None else tensor + 1e-16 * torch.randn(tensor.shape, generator=noise)
        for key, tensor in runs.outcome.gradients.items()
    }
    tolerances = with_update(find_tolerances(runs, precision="fp64", samples=16), runs)
    differences = compare(runs.outcome, runs.with_gradients(rounded), tolerances)
    assert all(difference.equal for difference in differences), differences


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_off_is_seen(name: str) -> None:
    runs = PairedRuns(OPTIMIZERS[name])
    wrong = {key: tensor if tensor is None else tensor * 0.25 for key, tensor in runs.outcome.gradients.items()}
    tolerances = with_update(find_tolerances(runs, precision="fp64", samples=16), runs)
    _, gradients, _, update = compare(runs.outcome, runs.with_gradients(wrong), tolerances)
    assert not gradients.equal
    assert gradients.error == pytest.approx(0.75)
    if name in ("SGD", "momentum"):
        assert not update.equal
        assert update.error > 1e3 * update.tolerance


def test_a_parameter_without_a_gradient_that_decays_is_seen_in_the_update() -> None:
    runs = PairedRuns(OPTIMIZERS["momentum"])
    gradients = {**runs.outcome.gradients, "0.weight": None}
    runs.outcome = runs.with_gradients(gradients)
    zeros = {**gradients, "0.weight": torch.zeros(8, 5, dtype=torch.float64)}
    tolerances = with_update(find_tolerances(runs, precision="fp64", samples=16), runs)
    _, gradient, _, update = compare(runs.outcome, runs.with_gradients(zeros), tolerances)
    assert gradient.equal
    assert not update.equal
    assert update.where == "0.weight"


def test_without_float64_errors_grow_as_those_of_sums_do() -> None:
    runs = PairedRuns(OPTIMIZERS["SGD"], torch.float32)
    tolerances = find_tolerances(runs, precision="bf16", samples=16)
    assert tolerances.relative == 8 * 2.0**-8 * 4
    assert "float64 does not run" in tolerances.rounding


def test_a_precision_that_shows_nothing_is_refused() -> None:
    runs, double = PairedRuns(OPTIMIZERS["SGD"], torch.float32), PairedRuns(OPTIMIZERS["SGD"])
    runs.outcome = dataclasses.replace(
        runs.outcome,
        gradients={key: tensor * 2 for key, tensor in runs.outcome.gradients.items() if tensor is not None},
    )
    with pytest.raises(NotMeasuredError, match="100% off that in float64.*verify with --precision fp64"):
        find_tolerances(runs, precision="fp16", samples=4, float64_runs=double)


def test_sparse_gradients_stay_sparse() -> None:
    class Table:
        rows = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        gradient = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64).to_sparse(1)

        def full(self, ablation: Ablation = UNCHANGED) -> UpdateResult:
            named: dict[str, Tensor | None] = {"rows": self.gradient}
            return UpdateResult(0.0, {}, frozenset(), named, {}, self.update_from(named))

        def initial(self) -> Mapping[str, Tensor]:
            return {"rows": self.rows.detach()}

        def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
            parameter = nn.Parameter(self.rows.detach().clone())
            parameter.grad = gradients["rows"]
            assert parameter.grad is not None
            assert parameter.grad.is_sparse
            optimizer: Any = torch.optim.SparseAdam([parameter], lr=0.1)
            optimizer.step()
            return {"rows": parameter.detach()}

    allowed = with_update(Tolerances(relative=1e-10), Table()).update["rows"]
    assert allowed[1].max() > 0
    assert allowed[0].max() == pytest.approx(1e-10 * 0.1, rel=1e-3)  # what is left alone moves by rounding only


def test_errors_of_an_update_are_relative_to_how_far_it_moves() -> None:
    runs = PairedRuns(OPTIMIZERS["AdamW"])
    tolerances = with_update(find_tolerances(runs, precision="fp64", samples=16), runs)
    assert tolerances.largest_move == pytest.approx(0.1, rel=1e-2)
    assert runs.outcome.parameters["3.bias"].shape == (3,)
    off = {**runs.outcome.parameters, "3.bias": runs.outcome.parameters["3.bias"] + 0.001}
    update = compare(runs.outcome, dataclasses.replace(runs.outcome, parameters=off), tolerances)[3]
    assert (update.where, update.equal) == ("3.bias", False)
    assert update.error == pytest.approx(0.01, rel=2e-2)
    assert 1e-10 <= update.tolerance < 1e-8
