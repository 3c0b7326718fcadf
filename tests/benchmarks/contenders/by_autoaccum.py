"""autoaccum, as its README says: `autoaccum.plan` on the file, then the Accumulator with the plan's micro-batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from contenders.records import Search, Task, Training

import autoaccum
from autoaccum.errors import AutoaccumError

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload


def search(task: Task) -> Search:
    """Plan. The limit is set by autoaccum itself, on its own trials, whose processes are part of the time."""
    began = time.monotonic()
    try:
        plan = autoaccum.plan(task.workload, target_batch=task.target, device="cpu", memory=f"{task.budget_bytes}B")
    except AutoaccumError as error:
        return Search(failure=str(error), start_seconds=began - task.started, seconds=time.monotonic() - began)
    seconds = time.monotonic() - began
    return Search(
        attempts=tuple(max(trial.parts) for trial in plan.trials),
        size=plan.micro_batch,
        largest=plan.largest_fit,
        start_seconds=began - task.started,
        seconds=seconds,
        version=autoaccum.__version__,
        threads=plan.environment["threads"],
    )


def train(task: Task) -> Training:
    """Updates of the target, cut by the plan: `Accumulator.step`."""
    return _train(task, even=True)


def train_largest(task: Task) -> Training:
    """Updates of the target in micro-batches of the largest size that fits and what is left: `step_parts`."""
    return _train(task, even=False)


def _train(task: Task, *, even: bool) -> Training:
    from contenders.counting import Counter
    from contenders.limits import Stage, describe

    from autoaccum.workload.batches import split_batch

    assert task.size is not None
    stage = Stage(task, _rehearse)
    full, rest = divmod(task.target, task.size)
    parts = [task.size] * full + ([rest] if rest else [])
    counter: Counter | None = None
    failure = None
    try:
        with stage.limited():
            model = stage.workload.build_model()
            optimizer = stage.workload.build_optimizer(model)
            batch = stage.workload.build_batch(task.target)
            counter = Counter(model, optimizer)
            accumulator = autoaccum.Accumulator(model, optimizer, stage.workload.objective, micro_batch=task.size)
            for _ in range(task.updates):
                result = accumulator.step(batch) if even else accumulator.step_parts(split_batch(batch, parts))
                if result.retries:
                    raise RuntimeError(f"it went on with {max(result.micro_batches)} samples at a time")
    except Exception as error:
        failure = describe(error)
    made = tuple(counter.updates) if counter else ()
    return Training(micro_batches=made, seconds=stage.seconds, failure=failure)


def _rehearse(small: Workload) -> None:
    """An update, so that what autoaccum imports late is there before the limit, as for the peers."""
    model = small.build_model()
    optimizer = small.build_optimizer(model)
    autoaccum.Accumulator(model, optimizer, small.objective, micro_batch=1).step(small.build_batch(2))
