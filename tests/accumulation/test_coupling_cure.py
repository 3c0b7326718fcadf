"""Where coupling is found, the mode for it is tried on copies, and the warning says whether it cures."""

from __future__ import annotations

from typing import Any

import coupled_models as small
import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.accumulation.coupling import COMPARES_SAMPLES, Coupling
from autoaccum.accumulation.coupling_probe import probe_model, probe_workload
from autoaccum.devices.inspection import inspect_workload
from autoaccum.workload.objective import resolve_objective
from autoaccum.workload.spec import Workload


def similar(outputs: Tensor, targets: Tensor) -> Tensor:
    table = functional.normalize(outputs) @ functional.normalize(targets).T
    return functional.cross_entropy(5 * table, torch.arange(len(table)))


def similar_outputs(model: nn.Module, batch: Any) -> Tensor:
    return similar(model(batch[0]), batch[1])


def called_twice(model: nn.Module, batch: Any) -> Tensor:
    return similar(model(batch[0]), model(batch[0].flip(1)))


class AllPairs(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = super().forward(inputs)
        return hidden @ hidden.T


def split(batch: Any, sizes: list[int]) -> list[Any]:
    return list(zip(*(part.split(sizes) for part in batch), strict=True))


SPLIT_BY_ITSELF = {"split": split, "size": lambda batch: len(batch[0])}
"""Batches that cannot be joined again, as of graphs."""


def normed(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(small.WIDTH, 8), nn.BatchNorm1d(8), *more, nn.Linear(8, 3))


def said(**fields: Any) -> tuple[str, ...]:
    return inspect_workload(Workload(**{"batch": small.rows} | fields), share=8).accumulation_warnings


def found(**fields: Any) -> Coupling:
    return probe_workload(Workload(**{"batch": small.rows} | fields), small.mlp())


@pytest.mark.parametrize(
    ("fields", "modes"),
    [
        ({"model": lambda: normed(nn.Dropout()), "loss": small.mean_square}, 'batchnorm="exact"'),
        ({"model": small.mlp, "loss": similar_outputs}, "coupled=True (with outputs and coupled_loss)"),
        ({"model": normed, "criterion": similar, "batchnorm": "exact"}, "coupled=True"),
        ({"model": normed, "criterion": similar, "coupled": True}, 'batchnorm="exact"'),
        ({"model": normed, "loss": small.mean_square, "multiple_of": 2}, 'batchnorm="exact"'),
        ({"model": normed, "criterion": similar, **SPLIT_BY_ITSELF}, 'batchnorm="exact" with coupled=True'),
    ],
)
def test_the_modes_that_give_the_full_batch_s_gradient_are_named_as_proved(fields: Any, modes: str) -> None:
    cure = found(**fields).cure
    assert cure is not None
    assert (cure.modes, cure.proved, cure.failure) == (modes, True, None)
    assert cure.error is not None
    assert cure.error < 1e-13
    for sentence in said(**fields):
        assert f"the gradient is not the full batch's; {modes} gives that, proved here to " in sentence


def test_rounding_within_a_loss_leaves_a_proof_in_float32() -> None:
    def narrow(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]).float(), batch[1].float())

    cure = found(model=normed, loss=narrow).cure
    assert cure is not None
    assert cure.proved
    assert 1e-9 < (cure.error or 0.0) < 1e-5


def test_a_mode_that_leaves_a_difference_is_not_named_as_a_cure() -> None:
    normalised, centred = said(model=lambda: normed(small.Normaliser()), loss=small.mean_square)
    assert '; batchnorm="exact" does not give that here (' in normalised
    assert normalised.endswith(" off), and `autoaccum verify` looks for the reason")
    assert "proved" not in normalised
    assert centred.startswith("the output of module 2 for a sample depends on the others")


def test_a_mode_that_does_not_run_is_not_named_as_a_cure() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, torch.arange(len(outputs)))

    (compared,) = said(model=lambda: AllPairs(small.WIDTH, 4), criterion=own)
    assert "coupled=True does not run here (the outputs of two parts of the batch cannot be joined)" in compared


def test_what_was_not_tried_is_named_without_a_proof() -> None:
    assert found(model=small.mlp, loss=called_twice).cure is None  # Only the user can take it apart.
    (mixed,) = said(model=small.mlp, loss=called_twice)
    assert "coupled=True (with a criterion, or with outputs and coupled_loss)" in mixed
    assert Coupling(pairs=("head",)).warnings() == (COMPARES_SAMPLES,)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_known_criterion_is_told_of_shapes_first() -> None:
    fields = {"model": lambda: nn.Linear(small.WIDTH, 1), "batch": lambda n: (small.rows(n)[0], torch.randn(n))}
    (mixed,) = said(criterion=nn.MSELoss(), **fields)
    assert "else give outputs and targets the same shape" in mixed


@pytest.mark.parametrize(
    "fields",
    [
        {"model": small.mlp, "loss": small.mean_square},
        {"model": small.Centring, "loss": small.mean_square},  # No mode is for it.
        {"model": normed, "loss": small.mean_square, "batchnorm": "frozen"},
        {"model": normed, "criterion": similar, "batchnorm": "exact", "coupled": True},
    ],
)
def test_nothing_is_tried_where_there_is_nothing_to_set(fields: Any) -> None:
    assert found(**fields).cure is None


def test_a_live_model_and_its_criterion_are_left_as_they_were() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return functional.mse_loss(self.norm(outputs), targets)

    model, criterion, batch = normed(), Normalised(), small.rows(4)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
    before = state_digest(nn.ModuleList([model, criterion]), optimizer)
    cure = probe_model(model, resolve_objective(criterion=criterion), batch, "micro").cure
    assert cure is not None
    assert cure.proved
    assert 'batchnorm="exact"' in cure.modes
    assert state_digest(nn.ModuleList([model, criterion]), optimizer) == before
    assert all(one.grad is None for one in (*model.parameters(), *criterion.parameters()))
