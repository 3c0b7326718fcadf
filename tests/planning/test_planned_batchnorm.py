"""Plans under each mode of BatchNorm: trials are told of it and run it, and the plan records it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from factories import Classifier, class_loss, labelled_rows
from torch import nn

import autoaccum
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import WorkloadError
from autoaccum.spec import BatchNormMode
from autoaccum.units import MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

LIMIT = MemorySize(bytes=256 * MIB)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled_rows(size, torch.float32)


@pytest.mark.parametrize("mode", get_args(BatchNormMode))
def test_live_objects_are_planned_under_it_and_left_as_they_were(mode: str) -> None:
    live = Classifier(norm=True)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    asked: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 4, "memory": LIMIT, "batchnorm": mode}
    plan = autoaccum.plan(model=live, batch=batch, loss=class_loss, **asked)
    workload = autoaccum.Workload(model=Classifier(norm=True), batch=batch, loss=class_loss, batchnorm=mode)  # type: ignore[arg-type]
    assert inspect_workload(workload, share=8).least_size == (2 if mode in ("micro", "running") else 1)
    assert plan.spec.batchnorm == mode
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    said = " ".join(plan.warnings)
    assert ('batchnorm="exact" corrects that' in said) is (mode in ("micro", "running"))
    assert ("the gradient is not" in said) is (mode in ("micro", "running"))
    assert ("never estimated" in said) is (mode == "frozen")


def test_what_cannot_be_frozen_is_the_workload_s_fault() -> None:
    stateless = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))
    frozen = autoaccum.Workload(model=stateless, batch=batch, loss=nn.CrossEntropyLoss(), batchnorm="frozen")
    with pytest.raises(WorkloadError, match='"frozen", and 1 have no running statistics'):
        autoaccum.plan(frozen, target_batch=8, memory=LIMIT)
