"""Updates of a training: the Accumulator, and a ceiling that adapts when memory runs out."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.sharded_tensors import local_part
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.errors import NonFiniteError
from autoaccum.training.fit_events import Notice
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.resume import MicroBatchChoice
from autoaccum.training.training_setup import TrainingComponents
from autoaccum.training.training_state import Progress
from autoaccum.workload.batches import batch_size

_MEASURE_ONLY = float("inf")
_PATIENCE = 32
_MOST_PATIENCE = 1024


class Ceiling:
    """The largest micro-batch, from update to update.

    The Accumulator lowers it when memory runs out. After `patience` updates without that, the planned size is tried
    again, and the patience doubles, up to 1,024 updates.

    >>> ceiling = Ceiling(256, patience=2)
    >>> [ceiling.record(retries, size) for retries, size in [(2, 100), (0, 100), (0, 100), (1, 90), (0, 90), (0, 90)]]
    [100, 100, 256, 90, 90, 90]

    Args:
        planned: The initial and the largest size, at least 1.
        patience: Updates without running out of memory before the planned size is tried again, at least 1.
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

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from the attributes of an earlier run; a smaller planned size than before limits it."""
        self.patience, self.stable_updates = state["patience"], state["stable_updates"]
        self.largest = min(state["largest"], self.planned)


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
