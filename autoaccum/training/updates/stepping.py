"""Updates of a training: the Accumulator under a ceiling that moves, with its news told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.observers import StepObserver, StepPhase, StepResult
from autoaccum.accumulation.planned import PlanLike
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.errors import NonFiniteError
from autoaccum.training.events import CeilingRaised, ShortageMet, Skipped
from autoaccum.training.progress import Progress
from autoaccum.training.results import NoiseScale
from autoaccum.training.subjects.trainee import Trainee
from autoaccum.training.updates.ceiling import Ceiling
from autoaccum.training.updates.noise_observer import NoiseObserver
from autoaccum.workload.batches import batch_size

_MEASURE_ONLY = float("inf")
_MOST_OVERFLOWS = 32
"""Each halves the loss scale, which begins at 2^16: by then it is 2^-16."""


class Stepper:
    """Makes one update from each window.

    Args:
        trainee: What is trained.
        progress: How far it is; counts what is skipped.
        plan: What the micro-batch comes from; None where it was given.
        micro_batch: The ceiling to begin with, in samples.
        clip_norm: As the Accumulator's; None measures the norm only, for the log and to see that it is finite.
        skip_nonfinite: Pass over windows whose loss or gradient is not finite, instead of ending there.
        multiple_of: What micro-batches are multiples of.
        noise_scale: Estimate the gradient noise scale.
        check: Called as each phase of a step begins; what it raises rolls the step back.
        tell: Told of shortages, raises of the ceiling and skipped windows.

    Attributes:
        ceiling: How large micro-batches may be by now.

    Raises:
        UsageError: The plan is for something else.
    """

    def __init__(
        self,
        trainee: Trainee,
        progress: Progress,
        *,
        plan: PlanLike | None,
        micro_batch: int,
        clip_norm: float | None,
        skip_nonfinite: bool,
        multiple_of: int = 1,
        noise_scale: bool,
        check: Callable[[], None],
        tell: Callable[[Any], None],
    ) -> None:
        self.ceiling = Ceiling(micro_batch)
        self._noise: NoiseObserver | None = None
        if noise_scale:
            trained = optimizer_parameters(trainee.optimizer)
            self._noise = NoiseObserver(trained, trainee.objective.reduction)
        self._tell, self._skips = tell, skip_nonfinite
        self._optimizer, self._scheduler, self._progress = trainee.optimizer, trainee.scheduler, progress
        self._overflows = 0
        self._passed_over: str | None = None
        self._scales, self._averages = trainee.scaler is not None, trainee.averages
        self._watch = _Watch(progress, check, tell, self._noise)
        self._accumulator = Accumulator(
            trainee.model,
            trainee.optimizer,
            trainee.objective,
            plan=plan,
            micro_batch=None if plan is not None else micro_batch,
            clip_norm=_MEASURE_ONLY if clip_norm is None else clip_norm,
            precision=trainee.precision,  # type: ignore[arg-type]
            batchnorm=trainee.batchnorm,
            accumulate_in=trainee.accumulate_in,
            scaler=trainee.scaler,
            multiple_of=multiple_of,
            check_finite=True,
            observer=self._watch,
        )

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Those of the optimizer."""
        return optimizer_parameters(self._optimizer)

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale by now, in samples; None where it is not known."""
        estimate = self.estimate_noise()
        return None if estimate is None else estimate.value

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter group, as the next update will have it; None where it has none."""
        rate = self._optimizer.param_groups[0].get("lr")
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
        self._passed_over = None
        self._watch.retries = 0
        try:
            return self._accumulator.step_parts(parts)
        except NonFiniteError as error:
            if not self._skips:
                raise _of_update(error, self._progress.update + 1) from None
            self._passed_over = error.message
            self._accumulator.micro_batch = self._watch.least(self._accumulator.micro_batch)
            sizes = tuple(batch_size(part) for part in parts)
            return StepResult(error.loss, sum(sizes), sizes, error.grad_norm, self._watch.retries, False, {})

    def follow(self, result: StepResult) -> None:
        """What comes after an update that is counted: average of the weights, schedule, ceiling, noise scale.

        Raises:
            WorkloadError: The model has other parameters or buffers than when its average began.
            NonFiniteError: The gradient overflows at every loss scale.
            Exception: What the scheduler or a callback raises.
        """
        if self._averages is not None and result.updated:
            self._averages.update()
        if self._noise is not None:
            self._noise.take(result)
        self._follow_ceiling(result)
        if self._passed_over is not None:
            self._progress.skipped += 1
            self._tell(Skipped(self._progress.update, self._passed_over))
        if result.updated and self._scheduler is not None:
            self._scheduler.step()
        self._check_scale(result)

    def estimate_noise(self) -> NoiseScale | None:
        """The gradient noise scale by now; None where it was not asked for."""
        return None if self._noise is None else self._noise.estimate()

    def close(self) -> None:
        """Listen to no gradient any more."""
        if self._noise is not None:
            self._noise.close()

    def noise_state(self) -> dict[str, Any] | None:
        """What the estimate of the noise scale goes on from."""
        return None if self._noise is None else self._noise.state()

    def restore_noise(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `noise_state()` of an earlier run, if that estimated it, too."""
        if self._noise is not None and state is not None:
            self._noise.restore(state)

    def restore_ceiling(self, state: Mapping[str, int | None]) -> None:
        """Go on from `ceiling.state()` of an earlier run."""
        self.ceiling.restore(state)
        self._accumulator.micro_batch = self.ceiling.largest

    def _check_scale(self, result: StepResult) -> None:
        """End a run whose gradients overflow at every loss scale: it would train nothing, and say nothing."""
        overflowed = self._scales and not result.updated and bool(result.terms)
        self._overflows = self._overflows + 1 if overflowed else 0
        if self._overflows >= _MOST_OVERFLOWS:
            raise NonFiniteError(
                f"update {self._progress.update}: {self._overflows} times in a row the gradient was not finite at any"
                " loss scale",
                loss=result.loss,
                grad_norm=result.grad_norm,
                hint='look for what overflows in fp16, or train in precision="bf16" or "fp32"',
            )

    def _follow_ceiling(self, result: StepResult) -> None:
        """Keep to what fits by now, and try more after a calm stretch."""
        changed = self.ceiling.after(result.retries, self._accumulator.micro_batch)
        self._accumulator.micro_batch = self.ceiling.largest
        if changed is not None and not result.retries:
            self._tell(CeilingRaised(self._progress.update, changed))


class _Watch(StepObserver):
    """Hears of a step from within, and passes it on.

    Attributes:
        retries: How often the step was repeated because memory ran out.
    """

    def __init__(
        self,
        progress: Progress,
        check: Callable[[], None],
        tell: Callable[[Any], None],
        noise: NoiseObserver | None,
    ) -> None:
        self.retries = 0
        self._progress, self._check, self._tell, self._noise = progress, check, tell, noise
        self._largest = 0

    def phase(self, phase: StepPhase) -> None:
        if self._noise is not None:
            self._noise.phase(phase)
        if phase != "update":  # By then the gradient is there: the loop stops right after the update.
            self._check()

    def part(self, samples: int, share: float | None, factor: float) -> None:
        if self._noise is not None:
            self._noise.part(samples, share, factor)

    def shortage(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        self.retries += 1
        self._largest = next_micro_batch
        self._tell(ShortageMet(self._progress.update + 1, phase, micro_batch, next_micro_batch))

    def least(self, micro_batch: int) -> int:
        """The ceiling after a step that began with `micro_batch` and ended without an update."""
        return min(micro_batch, self._largest) if self.retries else micro_batch


def _of_update(error: NonFiniteError, update: int) -> NonFiniteError:
    return NonFiniteError(
        f"update {update}: {error.message}", loss=error.loss, grad_norm=error.grad_norm, hint=error.hint
    )
