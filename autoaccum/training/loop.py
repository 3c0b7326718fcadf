"""The training loop: a window of data, an update; now and then an evaluation and a checkpoint."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.rng_state import derive_seed
from autoaccum.accumulation.sharded_tensors import local_part
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.errors import NonFiniteError
from autoaccum.sources.batches import batch_size
from autoaccum.training.checkpoints import CheckpointWriter
from autoaccum.training.data_source import Source
from autoaccum.training.data_windows import Window
from autoaccum.training.evaluation import Evaluation, EvaluationData, Evaluator
from autoaccum.training.fit_events import EpochEnded, EventNotifier, Notice, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.resume import MicroBatchChoice
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.stopping import StopSignals, TrainingRanks
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup
from autoaccum.training.training_state import (
    Ceiling,
    Goal,
    Progress,
    capture_settings,
    capture_training,
    restore_training,
)

_MEASURE_ONLY = float("inf")


class Stepper(StepObserver):
    """Makes one update from each window.

    Without a `clip_norm` in the request the gradient norm is still measured, for the log.

    Args:
        request: The request, with `clip_norm`, `skip_nonfinite` and `check`.
        progress: The progress; skipped windows are counted in it.
        check: Called at the start of each phase of a step; an exception from it rolls the step back.
        notify: Called with notices.

    Attributes:
        ceiling: The largest micro-batch now.
        has_failed: Whether a step has raised an error that all ranks know of.

    Raises:
        UsageError: The plan does not match the training.
    """

    def __init__(
        self,
        request: FitRequest,
        components: TrainingComponents,
        choice: MicroBatchChoice,
        progress: Progress,
        check: Callable[[], None],
        notify: Callable[[Any], None],
    ) -> None:
        self.ceiling = Ceiling(choice.micro_batch)
        self._components, self._progress, self._skip_nonfinite = components, progress, request.skip_nonfinite
        self._device = components.device
        self._check, self._notify = check, notify
        self._retries = 0
        self.has_failed = False
        self._skip_reason: str | None = None
        self._accumulator = Accumulator(
            components.model,
            components.optimizer,
            components.objective,
            plan=choice.plan,
            micro_batch=choice.micro_batch if choice.plan is None else None,
            clip_norm=_MEASURE_ONLY if request.clip_norm is None else request.clip_norm,
            precision=components.precision,  # type: ignore[arg-type]
            batchnorm=components.batchnorm,
            coupled=components.objective.coupled,
            accumulate_in=components.accumulate_in,
            savers=components.savers,
            add_savers=True,
            scaler=components.scaler,
            multiple_of=choice.multiple_of,
            check_finite=True,
            check=request.check,
            observer=self,
        )

    @property
    def has_finite_weights(self) -> bool:
        """True if no parameter of the optimizer is NaN or infinite."""
        weights = map(local_part, optimizer_parameters(self._components.optimizer))
        return all(bool(weight.isfinite().all()) for weight in weights)

    @property
    def learning_rate(self) -> float | None:
        """The first parameter group's learning rate for the next update; None if it has none."""
        rate = self._components.optimizer.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    @property
    def savers(self) -> tuple[str, ...]:
        """The savers in use."""
        return self._accumulator.savers

    @property
    def added_savers(self) -> tuple[str, ...]:
        """Those of them that were added because not even the smallest micro-batch fitted."""
        return tuple(word for word in self.savers if word not in self._components.savers)

    @property
    def is_whole(self) -> bool:
        """True unless an update was interrupted half-way, or could not be rolled back."""
        return not self._accumulator.is_interrupted

    def step(self, parts: list[Any]) -> StepResult:
        """Make the next update. With `skip_nonfinite`, a window whose loss or gradient is not finite is skipped.

        Nothing is raised once the update is made; `after_update` does what may raise.

        Raises:
            NonFiniteError: The loss or the gradient is not finite; everything is as before the step.
            DoesNotFitError: As in `Accumulator.step_parts`, like the other errors.
        """
        self._skip_reason, self._retries = None, 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            return self._accumulator.step_parts(parts)
        except NonFiniteError as error:
            if not self._skip_nonfinite:
                self.has_failed = True
                message = f"update {self._progress.update + 1}: {error.message}"
                raise NonFiniteError(message, loss=error.loss, grad_norm=error.grad_norm, hint=error.hint) from None
            self._skip_reason = error.message
            sizes = tuple(batch_size(part) for part in parts)
            return StepResult(error.loss, sum(sizes), sizes, error.grad_norm, self._retries, False, {})
        except BaseException:
            self.has_failed = not self._accumulator.has_agreed
            raise

    def after_update(self, result: StepResult) -> None:
        """Update the averaged weights, the schedule and the ceiling, after the update has been counted.

        Raises:
            WorkloadError: The model's parameters or buffers are not those that the average began with.
            Exception: As the scheduler or a callback raised it.
        """
        if self._components.averages is not None and result.updated:
            self._components.averages.update()
        self._accumulator.micro_batch = self.ceiling.record(result.retries, self._accumulator.micro_batch)
        if result.updated and self._components.scheduler is not None:
            self._components.scheduler.step()  # Before any event: a callback that raises ends the run here.
        if self._skip_reason is not None:
            self._progress.skipped += 1
            self._notify(Notice(f"update {self._progress.update} is skipped: {self._skip_reason}", warns=False))

    def peak_bytes(self) -> int | None:
        """Return the peak memory of this update, as `Updated` describes it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if self._device.type == "cpu" else None

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain values."""
        return {"ceiling": dict(vars(self.ceiling)), "savers": list(self.added_savers)}

    def restore(self, state: Mapping[str, Any], *, same_plan: bool) -> None:
        """Continue from the `state` of an earlier run, as far as memory goes only if the micro-batch is the same."""
        if same_plan:
            self._accumulator.restore_savers(state["savers"])
            self.ceiling.restore(state["ceiling"])
            self._accumulator.micro_batch = self.ceiling.largest

    def phase(self, phase: StepPhase) -> None:
        """Let a request to stop interrupt the step (see `StepObserver`)."""
        if phase != "update":  # The gradient is complete by then, and the loop stops right after the update.
            self._check()

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """See `StepObserver`: memory ran out, and the step is repeated."""
        self._retries += 1
        # A step that ends without an update would not lower it.
        self._accumulator.micro_batch = min(self._accumulator.micro_batch, next_micro_batch)
        self._tell(f"out of memory in {phase} with {micro_batch}, repeated with {next_micro_batch}", warns=False)

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        """See `StepObserver`: not even the smallest micro-batch fitted, and the step is repeated with a saver."""
        self._retries += 1
        self._tell(f"out of memory in {phase} with {micro_batch}: this and later updates run with {saver}", warns=True)

    def _tell(self, text: str, *, warns: bool) -> None:
        self._notify(Notice(f"update {self._progress.update + 1}: {text}", warns=warns))


