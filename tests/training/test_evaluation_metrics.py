"""Evaluation metrics: the loss of all samples, or the workload's own metrics."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_evaluations import (
    CRITERION,
    SAMPLES,
    Batches,
    Numbers,
    Stream,
    dataset,
    evaluation,
    net,
    samples,
    values,
    whole,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.errors import WorkloadError
from autoaccum.sources.objective import resolve_objective
from autoaccum.training.evaluation import Evaluation
from autoaccum.training.fit_events import Evaluated


@pytest.mark.parametrize(
    "make",
    [dataset, Numbers, Stream, Batches, lambda: list(Batches()), lambda: DataLoader(dataset(), batch_size=7)],
    ids=["tensors", "map-style", "iterable", "batches", "list", "loader"],
)
def test_the_loss_is_that_of_all_samples_at_once(make: Callable[[], Any]) -> None:
    model, made = net(), evaluation(make())
    x, y = samples()
    expected = whole(model, lambda m: CRITERION(m(x), y))
    for _ in range(2):  # from the start each time
        outcome = made.run(model, 0)
        assert isinstance(outcome, Evaluated)
        assert outcome.samples == SAMPLES
        assert outcome.values == {"loss": pytest.approx(expected, rel=1e-12)}


def test_means_are_weighted_by_their_divisors() -> None:
    x, y = samples()
    y[::3] = -100
    y[:5] = -100  # a part in which nothing counts: its own mean is 0/0
    model = net()
    assert values(evaluation(TensorDataset(x, y)), model) == {
        "loss": pytest.approx(whole(model, lambda m: CRITERION(m(x), y)), rel=1e-12)
    }


def test_sums_are_added() -> None:
    model, criterion = net(), nn.CrossEntropyLoss(reduction="sum")
    x, y = samples()
    assert values(evaluation(loss=criterion), model) == {
        "loss": pytest.approx(whole(model, lambda m: criterion(m(x), y)), rel=1e-12)
    }


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x, y = batch
    out = model(x)
    return {"class": functional.cross_entropy(out, y, ignore_index=0), "size": out.square().mean()}


def term_of(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda model: two_terms(model, samples())[name]


def test_each_term_has_its_own_divisor() -> None:
    def weight(batch: Any) -> dict[str, float]:
        return {"class": float((batch[1] != 0).sum()), "size": float(batch[0].shape[0])}

    model = net()
    at_once = {name: whole(model, term_of(name)) for name in ("class", "size")}
    given = values(evaluation(loss=two_terms, objective={"weight": weight}), model)
    assert given == {name: pytest.approx(value, rel=1e-12) for name, value in at_once.items()} | {
        "loss": pytest.approx(sum(at_once.values()), rel=1e-12)
    }


def test_a_term_without_weight_is_nan() -> None:
    x, y = samples()
    assert math.isnan(values(evaluation(TensorDataset(x, torch.full_like(y, -100))), net())["loss"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_runs_in_the_precision_of_training(precision: str) -> None:
    seen: list[torch.dtype] = []

    def evaluate(model: nn.Module, batch: Any) -> float:
        seen.append(model(batch[0]).dtype)
        return 0.0

    data = TensorDataset(samples()[0].float(), samples()[1])
    made = Evaluation(resolve_objective(CRITERION), evaluate, precision, data, micro_batch=50)
    assert isinstance(made.run(net().float(), 0), Evaluated)
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float32]


# --- the workload's own evaluate ------------------------------------------------------------------------------------


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return torch.eq(model(x).argmax(1), y).double().mean()


def test_a_number_is_averaged_over_samples() -> None:
    model = net()
    x, y = samples()
    assert values(evaluation(evaluate=accuracy), model) == {
        "accuracy": pytest.approx(whole(model, lambda m: accuracy(m, (x, y))))
    }


def test_named_numbers_are_averaged_and_a_result_without_numbers_is_refused() -> None:
    def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
        size = len(batch[0])
        return {"a": size, "b": np.float32(size), "c": torch.tensor(size), "d": True, "out": model(batch[0])}

    mean = pytest.approx((4 * 5 * 5 + 3 * 3) / SAMPLES)
    assert values(evaluation(evaluate=evaluate), net()) == {"a": mean, "b": mean, "c": mean, "d": 1.0}
    with pytest.raises(WorkloadError, match="returned a Tensor, which is not a number: return a number, or a dict"):
        evaluation(evaluate=lambda model, batch: model(batch[0])).run(net(), 7)
