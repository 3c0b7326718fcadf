"""The phases and the result of a step, the observer that follows it, and its warnings."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoaccum.errors import NonFiniteError

StepPhase: TypeAlias = Literal["batch", "forward", "backward", "clip", "update"]
"""`batch`: split, weight and move the batch. `clip`: unscale gradients, measure the norm, read the loss. `update`:
round summed gradients to their dtype, run the optimizer and the scheduler."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: The loss of the effective batch, as the full batch's forward would have given it: the sum of the `terms`
            that have weight. NaN when none has.
        samples: The number of samples in the effective batch.
        micro_batches: The sizes it was split into, in order; they add up to `samples`.
        grad_norm: The 2-norm of the gradients before clipping; None without `clip_norm`.
        retries: How often memory ran out and the batch was repeated, in smaller micro-batches or with one more saver.
        updated: False when no update was made: no part had weight, or the scaler found gradients that are not finite.
        terms: The terms of the loss by name; `{"loss": ...}` when it is one number.
    """

    loss: float
    samples: int
    micro_batches: tuple[int, ...]
    grad_norm: float | None
    retries: int
    updated: bool
    terms: Mapping[str, float]


def refuse_nonfinite(loss: float, norm: float | None, *, is_scaled: bool) -> None:
    """Raise NonFiniteError for a loss or a norm that is not finite.

    A scaler skips what overflowed by its own scale: with one, only a loss of NaN is refused.
    """
    seen = None
    if math.isnan(loss) or (not is_scaled and math.isinf(loss)):
        seen = f"the loss is {loss}"
    if not is_scaled and not math.isfinite(norm or 0.0):
        seen = f"the gradient's norm is {norm}"
    if seen is not None:
        raise NonFiniteError(
            f"{seen}, the update was not made",
            loss=loss,
            grad_norm=norm,
            hint="lower the learning rate, clip the gradient, or look at this batch",
        )


class StepObserver:
    """Follows the progress of a step; derive from it and override the methods you need.

    An exception that `phase` raises ends the step, which is then rolled back.
    """

    def phase(self, phase: StepPhase) -> None:
        """Called as a phase begins: `batch`, `forward` and `backward` for each part, then `clip` and `update`."""

    def part(self, index: int) -> None:
        """Called when the part `index` begins or goes on, where parts run in lock step."""

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """Called after memory ran out in `phase` and the state was restored, before a retry at `next_micro_batch`."""

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        """Called as `out_of_memory`, where no smaller micro-batch is left: the retry, and all later, have a saver."""


class AccumulationWarning(UserWarning):
    """A warning that accumulation differs from the full batch here, given once for each Accumulator."""


class WeightingWarning(AccumulationWarning):
    """A warning that the parts' weights probably differ from the number that the loss divides by."""


def warn_caller(message: str, category: type[AccumulationWarning] = AccumulationWarning) -> None:
    """Warn at the nearest frame outside this package, so that Python's warning filters see the caller's line."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "autoaccum":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
