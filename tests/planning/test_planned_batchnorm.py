"""Plans under each mode of BatchNorm: trials are told of it and run it, and the plan records it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import WorkloadError
from autoaccum.spec import BatchNormMode
from autoaccum.units import MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

LIMIT = MemorySize(bytes=256 * MIB)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8), torch.randint(0, 4, (size,))


def workload(**fields: Any) -> autoaccum.Workload:
    return autoaccum.Workload(model=model, batch=batch, criterion=nn.CrossEntropyLoss(), **fields)


@pytest.mark.parametrize("mode", get_args(BatchNormMode))
def test_live_objects_are_planned_under_it_and_left_as_they_were(mode: str) -> None:
    live = model()
    before = {name: value.clone() for name, value in live.state_dict().items()}
    plan = autoaccum.plan(
        model=live,
        batch=batch,
        loss=nn.CrossEntropyLoss(),
        target_batch=8,
        max_micro_batch=4,
        memory=LIMIT,
        batchnorm=mode,
    )
    assert plan.spec.batchnorm == mode
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    said = " ".join(plan.warnings)
    assert ('batchnorm="exact" corrects that' in said) is (mode in ("micro", "running"))
    assert ("the gradient is not" in said) is (mode in ("micro", "running"))
    assert ("never estimated" in said) is (mode == "frozen")


def test_only_frozen_and_exact_take_parts_of_one_sample() -> None:
    sizes = {mode: inspect_workload(workload(batchnorm=mode), share=8).least_size for mode in get_args(BatchNormMode)}
    assert sizes == {"micro": 2, "running": 2, "frozen": 1, "exact": 1}


def test_what_cannot_be_frozen_is_the_workload_s_fault() -> None:
    stateless = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, track_running_stats=False))
    frozen = autoaccum.Workload(model=stateless, batch=batch, loss=nn.CrossEntropyLoss(), batchnorm="frozen")
    with pytest.raises(WorkloadError, match='"frozen", and 1 have no running statistics'):
        autoaccum.plan(frozen, target_batch=8, memory=LIMIT)
