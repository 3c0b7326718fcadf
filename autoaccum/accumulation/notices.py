"""Warnings that point at the line of the user's that called."""

from __future__ import annotations

import inspect
import warnings


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
