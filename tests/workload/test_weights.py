from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.errors import WorkloadError
from autoaccum.workload.weights import match_weights, resolve_objective


def test_counts_samples_without_a_weight() -> None:
    objective = resolve_objective(lambda model, batch: model(batch).mean())
    assert objective.source == "samples"
    assert objective.weight(torch.zeros(7, 2)) == 7.0


def test_takes_modules_and_functions_of_torch_for_criteria() -> None:
    batch = (torch.randn(4, 3), torch.tensor([0, 1, -100, 2]))
    for loss in (nn.CrossEntropyLoss(), functional.cross_entropy):
        objective = resolve_objective(loss)
        assert objective.weight(batch) == 3.0
        assert objective.terms(nn.Linear(3, 3), batch)["loss"].ndim == 0


def test_gives_every_term_its_own_weight() -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"a": model(batch).mean(), "b": model(batch).sum()}

    objective = resolve_objective(loss, weight=lambda batch: {"a": len(batch), "b": torch.tensor(2)})
    assert objective.weight(torch.zeros(7, 2)) == {"a": 7.0, "b": 2.0}
    assert set(objective.terms(nn.Linear(2, 2), torch.zeros(7, 2))) == {"a", "b"}
    assert match_weights(3.0, ["a", "b"]) == {"a": 3.0, "b": 3.0}
    with pytest.raises(WorkloadError, match="terms a, b, weight has a"):
        match_weights({"a": 1.0}, ["a", "b"])
