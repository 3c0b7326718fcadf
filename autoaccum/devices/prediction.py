"""What some devices tell beside their trials: what is predicted of a schedule, and what peaks to expect of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan records of a schedule that nothing really ran.

    Attributes:
        least_bytes: The smallest budget at which it would still run.
        band_bytes: How far off it may be whether it fits.
        warnings: Sentences for the plan.
        notes: Likewise.
    """

    least_bytes: int
    band_bytes: int
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Foresight:
    """What peaks to expect before any trial.

    Attributes:
        peak_bytes: The peak at a size of at least 2 samples, or None where it cannot be told; None: of no size.
        notes: Sentences for the plan.
    """

    peak_bytes: Callable[[int], int | None] | None = None
    notes: tuple[str, ...] = ()


@runtime_checkable
class Predicting(Protocol):
    """A device whose trials predict."""

    def predict(self, parts: tuple[int, ...]) -> Prediction:
        """What is predicted of `parts`, whose trial from a clean state ran.

        Raises:
            WorkloadError, NotMeasuredError: As a trial of them records it.
        """


@runtime_checkable
class Foreseeing(Protocol):
    """A device that can tell what peaks to expect."""

    def foresee(self, *, limit_seconds: float | None = None) -> Foresight:
        """What peaks to expect; where that cannot be told, nothing is lost but trials.

        Args:
            limit_seconds: What finding out may take, beside the start of a process; a limit of its own when None.
        """
