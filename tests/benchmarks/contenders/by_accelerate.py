"""accelerate: its example of automatic gradient accumulation (examples/by_feature of its repository), on the CPU.

`find_executable_batch_size` wraps the training function, starts at the target and takes 9/10 after each failure;
the accumulation is `target // size`, set on the Accelerator.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from contenders.counting import Counter
from contenders.limits import Repeated, Stage, describe
from contenders.records import Search, Task, Training
from torch.utils.data import DataLoader

from autoaccum.workload.spec import Workload


class Run:
    """The training function and what it has done.

    Attributes:
        attempts: The batch size of every call.
        counter: Of the last call.
        began: When the last call began.
    """

    def __init__(self, workload: Workload, target: int, updates: int) -> None:
        self._workload, self._target, self._updates = workload, target, updates
        self._accelerator = Accelerator(cpu=True)
        self.attempts: list[int] = []
        self.counter: Counter | None = None
        self.began = time.monotonic()

    def train(self, batch_size: int) -> int:
        """Make all updates with micro-batches of `batch_size`, and return it."""
        self.began = time.monotonic()
        self.attempts.append(batch_size)
        accelerator, workload = self._accelerator, self._workload
        accelerator.gradient_accumulation_steps = self._target // batch_size
        accelerator.free_memory()
        set_seed(0)
        model = workload.build_model()
        optimizer = workload.build_optimizer(model)
        self.counter = counter = Counter(model, optimizer)
        samples = Repeated(workload.dataset, self._target * self._updates)
        prepared: Any = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=batch_size))
        model, optimizer, loader = prepared
        assert workload.criterion is not None
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(workload.criterion(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if len(counter.updates) == self._updates:
                break
        return batch_size


def search(task: Task) -> Search:
    """The attempts are training runs: the size is known when one of them has made its updates."""
    stage, failure, size, run = Stage(task, _rehearse), None, None, None
    useful = 0.0
    try:
        with stage.limited():
            run = Run(stage.workload, task.target, task.updates)
            function = run.train

            def training_function(batch_size: int) -> int:
                return function(batch_size)

            size = find_executable_batch_size(training_function, starting_batch_size=task.target)()
    except Exception as error:
        failure = describe(error)
    seconds = stage.seconds
    if run is not None and size is not None:
        useful = time.monotonic() - run.began
    return Search(
        attempts=tuple(run.attempts) if run else (),
        size=size,
        largest=size,
        start_seconds=stage.start_seconds,
        seconds=seconds,
        useful_seconds=useful,
        failure=failure,
        version=version("accelerate"),
        threads=torch.get_num_threads(),
    )


def train(task: Task) -> Training:
    """The same training function, with the size that was found."""
    assert task.size is not None
    stage, failure, run = Stage(task, _rehearse), None, None
    try:
        with stage.limited():
            run = Run(stage.workload, task.target, task.updates)
            run.train(task.size)
    except Exception as error:
        failure = describe(error)
    made = tuple(run.counter.updates) if run and run.counter else ()
    return Training(micro_batches=made, seconds=stage.seconds, failure=failure)


def _rehearse(small: Workload) -> None:
    Run(small, 2, 1).train(2)
