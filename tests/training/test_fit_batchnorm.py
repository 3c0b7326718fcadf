"""Training in each mode of BatchNorm."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.spec import BatchNormMode

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)) * 2 + 1
DATA = torch.utils.data.TensorDataset(X, torch.arange(24) % 3)


def model() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))


def fit(model_or_workload: Any, **options: Any) -> autoaccum.FitResult:
    settings: dict[str, Any] = {"target_batch": 24, "micro_batch": 7, "steps": 1, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        return autoaccum.fit(model_or_workload, **settings | options)


def statistics(result: autoaccum.FitResult) -> tuple[torch.Tensor, torch.Tensor, int]:
    norm = result.model[0]  # type: ignore[index]
    return norm.running_mean, norm.running_var, int(norm.num_batches_tracked)


@pytest.mark.parametrize("mode", get_args(BatchNormMode))
def test_a_live_model_and_a_workload_train_under_it(mode: str) -> None:
    workload = autoaccum.Workload(model=model, dataset=DATA, loss=nn.CrossEntropyLoss(), batchnorm=mode)  # type: ignore[arg-type]
    for result in (fit(workload), fit(model(), data=DATA, loss=nn.CrossEntropyLoss(), batchnorm=mode)):
        mean, variance, updates = statistics(result)
        assert updates == {"micro": 4, "running": 1, "frozen": 0, "exact": 1}[mode]
        if mode in ("running", "exact"):
            torch.testing.assert_close(mean, 0.1 * X.mean(0))
            torch.testing.assert_close(variance, 0.9 + 0.1 * X.var(0))
