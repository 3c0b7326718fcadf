"""What every peer's child has in common with a trial of autoaccum: the workload, the warm-up, the limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from contenders.records import Task
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from autoaccum.devices.host_meter import check_data_limit, data_limit, read_process_memory
from autoaccum.devices.meters import warm_up
from autoaccum.workload.loading import load_workload
from autoaccum.workload.spec import Workload


class Stage:
    """Loads the workload, warms up, and holds what follows to the budget.

    Attributes:
        workload: The model under test.
        start_seconds: From before the child was started until it was warm. A user waits as long: most of a warm-up is
            imports that PyTorch puts off until the first optimizer is made.

    Args:
        task: What is asked.
        rehearse: Trains with a small workload, so that the peer imports what it imports late before it is limited.
    """

    def __init__(self, task: Task, rehearse: Callable[[Workload], object] | None = None) -> None:
        self._budget_bytes = task.budget_bytes
        self._began: float | None = None
        self.workload: Workload = load_workload(task.workload)
        warm_up()
        if rehearse is not None:
            rehearse(_small_workload())
        self.start_seconds = time.monotonic() - task.started
        check_data_limit()

    @property
    def seconds(self) -> float:
        """Spent under the limit so far."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Hold what is done within to the budget: RLIMIT_DATA at VmData after warm-up, as in `devices.child`."""
        torch.manual_seed(0)
        gc.collect()
        held_bytes = read_process_memory().data_bytes
        self._began = time.monotonic()
        with data_limit(held_bytes + self._budget_bytes):
            yield


class Repeated(Dataset[Any]):
    """A data set said over again until it has `length` samples: long enough that no epoch ends within a run."""

    def __init__(self, samples: Any, length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def _small_workload() -> Workload:
    return Workload(
        name="small",
        model=lambda: nn.Linear(2, 2),
        batch=lambda size: (torch.ones(size, 2), torch.zeros(size, 2)),
        criterion=nn.MSELoss(),
        dataset=TensorDataset(torch.ones(4, 2), torch.zeros(4, 2)),
    )


def describe(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
