"""A step from without: its phases, its result, who is told of it, and what it warns of."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

StepPhase: TypeAlias = Literal["batch", "forward", "backward", "clip", "update"]
"""`batch`: cutting, weighing and moving it. `clip`: unscaling, the norm, reading the loss. `update`: from the last
rounding of the gradients to the scheduler's step."""


@dataclass(frozen=True)
class StepResult:
    """What one update was.

    Attributes:
        loss: The loss of the effective batch: what the full batch's forward would have given, the sum of `terms`
            that have weight; NaN when nothing had any.
        samples: Samples in the effective batch.
        micro_batches: The sizes it was cut into, in order; they add up to `samples`.
        grad_norm: The 2-norm of the gradients the optimizer was to apply, before clipping; None without `clip_norm`.
        retries: How often the batch was repeated with smaller micro-batches because memory ran out.
        updated: False when no update was made: nothing had weight, or the scaler found gradients not finite.
        terms: The terms of the loss by name; `{"loss": ...}` when it is one number.
    """

    loss: float
    samples: int
    micro_batches: tuple[int, ...]
    grad_norm: float | None
    retries: int
    updated: bool
    terms: Mapping[str, float]


class StepObserver:
    """Hears of a step from within; derive from it and override what is of interest.

    What `phase` raises ends the step, which is rolled back.
    """

    def phase(self, phase: StepPhase) -> None:
        """A phase begins: `batch`, `forward` and `backward` of each part, `clip`, `update`."""

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """Memory ran out in `phase` with parts of up to so many samples; all is put back, smaller ones are next."""


class AccumulationWarning(UserWarning):
    """Accumulating changes something here, or could not be undone: said once for each Accumulator."""


class WeightingWarning(AccumulationWarning):
    """The parts are likely weighted otherwise than the loss divides; where values are, an experiment knows more."""


def warn_caller(message: str, category: type[AccumulationWarning] = AccumulationWarning) -> None:
    """Warn at the nearest frame outside this package, so that Python's filters know one caller from another."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "autoaccum":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
