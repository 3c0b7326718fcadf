"""One update from each window, and the largest micro-batch from update to update."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult
from autoaccum.errors import NonFiniteError
from autoaccum.sources.batches import batch_size
from autoaccum.training.fit_events import Notice, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.training_setup import MicroBatchChoice, TrainingComponents
from autoaccum.training.training_state import Progress
from autoaccum.training.windows import Window

_MEASURE_ONLY = float("inf")
_PATIENCE, _MOST_PATIENCE = 32, 1024


class Ceiling:
    """The largest micro-batch, from update to update.

    The Accumulator lowers it when memory runs out. After `patience` updates without that, the planned size is tried
    again, and the patience doubles, up to 1,024 updates.

    >>> ceiling = Ceiling(256, patience=2)
    >>> [ceiling.record(retries, size) for retries, size in [(2, 100), (0, 100), (0, 100), (1, 90), (0, 90), (0, 90)]]
    [100, 100, 256, 90, 90, 90]
    """

    def __init__(self, planned: int, *, patience: int = _PATIENCE) -> None:
        self.planned = self.largest = planned
        self.patience, self.stable_updates = patience, 0

    def record(self, retries: int, micro_batch: int) -> int:
        """Record an update's `retries` and the Accumulator's ceiling after it; return the ceiling of the next one."""
        self.largest = min(micro_batch, self.planned)
        self.stable_updates = 0 if retries else self.stable_updates + 1
        if self.largest < self.planned and self.stable_updates >= self.patience:
            self.largest, self.stable_updates = self.planned, 0
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        return self.largest


class Stepper(StepObserver):
    """Makes one update from each window; without a `clip_norm`, the gradient's norm is still measured for the log.

    Args:
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
        self.has_failed = False
        self._components, self._progress, self._skip_nonfinite = components, progress, request.skip_nonfinite
        self._device, self._check, self._notify = components.device, check, notify
        self._retries = 0
        self._skip_reason: str | None = None
        self.accumulator = Accumulator(
            components.model,
            components.optimizer,
            components.objective,
            plan=choice.plan,
            micro_batch=choice.micro_batch if choice.plan is None else None,
            clip_norm=_MEASURE_ONLY if request.clip_norm is None else request.clip_norm,
            precision=components.spec.precision,
            batchnorm=components.spec.batchnorm,
            coupled=components.objective.coupled,
            accumulate_in=components.spec.accumulate_in,
            savers=components.spec.savers,
            add_savers=True,
            scaler=components.scaler,
            multiple_of=choice.multiple_of,
            check_finite=True,
            check=request.check,
            observer=self,
        )

    @property
    def added_savers(self) -> tuple[str, ...]:
        """The savers that were added because not even the smallest micro-batch fitted."""
        return tuple(word for word in self.accumulator.savers if word not in self._components.spec.savers)

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
            return self.accumulator.step_parts(parts)
        except NonFiniteError as error:
            if not self._skip_nonfinite:
                self.has_failed = True
                message = f"update {self._progress.update + 1}: {error.message}"
                raise NonFiniteError(message, loss=error.loss, grad_norm=error.grad_norm, hint=error.hint) from None
            self._skip_reason = error.message
            sizes = tuple(batch_size(part) for part in parts)
            return StepResult(error.loss, sum(sizes), sizes, error.grad_norm, self._retries, False, {})
        except BaseException:
            self.has_failed = not self.accumulator.has_agreed
            raise

    def after_update(self, window: Window, result: StepResult, began: float, learning_rate: float | None) -> Updated:
        """Count the update; update the averaged weights, the ceiling and the schedule; return the event.

        Args:
            window: The samples of the update.
            result: What `step` returned for them.
            began: When reading them began, by `time.perf_counter`.
            learning_rate: The rate of the update; None if the optimizer has none.

        Raises:
            WorkloadError: The model's parameters or buffers are not those that the average began with.
            Exception: As the scheduler or a callback raised it.
        """
        averages, scheduler, progress = self._components.averages, self._components.scheduler, self._progress
        progress.update += 1
        progress.samples += window.samples
        progress.epoch_samples += window.samples
        progress.oom_retries += result.retries
        progress.loss = result.loss
        if averages is not None and result.updated:
            averages.update()
        self.accumulator.micro_batch = self.ceiling.record(result.retries, self.accumulator.micro_batch)
        if scheduler is not None and result.updated:
            scheduler.step()  # Before any event: a callback that raises ends the run here.
        if self._skip_reason is not None:
            progress.skipped += 1
            self._notify(Notice(f"update {progress.update} is skipped: {self._skip_reason}", warns=False))
        return Updated(
            update=progress.update,
            epoch=progress.epoch + 1,
            samples=progress.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            samples_per_second=window.samples / (time.perf_counter() - began),
            peak_bytes=self._peak_bytes(),
            micro_batches=len(result.micro_batches),
            micro_batch=max(result.micro_batches, default=0),
            retries=result.retries,
            updated=result.updated,
            terms=result.terms if len(result.terms) > 1 else None,
            savers=self.accumulator.savers or None,
        )

    def _peak_bytes(self) -> int | None:
        """Return the peak memory of this update, as `Updated` describes it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if self._device.type == "cpu" else None

    def state_dict(self) -> dict[str, Any]:
        """Return how much memory the updates may take, as plain values."""
        return {"ceiling": dict(vars(self.ceiling)), "savers": list(self.added_savers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier run with the same micro-batch."""
        self.accumulator.restore_savers(state["savers"])
        vars(self.ceiling).update(state["ceiling"])
        self.accumulator.micro_batch = self.ceiling.largest

    def phase(self, phase: StepPhase) -> None:
        """Let a request to stop interrupt the step (see `StepObserver`)."""
        if phase != "update":  # The gradient is complete by then, and the run stops right after the update.
            self._check()

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """See `StepObserver`: memory ran out, and the step is repeated."""
        # A step that ends without an update would not lower it.
        self.accumulator.micro_batch = min(self.accumulator.micro_batch, next_micro_batch)
        self._tell_retry(phase, f"{micro_batch}, repeated with {next_micro_batch}", warns=False)

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        """See `StepObserver`: not even the smallest micro-batch fitted, and the step is repeated with a saver."""
        self._tell_retry(phase, f"{micro_batch}: this and later updates run with {saver}", warns=True)

    def _tell_retry(self, phase: StepPhase, what: str, *, warns: bool) -> None:
        self._retries += 1
        text = f"update {self._progress.update + 1}: out of memory in {phase} with {what}"
        self._notify(Notice(text, warns=warns))
