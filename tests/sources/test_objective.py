from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size
from autoaccum.sources.objective import CoupledLoss, match_weights, resolve_objective


def test_gives_every_term_its_own_weight() -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"a": model(batch).mean(), "b": model(batch).sum()}

    objective = resolve_objective(loss, weight=lambda batch: {"a": len(batch), "b": torch.tensor(2)})
    assert objective.weight(torch.zeros(7, 2)) == {"a": 7.0, "b": 2.0}
    assert set(objective.terms(nn.Linear(2, 2), torch.zeros(7, 2))) == {"a", "b"}
    assert match_weights(3.0, ["a", "b"]) == {"a": 3.0, "b": 3.0}
    with pytest.raises(WorkloadError, match="terms a, b, weight has a"):
        match_weights({"a": 1.0}, ["a", "b"])
    with pytest.raises(WorkloadError, match="terms a, weight has a, b"):
        match_weights({"a": 1.0, "b": 1.0}, ["a"])


def scalar(model: nn.Module, batch: Any) -> Any:
    return model(batch).mean()


TERMS: dict[str, tuple[Any, str]] = {
    "rows": (lambda m, b: m(b), r"the loss is not a scalar but of shape \(4, 2\): reduce it with \.mean\(\)"),
    "nothing": (lambda m, b: None, r"the loss is None, not a tensor"),
    "a bad term": (lambda m, b: {"a": m(b).mean(), "b": m(b)}, r"the loss's term 'b' is not a scalar"),
    "detached": (lambda m, b: m(b).mean().detach(), r"not connected to any trainable parameter"),
}


@pytest.mark.parametrize("case", TERMS)
def test_refuses_invalid_losses(case: str) -> None:
    loss, message = TERMS[case]
    with pytest.raises(WorkloadError, match=message):
        resolve_objective(loss).terms(nn.Linear(2, 2), torch.ones(4, 2))


def test_a_loss_that_returns_all_outputs_gets_a_hint() -> None:
    def output(model: nn.Module, batch: Tensor) -> Any:
        logits = model(batch)
        return {"loss": logits.mean(), "logits": logits}

    with pytest.raises(WorkloadError, match=r"'logits' is not a scalar .*: return only the loss"):
        resolve_objective(output).terms(nn.Linear(2, 2), torch.ones(4, 2))


@pytest.mark.parametrize(
    "value", [3, 3.0, True + 2, np.float32(3), torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0).requires_grad_()]
)
def test_accepts_any_number_as_weight(value: Any) -> None:
    weight = resolve_objective(scalar, weight=lambda batch: value).weight(torch.ones(4, 2))
    assert weight == 3.0
    assert type(weight) is float


WEIGHTS: dict[str, tuple[Any, str]] = {
    "negative": (-1, r"weight\(batch\) is -1\.0: return what"),
    "nan": (float("nan"), r"weight\(batch\) is nan"),
    "rows": (torch.ones(4), r"weight\(batch\) is a Tensor, not a number: return one number per batch"),
    "a bad term": ({"a": 1, "b": -1}, r"weight\(batch\)\['b'\] is -1\.0"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_refuses_invalid_weights(case: str) -> None:
    value, message = WEIGHTS[case]
    with pytest.raises(WorkloadError, match=message):
        resolve_objective(scalar, weight=lambda batch: value).weight(torch.ones(4, 2))


class Readers:
    def method(self, outputs: Any, batch: Any) -> Any:
        return outputs

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return outputs


def ignores(outputs: Any, batch: Any) -> Any:
    return [outputs for _ in range(2)]


def reads_inside(outputs: Any, batch: Any) -> Any:
    return [batch for _ in range(2)]


def reads_by_name(outputs: Any, batch: Any) -> Any:
    return locals()


@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        (ignores, False),
        (lambda outputs, _: outputs, False),
        (lambda outputs, batch: outputs + batch, True),
        (reads_inside, True),
        (reads_by_name, True),
        (Readers(), True),
        (Readers().method, True),
        (functools.partial(ignores), True),
        (lambda *both: both[0], True),
    ],
)
def test_a_coupled_loss_that_never_names_the_batch_is_sent_none(loss: Any, reads: bool) -> None:
    objective = resolve_objective(CoupledLoss(ignores, loss))
    batch = torch.randn(3, 2), torch.arange(3)
    read = objective.read_by_coupled_loss(batch)
    assert (read is batch) == reads
    assert batch_size(read) == 3


def test_a_coupled_criterion_reads_the_targets() -> None:
    inputs, targets = torch.randn(3, 2), torch.arange(3)
    read = resolve_objective(nn.CrossEntropyLoss()).read_by_coupled_loss((inputs, targets))
    assert read[1] is targets
    assert read[0].shape == (3,)
