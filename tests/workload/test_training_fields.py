"""What a workload says for training alone: the schedule of its learning rate, and what it is evaluated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import WorkloadError
from autoaccum.workload.loading import load_workload
from autoaccum.workload.spec import Workload

FILE = """
import torch
from torch import nn
model = nn.Linear(2, 1)
criterion = nn.MSELoss()
def batch(size): return torch.ones(size, 2), torch.ones(size, 1)
dataset = [(torch.ones(2), torch.ones(1))] * 8
evaluation_dataset = dataset[:4]
def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
"""


def make(**fields: Any) -> Workload:
    return Workload(
        model=lambda: nn.Linear(2, 1),
        batch=lambda size: (torch.ones(size, 2), torch.ones(size, 1)),
        criterion=nn.MSELoss(),
        **fields,
    )


def test_a_file_may_say_both(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FILE)
    workload = load_workload(str(path))
    optimizer = torch.optim.SGD(workload.build_model().parameters(), lr=1.0)
    scheduler = workload.build_scheduler(optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(workload.evaluation_dataset) == 4


def test_there_need_be_neither() -> None:
    workload = make()
    assert workload.evaluation_dataset is None
    assert workload.build_scheduler(torch.optim.SGD(workload.build_model().parameters())) is None


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (3, "scheduler is an int: write def scheduler"),
        (lambda: None, "cannot be called with 1 argument: write def sch"),
    ],
)
def test_what_is_no_schedule_is_refused_when_it_is_built(scheduler: Any, message: str) -> None:
    workload = make(scheduler=scheduler)
    with pytest.raises(WorkloadError, match=message):
        workload.build_scheduler(torch.optim.SGD(workload.build_model().parameters()))


def test_what_cannot_be_gone_through_is_no_evaluation_dataset() -> None:
    with pytest.raises(WorkloadError, match="evaluation_dataset is an int: give samples by index"):
        make(evaluation_dataset=3)
