"""What the child does: one training as `autoaccum fit` would make it, for a budget; and single updates, timed."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

from autoaccum.accumulation.observers import AccumulationWarning
from autoaccum.accumulation.reach import find_beside
from autoaccum.devices.diagnosis import describe_failure
from autoaccum.devices.rehearsal import make_accumulator, place_model, seed_everything, wait_for
from autoaccum.errors import DoesNotFitError, NonFiniteError
from autoaccum.options import Options
from autoaccum.planning.request import LOOKED_AT
from autoaccum.training.events import Evaluated, EvaluationFailed, ShortageMet, Started, Updated
from autoaccum.training.fitting import train
from autoaccum.training.request import FitRequest
from autoaccum.training.trainee import find_device
from autoaccum.tuning.describing import split_data
from autoaccum.tuning.records import MILESTONES, Budget, Ending, Outcome, Setting
from autoaccum.workload.samples import adapt
from autoaccum.workload.spec import Workload, no_batch
from autoaccum.workload.tracebacks import exit_blamed

GoOn = Callable[[int, float], bool]
"""Told of a milestone (percent of the budget) and the held-out loss there; whether the training shall go on."""

_WITHOUT_END = 10**12
"""Updates; it is the budget that ends a training."""


def train_setting(
    workload: Workload, setting: Setting, budget: Budget, *, seed: int, evaluation_batch: int, device: str, go_on: GoOn
) -> Outcome:
    """Train in this process; whatever goes wrong within it is in the outcome.

    Args:
        workload: As it is loaded, with what the study asks of it in place of its own.
        setting: What to train with.
        budget: How long.
        seed: Of weights, order, and all that is drawn.
        evaluation_batch: The micro-batch of every evaluation.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        go_on: Asked at each milestone.

    Raises:
        KeyboardInterrupt, SystemExit: It was interrupted.
    """
    course = Course(budget, go_on)
    noted: tuple[str, ...] = ()
    try:
        training, held_out, _, _ = split_data(workload)
        data: dict[str, Any] = {"dataset": training, "evaluation_dataset": held_out, "evaluate": None}
        request = FitRequest(
            subject=dataclasses.replace(workload, **data, evaluation_batch=evaluation_batch),
            target_batch=setting.target_batch,
            micro_batch=max(setting.cut(workload.multiple_of or 1)),
            learning_rate=setting.learning_rate,
            steps=_WITHOUT_END,
            seed=seed,
            options=Options(device=device),
            eval_due=course.is_due,
            callbacks=[course.hear],
        )
        with exit_blamed("training"), warnings.catch_warnings():
            warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them, once for all trials.
            noted = train(request).warnings
        ending, reason, user_traceback = course.ending or "complete", course.reason, None
    except Exception as error:
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


def _judge(error: Exception) -> tuple[Ending, str, str | None]:
    """Tell what an error of a training is, why, and the user's own frames where they are to blame."""
    if isinstance(error, NonFiniteError):
        return "diverged", error.message, None
    if isinstance(error, DoesNotFitError):
        return "out_of_memory", str(error), None
    failure = describe_failure(error, "training")
    return "out_of_memory" if failure.outcome == "oom" else "failed", failure.message, failure.traceback


class Course:
    """Follows a training: `hear` is its callback, `is_due` tells when it evaluates.

    Its attributes are those of `Outcome`, so far; `ending` is None as long as nothing ended it before its budget.

    Args:
        budget: How long it trains; seconds are those of training alone.
        go_on: Asked at each milestone.
    """

    def __init__(self, budget: Budget, go_on: GoOn) -> None:
        self.samples = self.updates = self.shortages = 0
        self.seconds = 0.0
        self.loss: float | None = None
        self.ending: Ending | None = None
        self.reason: str | None = None
        self._budget, self._go_on = budget, go_on
        self._left = list(MILESTONES)
        self._since = time.perf_counter()

    def is_due(self, samples: int) -> bool:
        """Return whether to evaluate now; at the end of the budget training does so by itself."""
        del samples  # `hear` has counted them.
        return not self._has_passed(100) and any(map(self._has_passed, self._left))

    def hear(self, event: Any) -> bool:
        """Take in an event of `training.events`; return whether training ends here."""
        if isinstance(event, Updated):
            now = time.perf_counter()
            self.seconds, self._since = self.seconds + now - self._since, now
            self.samples, self.updates = event.samples, event.update
            return self._has_passed(100)
        if isinstance(event, Evaluated):
            self._look_at(event.values["loss"], event.update)
        elif isinstance(event, EvaluationFailed):
            self.ending = "out_of_memory" if event.out_of_memory else "failed"
            self.reason = f"the evaluation after update {event.update} failed: {event.reason}"
        elif isinstance(event, ShortageMet):
            self.shortages += 1
        if isinstance(event, (Started, Evaluated, EvaluationFailed)):
            self._since = time.perf_counter()
        return self.ending is not None

    def _look_at(self, loss: float, update: int) -> None:
        if not math.isfinite(loss):
            self.ending, self.reason = "diverged", f"the loss on held-out data is {loss} after update {update}"
            return
        self.loss = loss
        while not self._has_passed(100) and self._left and self._has_passed(self._left[0]):
            if not self._go_on(self._left.pop(0), loss):
                self.ending = "pruned"
                return

    def _has_passed(self, percent: int) -> bool:
        done = self.samples if self._budget.unit == "samples" else self.seconds
        return done * 100 >= self._budget.amount * percent


class UpdateTimer:
    """A model that makes updates of its worst-case batch, at a learning rate of 0: nothing diverges meanwhile.

    Args:
        workload: With what the study asks of it in place of its own.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        target_batch: Samples per update.

    Raises:
        WorkloadError: It makes no batch.
    """

    def __init__(self, workload: Workload, device: str, target_batch: int) -> None:
        self._place = find_device(device)
        workload = adapt(workload, most=target_batch, worst_of=LOOKED_AT if workload.batch is no_batch else None)
        seed_everything()
        model = place_model(workload.build_model(), self._place)
        for module in find_beside(workload).values():
            place_model(module, self._place)
        optimizer = workload.build_optimizer(model)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0  # A tensor stays one.
        self._batch = workload.build_batch(target_batch)
        self._accumulator = make_accumulator(workload, model, optimizer, target_batch)

    def time(self, micro_batch: int) -> float:
        """Make one update in micro-batches of that size; return its seconds."""
        self._accumulator.micro_batch = micro_batch
        wait_for(self._place)
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them.
            self._accumulator.step(self._batch)
        wait_for(self._place)
        return time.perf_counter() - began
