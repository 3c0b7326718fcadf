"""What is planned along with the step, and modes of BatchNorm: what is refused at once, and what the plan records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from factories import Classifier, class_loss, labelled_rows
from small_classifier import layers_file
from torch import nn

import autoaccum
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import DoesNotFitError, WorkloadError
from autoaccum.spec import BatchNormMode
from autoaccum.units import MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

LIMIT = MemorySize(bytes=256 * MIB)


def test_an_evaluation_that_does_not_fit_a_simulated_card_is_told_as_such(write_workload: Any) -> None:
    reference = write_workload(layers_file(8, 1000, classes=True))
    asked: Mapping[str, Any] = {"target_batch": 64, "gpu": "rtx3090", "memory": "256MiB"}
    plan = autoaccum.plan(reference, evaluation_batch=256, **asked)
    assert plan.spec.evaluation_batch == 256
    message = "the evaluation after an update of micro-batch 1 does not fit: it would take .* 256 MiB are available"
    with pytest.raises(DoesNotFitError, match=message) as refused:
        autoaccum.plan(reference, evaluation_batch=100_000, **asked)
    assert refused.value.hint == "take a smaller evaluation_batch (--evaluation-batch), or more memory"


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled_rows(size, torch.float32)


@pytest.mark.parametrize("mode", get_args(BatchNormMode))
def test_live_objects_are_planned_under_it_and_left_as_they_were(mode: str) -> None:
    live = Classifier(norm=True)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    asked: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 4, "memory": LIMIT, "batchnorm": mode}
    plan = autoaccum.plan(model=live, batch=batch, loss=class_loss, **asked)
    workload = autoaccum.Workload(model=Classifier(norm=True), batch=batch, loss=class_loss, batchnorm=mode)  # type: ignore[arg-type]
    assert inspect_workload(workload, rank_samples=8).least_size == (2 if mode in ("micro", "running") else 1)
    assert plan.spec.batchnorm == mode
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    said = " ".join(map(str, plan.warnings))
    assert ('batchnorm="exact" corrects that' in said) is (mode in ("micro", "running"))
    assert ("the gradient is not" in said) is (mode in ("micro", "running"))
    assert ("never estimated" in said) is (mode == "frozen")


def test_what_cannot_be_frozen_is_the_workload_s_fault() -> None:
    stateless = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))
    frozen = autoaccum.Workload(model=stateless, batch=batch, loss=nn.CrossEntropyLoss(), batchnorm="frozen")
    with pytest.raises(WorkloadError, match='"frozen", and 1 have no running statistics'):
        autoaccum.plan(frozen, target_batch=8, memory=LIMIT)
