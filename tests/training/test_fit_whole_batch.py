"""Training with exact BatchNorm and coupled losses: every update, and every evaluation, is the full batch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import FEATURES, Classifier
from small_fit import fit as fit_small
from small_fit import of_kind
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.training.fit_events import Evaluated, FitResult

UPDATES, TARGET = 7, 16
X = torch.randn(45, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(45) % 4
LOADED = [(X[begin:end], Y[begin:end]) for begin, end in ((0, 7), (7, 20), (20, 23), (23, 45))]
"""Batches whose bounds are not those of updates; an epoch's last update has 13 samples."""
HELD_OUT = (X[:21].flip(1), Y[:21])


def outputs(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), model(batch[0].flip(1))


def contrast(found: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    table = nn.functional.normalize(found[0]) @ nn.functional.normalize(found[1]).T
    return nn.functional.cross_entropy(4 * table, torch.arange(len(table)))


def spread(found: Tensor, targets: Tensor) -> Tensor:
    """A criterion that normalises by the batch."""
    table = (found - found.mean(0)) / (found.std(0) + 0.1)
    return nn.functional.cross_entropy(table, targets)


def balanced(model: nn.Module, batch: Any) -> Tensor:
    gates = model(batch[0])
    share = autoaccum.whole_batch(gates.softmax(1)).mean(0)
    return nn.functional.cross_entropy(gates, batch[1]) + 4 * (share * share).sum()


CASES: dict[str, dict[str, Any]] = {
    "exact": {"criterion": nn.CrossEntropyLoss(), "batchnorm": "exact"},
    "coupled criterion": {"criterion": spread, "coupled": True, "normed": False},
    "two towers": {"outputs": outputs, "coupled_loss": contrast, "normed": False},
    "whole_batch": {"loss": balanced, "normed": False},
    "coupled and exact": {"outputs": outputs, "coupled_loss": contrast, "batchnorm": "exact"},
}


def start(*, normed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Classifier(norm=normed).double()


def workload(case: str, **more: Any) -> autoaccum.Workload:
    given = {**CASES[case], **more}
    normed = given.pop("normed", True)
    settings = {
        "model": lambda: start(normed=normed),
        "optimizer": optimizer,
        "batch": lambda size: (X[:size], Y[:size]),
    }
    return autoaccum.Workload(**{**settings, **given})


def optimizer(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(case: str, *, steps: int = UPDATES, fields: Any = None, **options: Any) -> tuple[FitResult, list[Evaluated]]:
    """Train the workload of a case, with other `fields`; return the result and the evaluations."""
    given = {"target_batch": TARGET, "micro_batch": 5, "device": "cpu", "steps": steps, **options}
    result, events = fit_small(workload(case, **(fields or {})), LOADED, **given)
    return result, of_kind(Evaluated, events)


def windows() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for begin in range(0, len(X), TARGET):
            yield X[begin : begin + TARGET], Y[begin : begin + TARGET]


def loss_of(case: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if "coupled_loss" in CASES[case]:
        return torch.as_tensor(CASES[case]["coupled_loss"](CASES[case]["outputs"](model, batch), batch))
    if "loss" in CASES[case]:
        return balanced(model, batch)
    return torch.as_tensor(CASES[case]["criterion"](model(batch[0]), batch[1]))


def full_batch(case: str) -> nn.Module:
    model = start(normed=CASES[case].get("normed", True))
    steps = optimizer(model.parameters())
    for _, batch in zip(range(UPDATES), windows(), strict=False):
        steps.zero_grad()
        loss_of(case, model, batch).backward()  # type: ignore[no-untyped-call]
        steps.step()
    return model


def assert_same(one: nn.Module, other: nn.Module, tolerance: float) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_the_full_batch(case: str) -> None:
    """Of windows that are cut from a loader's batches, and of a last one that is shorter; and nothing is warned of."""
    done, _ = fit(case)
    assert_same(done.model, full_batch(case), 1e-9)
    assert done.warnings == ()


@pytest.mark.parametrize("case", ["exact", "two towers"])
def test_a_resumed_run_is_the_same_and_another_mode_is_refused(case: str, tmp_path: Path) -> None:
    fit(case, steps=4, run_dir=tmp_path)
    other = not CASES[case].get("coupled_loss")
    for option, value in (("batchnorm", "frozen"), ("coupled", other)):
        with pytest.raises(UsageError, match=f"{option} was .*, is {value!r}"):
            fit(case, steps=UPDATES, run_dir=tmp_path, **{option: value})
    assert_same(fit(case, run_dir=tmp_path)[0].model, fit(case)[0].model, 0)


@pytest.mark.parametrize(
    ("case", "evaluation_batch", "bounds"),
    [
        ("coupled criterion", None, (0, 16, 21)),
        ("two towers", 8, (0, 8, 16, 21)),
    ],
)
def test_an_evaluation_has_the_loss_of_whole_batches(
    case: str, evaluation_batch: int | None, bounds: tuple[int, ...]
) -> None:
    """Of the target batch's size, or the size that is asked for, whatever fits at once."""
    fields = {"evaluation_dataset": TensorDataset(*HELD_OUT), "evaluation_batch": evaluation_batch}
    done, evaluations = fit(case, steps=1, fields=fields)
    model = copy.deepcopy(done.model).eval()
    total = 0.0
    for begin, end in zip(bounds, bounds[1:], strict=False):
        part = HELD_OUT[0][begin:end], HELD_OUT[1][begin:end]
        total += float(loss_of(case, model, part).detach()) * (end - begin)
    assert evaluations[-1].values["loss"] == pytest.approx(total / 21, rel=1e-12)
    assert evaluations[-1].samples == 21


@pytest.mark.parametrize("case", ["exact", "two towers"])
def test_out_of_memory_leads_to_smaller_parts_of_the_same_update_and_evaluation(case: str) -> None:
    def refuse(_: nn.Module, given: tuple[Tensor]) -> None:
        if len(given[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def small() -> nn.Module:
        model = start(normed=CASES[case].get("normed", True))
        model.register_forward_pre_hook(refuse)
        return model

    fields = {"model": small, "evaluation_dataset": TensorDataset(*HELD_OUT)}
    done, evaluations = fit(case, micro_batch=9, fields=fields)
    assert_same(done.model, full_batch(case), 1e-9)
    assert evaluations[-1].samples == 21
    assert done.oom_retries > 0
