"""Updates of a training: the Accumulator under a ceiling that moves, with its news told."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.errors import NonFiniteError
from autoaccum.training.fit_events import CeilingRaised, OutOfMemoryRetry, Skipped
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.resume import MicroBatchChoice
from autoaccum.training.training_setup import TrainingComponents
from autoaccum.training.training_state import Progress
from autoaccum.workload.batches import batch_size

_MEASURE_ONLY = float("inf")
_PATIENCE = 32
_MOST_PATIENCE = 32
"""By how much patience grows at most: raises that keep failing come every 1,024 updates in the end."""

_NEAR = 8
"""What is less than an eighth below the planned size is raised to it."""


class Ceiling:
    """The most samples run at once, from update to update.

    The Accumulator lowers it when memory runs out; after `patience` updates without that it is raised halfway to the
    planned one, or to it once that is near. A raise has succeeded when it was calm for as long again, which restores
    the patience; one that fails doubles it, and what fitted before is taken again.

    >>> ceiling = Ceiling(256, patience=2)
    >>> [ceiling.after(retries, size) for retries, size in [(2, 100), (0, 100), (0, 100), (1, 90), (0, 100), (0, 100)]]
    [None, None, 178, 100, None, None]
    >>> ceiling.largest, ceiling.patience
    (100, 4)

    Args:
        planned: Where it begins, and what it never exceeds; at least 1.
        patience: Calm updates before a raise, at least 1.

    Attributes:
        largest: The ceiling now, in samples.
        patience: Calm updates before the next raise.
    """

    def __init__(self, planned: int, *, patience: int = _PATIENCE) -> None:
        self.planned = self.largest = planned
        self.patience = self._usual = patience
        self._calm = 0
        self._fitted: int | None = None  # What held before a raise that has not succeeded yet.

    def after(self, retries: int, micro_batch: int) -> int | None:
        """Take an update in, and say what the ceiling becomes; None where it stays what it is.

        Args:
            retries: How often the update was repeated because memory ran out.
            micro_batch: The Accumulator's ceiling after it.
        """
        self.largest = min(max(micro_batch, 1), self.planned)
        if retries:
            return self._fall()
        self._calm += 1
        if self._fitted is not None and self._calm >= self.patience:
            self._fitted, self.patience = None, self._usual
        if self._fitted is not None or self.largest == self.planned or self._calm < self.patience:
            return None
        return self._rise()

    def state(self) -> dict[str, int | None]:
        """What `restore` goes on from, as plain values."""
        return {"largest": self.largest, "calm": self._calm, "patience": self.patience, "fitted": self._fitted}

    def restore(self, state: Mapping[str, int | None]) -> None:
        """Go on from a `state`; under a smaller planned size than it was taken with, that size bounds it."""
        self.largest = min(max(state["largest"] or 1, 1), self.planned)
        self._calm = state["calm"] or 0
        self.patience = min(max(state["patience"] or 1, self._usual), self._usual * _MOST_PATIENCE)
        fitted = state["fitted"]
        self._fitted = None if fitted is None else min(fitted, self.planned)

    def _fall(self) -> int | None:
        fitted, self._fitted, self._calm = self._fitted, None, 0
        if fitted is None:
            return None
        self.patience = min(2 * self.patience, self._usual * _MOST_PATIENCE)
        if fitted <= self.largest:
            return None
        self.largest = fitted
        return fitted

    def _rise(self) -> int:
        self._fitted, self._calm = self.largest, 0
        halfway = (self.largest + self.planned + 1) // 2
        self.largest = self.planned if (self.planned - halfway) * _NEAR < self.planned else halfway
        return self.largest


class Stepper(StepObserver):
    """Makes one update from each window.

    Without a `clip_norm` in the request the norm is measured all the same, for the log.

    Args:
        progress: How far it is; counts what is skipped.
        check: Called as each phase of a step begins; what it raises rolls the step back.
        tell: Told of oom_retries, raises of the ceiling and skipped windows.

    Attributes:
        ceiling: How large micro-batches may be by now.

    Raises:
        UsageError: The plan is for something else.
    """

    def __init__(
        self,
        request: FitRequest,
        trainee: TrainingComponents,
        choice: MicroBatchChoice,
        progress: Progress,
        check: Callable[[], None],
        tell: Callable[[Any], None],
    ) -> None:
        self.ceiling = Ceiling(choice.micro_batch)
        self._trainee, self._progress, self._skips = trainee, progress, request.skip_nonfinite
        self._check, self._tell = check, tell
        self._retries = 0
        self._passed_over: str | None = None
        self._accumulator = Accumulator(
            trainee.model,
            trainee.optimizer,
            trainee.objective,
            plan=choice.plan,
            micro_batch=choice.micro_batch if choice.plan is None else None,
            clip_norm=_MEASURE_ONLY if request.clip_norm is None else request.clip_norm,
            precision=trainee.precision,  # type: ignore[arg-type]
            batchnorm=trainee.batchnorm,
            accumulate_in=trainee.accumulate_in,
            scaler=trainee.scaler,
            multiple_of=choice.multiple_of,
            check_finite=True,
            observer=self,
        )

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Those of the optimizer."""
        return optimizer_parameters(self._trainee.optimizer)

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter group, as the next update will have it; None where it has none."""
        rate = self._trainee.optimizer.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    @property
    def is_whole(self) -> bool:
        """Whether the state is that of a whole update; not so when one was cut in two, or could not be put back."""
        return not self._accumulator.is_interrupted

    def step(self, parts: list[Any]) -> StepResult:
        """Make the next update; where that was asked for, a window that is not finite is passed over.

        Nothing is raised once the update is made: what may raise waits for `follow`.

        Raises:
            NonFiniteError: Loss or gradient are not finite; everything is as before the step.
            DoesNotFitError: As `Accumulator.step_parts`, like the other errors.
        """
        self._passed_over, self._retries = None, 0
        if self._trainee.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._trainee.device)
        try:
            return self._accumulator.step_parts(parts)
        except NonFiniteError as error:
            if not self._skips:
                said = f"update {self._progress.update + 1}: {error.message}"
                raise NonFiniteError(said, loss=error.loss, grad_norm=error.grad_norm, hint=error.hint) from None
            self._passed_over = error.message
            sizes = tuple(batch_size(part) for part in parts)
            return StepResult(error.loss, sum(sizes), sizes, error.grad_norm, self._retries, False, {})

    def follow(self, result: StepResult) -> None:
        """What comes after an update that is counted: average of the weights, schedule, ceiling.

        Raises:
            WorkloadError: The model has other parameters or buffers than when its average began.
            Exception: What the scheduler or a callback raises.
        """
        if self._trainee.averages is not None and result.updated:
            self._trainee.averages.update()
        raised = self.ceiling.after(result.retries, self._accumulator.micro_batch)
        self._accumulator.micro_batch = self.ceiling.largest
        if result.updated and self._trainee.scheduler is not None:
            self._trainee.scheduler.step()  # Before anything is told: a callback that raises ends the run here.
        if raised is not None and not result.retries:
            self._tell(CeilingRaised(self._progress.update, raised))
        if self._passed_over is not None:
            self._progress.skipped += 1
            self._tell(Skipped(self._progress.update, self._passed_over))

    def peak_bytes(self) -> int | None:
        """The most memory of this update; None where it is not known.

        On a card: what PyTorch's allocator reserved at most; on the CPU: what the process ever held.
        """
        device = self._trainee.device
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved(device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if device.type == "cpu" else None

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as plain values."""
        return {"ceiling": self.ceiling.state()}

    def restore(self, state: Mapping[str, Any], *, same_plan: bool) -> None:
        """Go on from `state()` of an earlier run; the ceiling only where it was planned alike."""
        if same_plan:
            self.ceiling.restore(state["ceiling"])
            self._accumulator.micro_batch = self.ceiling.largest

    def phase(self, phase: StepPhase) -> None:
        """See `StepObserver`: the step hears here that it is to be left."""
        if phase != "update":  # By then the gradient is there: the loop stops right after the update.
            self._check()

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """See `StepObserver`: memory ran out, and the step is repeated."""
        self._retries += 1
        # Also for a step that ends without an update, and so does not lower it itself.
        self._accumulator.micro_batch = min(self._accumulator.micro_batch, next_micro_batch)
        self._tell(OutOfMemoryRetry(self._progress.update + 1, phase, micro_batch, next_micro_batch))
