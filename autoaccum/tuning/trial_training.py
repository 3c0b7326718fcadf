"""The child that describes a workload and trains it as `autoaccum fit` would within a budget.

A training is a conversation, in which the child replies with its loss at each milestone, and waits for whether to
continue.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from torch.utils.data import Subset

from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.checks import type_name
from autoaccum.devices.child.failures import describe_failure
from autoaccum.devices.child.requests import Handler
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import DoesNotFitError, NonFiniteError, WorkloadError
from autoaccum.messages import message
from autoaccum.options import Options, make_options
from autoaccum.sources.optimizers import get_learning_rate, scheduler_follows_rate
from autoaccum.sources.samples import replace_fields
from autoaccum.sources.source import find_source
from autoaccum.sources.token_costs import is_length_sequence
from autoaccum.sources.workload import Workload, no_batch
from autoaccum.tracebacks import blame_exit
from autoaccum.training.data import is_map_style
from autoaccum.training.fit_events import Evaluated, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train
from autoaccum.training.training_setup import find_device
from autoaccum.tuning.trial_processes import ContinueTraining, Describe, LoadForTuning, Train, TrainingProgress
from autoaccum.tuning.tuning_records import MILESTONES, Outcome, ShouldContinue, WorkloadFacts

_HELD_OUT_SHARE = 10
"""One of this many samples is held out if the workload has no evaluation_dataset."""
_SEED = 0
_UNLIMITED = 10**12
"""Updates; the budget ends a training."""


def train_setting(workload: Workload, training: Train, device: str, should_continue: ShouldContinue) -> Outcome:
    """Train in this process, and ask `should_continue` at each milestone; a failure becomes an `Outcome`."""
    monitor = _Monitor(training.budget, should_continue)
    try:
        samples, held_out, _, _ = split_data(workload)
        data: dict[str, Any] = {"dataset": samples, "evaluation_dataset": held_out, "evaluate": None}
        lengths: Any = workload.lengths
        if samples is not workload.dataset and is_length_sequence(lengths):
            data["lengths"] = [lengths[index] for index in samples.indices]
        request = FitRequest(
            model_or_workload=dataclasses.replace(workload, **data, evaluation_batch=training.evaluation_batch),
            target_batch=training.target_batch,
            micro_batch=training.micro_batch,
            micro_tokens=training.micro_tokens,
            learning_rate=training.learning_rate,
            steps=_UNLIMITED,
            seed=training.seed,
            options=Options(device=device),
            check="off",
            eval_due=monitor.is_due,
            callbacks=[monitor.on_event],
        )
        with blame_exit("training"), warnings.catch_warnings():
            warnings.simplefilter("ignore", AccumulationWarning)  # The plan has shown them.
            result = train(request)
        return dataclasses.replace(monitor.outcome, warnings=result.warnings)
    except NonFiniteError as error:
        ended: dict[str, Any] = {"state": "diverged", "reason": message("error", error=error.code, text=error.message)}
    except DoesNotFitError as error:
        ended = {"state": "out_of_memory", "reason": message("error", error=error.code, text=str(error))}
    except Exception as error:
        failed = Outcome.of_failure(describe_failure(error, "training"))
        ended = {"state": failed.state, "reason": failed.reason, "user_traceback": failed.user_traceback}
    return dataclasses.replace(monitor.outcome, loss=None, **ended)


class _Monitor:
    """Follows a training: `on_event` is its callback, `is_due` says when it evaluates, and `outcome` is that so far."""

    def __init__(self, budget: int, should_continue: ShouldContinue) -> None:
        self.outcome = Outcome(state="complete")
        self._budget, self._should_continue = budget, should_continue
        self._milestones = list(MILESTONES)

    def is_due(self, samples: int) -> bool:
        """Return whether to evaluate now; at the end of the budget training does so by itself."""
        return samples < self._budget and samples * 100 >= self._budget * (*self._milestones, 100)[0]

    def on_event(self, event: Any) -> bool:
        """Handle an event of `fit_events`; return whether training ends here."""
        if isinstance(event, Updated):
            trained = event.samples - self.outcome.samples
            self._set(
                samples=event.samples,
                seconds=self.outcome.seconds + trained / event.samples_per_second,
                oom_retries=self.outcome.oom_retries + event.retries,
            )
            return event.samples >= self._budget
        if isinstance(event, Evaluated):
            self._record_loss(event.values["loss"], event.update)
        return self.outcome.state != "complete"

    def _record_loss(self, loss: float, update: int) -> None:
        if not math.isfinite(loss):
            reason = message("held_out_loss_not_finite", loss=str(loss), update=update)
            self._set(state="diverged", loss=None, reason=reason)
            return
        self._set(loss=loss)
        while self.is_due(self.outcome.samples):
            if not self._should_continue(self._milestones.pop(0), loss):
                self._set(state="pruned", loss=None)
                return

    def _set(self, **changes: Any) -> None:
        self.outcome = dataclasses.replace(self.outcome, **changes)


def describe_workload(workload: Workload, device: str, target_batch: int) -> WorkloadFacts:
    """Build model, optimizer and scheduler, and return what a study needs to know; nothing is trained.

    Raises:
        WorkloadError: The workload cannot be tuned: no data, too little of it, no learning rate, or a scheduler that
            ignores it.
        UsageError: There is no such device.
    """
    place = find_device(device)
    _, _, samples, held_out = split_data(workload)
    if samples is not None and samples < target_batch:
        raise WorkloadError(
            f"{samples:,} samples are trained on, fewer than the target batch of {target_batch:,}",
            hint="use a smaller --target-batch, or give more data",
        )
    seed_everything()
    model = workload.build_model().to(place)
    optimizer = workload.build_optimizer(model)
    schedule = workload.build_scheduler(workload.build_optimizer(model))
    if schedule is not None and not scheduler_follows_rate(
        lambda: workload.build_optimizer(model), workload.build_scheduler
    ):
        raise WorkloadError(
            f"{type_name(schedule)} ignores the optimizer's learning rate: there is nothing to tune",
            hint='start from the optimizer\'s: max_lr=optimizer.param_groups[0]["lr"]',
        )
    return WorkloadFacts(
        name=workload.name,
        digest=workload.digest,
        optimizer=type_name(optimizer),
        learning_rate=get_learning_rate(optimizer),
        schedule=None if schedule is None else type_name(schedule),
        has_batch=workload.batch is not no_batch or workload.counts_tokens,
        training_samples=samples,
        held_out=held_out,
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else str(place),
    )


def split_data(workload: Workload) -> tuple[Any, Any, int | None, str]:
    """Return the training data and the workload's `evaluation_dataset`, or hold out a fixed tenth of the dataset.

    Returns:
        The training data, the held-out data, the number of training samples if known, and a phrase for the held-out
        data.

    Raises:
        WorkloadError: There is no dataset, or it has no length or index, or is too small.
    """
    data, given = workload.dataset, workload.evaluation_dataset
    if data is None:
        raise WorkloadError(f"{workload.name} has no dataset to train on", hint="define dataset = ... in it")
    total = _count_samples(data)
    if given is not None:
        count = _count_samples(given)
        if count == 0:
            raise WorkloadError("evaluation_dataset has no samples", hint="give some, or remove it")
        return data, given, total, "evaluation_dataset" + ("" if count is None else f" ({count:,} samples)")
    if total is None or total < 2:
        what = f"{total} samples" if total is not None else f"a {type(data).__name__} without length or index"
        raise WorkloadError(f"no samples can be held out of {what}", hint="define evaluation_dataset in the workload")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(_SEED)).tolist()
    count = max(1, round(total / _HELD_OUT_SHARE))
    words = f"{count:,} of {total:,} samples of dataset, drawn by seed {_SEED}"
    return Subset(data, sorted(order[count:])), Subset(data, sorted(order[:count])), total - count, words


def _count_samples(data: Any) -> int | None:
    """Count samples; None for batches, and for samples without an index."""
    by_index = isinstance(data, (list, tuple)) or is_map_style(data)
    return len(data) if by_index and hasattr(data, "__len__") else None


class TuningChild(Handler):
    """Handles the requests of `trial_processes`, `LoadForTuning` first."""

    _workload: Workload
    _load: LoadForTuning

    def handle(self, request: Any) -> Any:
        """Return the reply to `request`."""
        if isinstance(request, LoadForTuning):
            return self._load_workload(request)
        device = make_options(**self._load.options).device
        if isinstance(request, Describe):
            return describe_workload(self._workload, device, self._load.target_batch)
        assert isinstance(request, Train)
        return TrainingProgress(outcome=train_setting(self._workload, request, device, self._ask))

    def _load_workload(self, request: LoadForTuning) -> str:
        """Import the workload with the same seed for every trial: its data, and its model if that is an instance."""
        seed_everything()
        self._load = request
        options = make_options(**request.options)
        self._workload = replace_fields(find_source(request.reference, options.overrides).load(), **options.spec)
        return self._workload.digest

    def _ask(self, percent: int, loss: float) -> bool:
        """Reply with the loss at a milestone; return whether to continue."""
        self.connection.reply(TrainingProgress(percent=percent, loss=loss))
        answer = self.connection.read()
        if answer is None:  # The parent has gone.
            raise SystemExit(0)
        assert isinstance(answer, ContinueTraining)
        return answer.should_continue
