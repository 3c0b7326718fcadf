"""One training with one setting: what `autoaccum fit` would do, for a budget, looked at on held-out data."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from autoaccum.accumulation.observers import AccumulationWarning
from autoaccum.devices.diagnosis import describe_failure
from autoaccum.errors import DoesNotFitError, NonFiniteError
from autoaccum.options import Options
from autoaccum.training.fitting import train
from autoaccum.training.request import FitRequest
from autoaccum.tuning.records import Ending, Outcome
from autoaccum.tuning.runner import GoOn
from autoaccum.tuning.running.course import Course
from autoaccum.tuning.running.held_out import split_data
from autoaccum.tuning.running.orders import TrainOrder
from autoaccum.workload.spec import Workload
from autoaccum.workload.tracebacks import exit_blamed

_WITHOUT_END = 10**12
"""Updates; it is the budget that ends a training."""


def train_setting(workload: Workload, order: TrainOrder, go_on: GoOn) -> Outcome:
    """Train in this process; whatever goes wrong within it is in the outcome.

    Args:
        workload: As it is loaded, with what the study asks of it in place of its own.
        order: What to train.
        go_on: As of `runner.Runner`; what it raises comes through.

    Raises:
        KeyboardInterrupt, SystemExit: It was interrupted.
    """
    course = Course(order.budget, go_on)
    try:
        noted = _train(_request(workload, order, course))
        ending, reason, user_traceback = course.ending or "complete", course.reason, None
    except Exception as error:
        if error is course.raised:
            raise
        noted = ()
        ending, reason, user_traceback = _judge(error)
    return Outcome(
        state=ending,
        loss=course.loss if ending in ("complete", "pruned") else None,
        samples=course.samples,
        updates=course.updates,
        seconds=course.seconds,
        shortages=course.shortages,
        reason=reason,
        user_traceback=user_traceback,
        warnings=noted,
    )


def _train(request: FitRequest) -> tuple[str, ...]:
    """What it warned of."""
    with exit_blamed("training"), warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them, once for all trials.
        return train(request).warnings


def _judge(error: Exception) -> tuple[Ending, str, str | None]:
    """What an error of a training is, why, and the user's own frames where they are to blame."""
    if isinstance(error, NonFiniteError):
        return "diverged", error.message, None
    if isinstance(error, DoesNotFitError):
        return "out_of_memory", str(error), None
    failure = describe_failure(error, "training")
    return "out_of_memory" if failure.outcome == "oom" else "failed", failure.message, failure.traceback


def _request(workload: Workload, order: TrainOrder, course: Course) -> FitRequest:
    split = split_data(workload)
    asked: dict[str, Any] = {
        "dataset": split.training,
        "evaluation_dataset": split.held_out,
        "evaluation_batch": order.evaluation_batch,
        "evaluate": None,
    }
    return FitRequest(
        subject=dataclasses.replace(workload, **asked),
        target_batch=order.setting.target_batch,
        micro_batch=max(order.setting.cut(workload.multiple_of or 1)),
        learning_rate=order.setting.learning_rate,
        steps=_WITHOUT_END,
        seed=order.seed,
        options=Options(device=order.device),
        eval_due=course.is_due,
        callbacks=[course.hear],
    )