class Loop:
    """A training in progress, with all its changing state.

    The arguments are what `trainer.train` has built from a request. `run` holds what must be equal on resuming; without
    a `folder` nothing is saved.

    Attributes:
        progress: The progress so far, from which training continues.
        goal: When training is done.
        stepper: Makes an update from each window.
        checkpoint_writer: Writes checkpoints when they are due.

    Raises:
        UsageError: The plan does not match the training, or the evaluation data cannot be used.
    """

    def __init__(
        self,
        request: FitRequest,
        setup: TrainingSetup,
        components: TrainingComponents,
        source: Source,
        choice: MicroBatchChoice,
        folder: RunFolder | None,
        run: Mapping[str, Any],
        *,
        signals: StopSignals,
        notifier: EventNotifier,
        ranks: TrainingRanks,
    ) -> None:
        self.components, self.choice, self.progress = components, choice, Progress()
        self._source, self._signals, self._notifier, self._ranks = source, signals, notifier, ranks
        self._run, self._digest = run, setup.digest
        self._settings = None if folder is None else capture_settings(components.optimizer)
        source.part_size, source.multiple_of = choice.micro_batch, choice.multiple_of
        source.interruptible = signals.interruptible
        source.saves_position = folder is not None
        samples = source.samples_per_epoch
        updates = None if samples is None else samples // request.target_batch
        if samples is not None and updates is not None and (left := samples % request.target_batch):
            updates += left % source.multiple_of == 0
        self.goal = Goal(request.epochs, request.steps, updates)
        self._is_alone = ranks.size == 1
        # Several ranks stop between two updates, since a step has to end alike on all.
        check = signals.check if self._is_alone else lambda: None
        self.stepper = Stepper(request, components, choice, self.progress, check, notifier.notify)
        averaged = [] if components.averages is None else [components.averages.model]
        others = (*components.loss_modules, *averaged)
        ranks.copy_from_first(one for module in others for one in (*module.parameters(), *module.buffers()))
        self._evaluator = self._make_evaluator(request, setup)
        store = None if folder is None else folder.checkpoints
        self.checkpoint_writer = CheckpointWriter(
            store, request.checkpoint_every, self.progress, self.checkpoint_record, notifier.notify, ranks
        )

    def run(self) -> None:
        """Train to the goal, or until a callback ends it.

        After any exception except UpdateInterrupted, `progress` and all trained state are those of the last whole
        update.

        Raises:
            StopRequested: A signal asked the run to stop.
        """
        self._evaluator.run_missed()
        if not self.goal.is_reached(self.progress):
            self._source.start_epoch(self.progress.epoch)
        while not self.goal.is_reached(self.progress):
            self._signals.check()
            began = time.perf_counter()
            window = None if self._notifier.should_stop else self._source.next_window()
            self._ranks.agree_on_window(window, self._notifier)
            if self._notifier.should_stop:
                break
            if window is None:
                self._end_epoch()
            elif window.samples % self._source.multiple_of:
                self._drop(window)
            else:
                self._update(window, began)
                del window  # Free the whole effective batch before the next one is read.
                self._evaluator.run_if_due()
                self.checkpoint_writer.write_if_due()
        self._evaluator.run()
        self.checkpoint_writer.write()

    def checkpoint_record(self) -> dict[str, Any]:
        """Return the content of a checkpoint: plain values and tensors as of the last whole update."""
        plan, training = self.choice.plan, capture_training(self.components)
        first, *others = self._ranks.gather(training.pop("random"))
        return {
            "run": dict(self._run),
            "digest": self._digest,
            "settings": self._settings,
            "progress": dict(vars(self.progress)),
            "plan": None if plan is None else plan.to_json(),
            "micro_batch": self.choice.micro_batch,
            "stepper": self.stepper.state(),
            "evaluation": None if self._evaluator.evaluation is None else self._evaluator.evaluation.micro_batch,
            "data": self._source.state_dict(),
            "training": {**training, "random": first},
            "random_of_others": others,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore everything from `record` except random states, which are restored last.

        Raises:
            UsageError: The record belongs to another model or optimizer. The message names the difference; nothing is
                changed.
        """
        restore_training(record["training"], record["settings"], self.components)
        self._settings = record["settings"]
        vars(self.progress).update(record["progress"])
        self.stepper.restore(record["stepper"], same_plan=record["micro_batch"] == self.choice.micro_batch)
        if self._evaluator.evaluation is not None and record["evaluation"] is not None:
            evaluation = self._evaluator.evaluation
            evaluation.micro_batch = min(evaluation.micro_batch, record["evaluation"])
        note = self._source.load_state_dict(record["data"])
        if note is not None:
            self._notifier.notify(note)

    def _drop(self, window: Window) -> None:
        """Leave out the short window at the end of an epoch, with a notice."""
        multiple = self._source.multiple_of
        text = f"{window.samples} samples left over at the end of an epoch are dropped"
        self._notifier.notify(Notice(f"{text}: micro-batches are multiples of {multiple}", warns=False))
        self._source.commit()

    def _update(self, window: Window, began: float) -> None:
        learning_rate = self.stepper.learning_rate
        result = self.stepper.step(window.parts)
        # The update is made, or its window skipped: from here on it is never repeated, even if something raises.
        self._source.commit()
        self.progress.count(window.samples, result)
        self.stepper.after_update(result)
        seconds = time.perf_counter() - began
        updated = Updated(
            update=self.progress.update,
            epoch=self.progress.epoch + 1,
            samples=self.progress.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            samples_per_second=window.samples / seconds,
            peak_bytes=self.stepper.peak_bytes(),
            micro_batches=len(result.micro_batches),
            micro_batch=max(result.micro_batches, default=0),
            retries=result.retries,
            updated=result.updated,
            terms=result.terms if len(result.terms) > 1 else None,
            savers=self.stepper.savers or None,
        )
        self._notifier.notify(updated)

    def _end_epoch(self) -> None:
        ended = EpochEnded(self.progress.epoch + 1, self.progress.update, self.progress.epoch_samples)
        self.progress.epoch += 1
        self.progress.epoch_samples = 0
        if not self.goal.is_reached(self.progress):
            self._source.start_epoch(self.progress.epoch)
        self._notifier.notify(ended)
        self._evaluator.run_after_epoch()

    def _make_evaluator(self, request: FitRequest, setup: TrainingSetup) -> Evaluator:
        components, evaluation = self.components, None
        if setup.eval_data is not None:
            data = EvaluationData(setup.eval_data, collate=setup.collate, workers=request.workers)
            is_coupled = components.objective.coupled and components.evaluate is None
            size = setup.evaluation_batch
            evaluation = Evaluation(
                components.objective,
                components.evaluate,
                components.precision,
                data,
                micro_batch=self.choice.micro_batch if is_coupled else size or self.choice.micro_batch,
                loss_batch=size or request.target_batch if is_coupled else None,
                loss_modules=components.loss_modules,
                seed=derive_seed(request.seed, "evaluation"),
                interruptible=self._signals.interruptible,
                ranks=self._ranks,
            )
        return Evaluator(evaluation, components, request, self.progress, self._notifier.notify)
