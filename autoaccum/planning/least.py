"""The least budget at which a schedule still runs: pure decisions over a `trial(limit_bytes)` that somebody runs."""

from __future__ import annotations

from collections.abc import Callable

from autoaccum.devices.base import Trial
from autoaccum.errors import NotMeasuredError
from autoaccum.planning.search import SearchStopped
from autoaccum.units import MIB, format_bytes

_RESOLUTION_BYTES = 2 * MIB
_RESOLUTION_SHARE = 0.005
_FIRST_STEP_SHARE = 0.02


def find_least(trial: Callable[[int], Trial], *, limit_bytes: int, peak_bytes: int | None) -> tuple[int, str | None]:
    """Find the least budget under which a trial runs, by running it, and by one that did not run close below.

    The peak is where it starts from: an allocator may do with less (it gives its cache back and asks again) or need
    more (what it rounds up to). From there it gallops to the other side of the answer and bisects, to 2 MiB or 0.5 %.

    Args:
        trial: Runs the schedule held to a budget in bytes, or raises SearchStopped.
        limit_bytes: A budget under which it ran.
        peak_bytes: The peak of that run; None when not measured.

    Returns:
        The least budget in bytes under which it ran, and a sentence on what ended the search early, if anything did: a
        limit, or a trial that failed by something else than its budget: the schedule is proved without it.
    """
    runs, fails = limit_bytes, 0
    step = max(_RESOLUTION_BYTES, int(_FIRST_STEP_SHARE * limit_bytes))
    budget = limit_bytes - step if peak_bytes is None else min(max(peak_bytes, 1), limit_bytes - _RESOLUTION_BYTES)
    try:
        while runs - fails > _resolution(runs):
            tried = trial(budget)
            if tried.outcome == "error":
                return runs, f"the search for the least budget ended at {format_bytes(budget)}: {tried.message}"
            if tried.ran:
                runs = budget
            else:
                fails = budget
            step *= 2
            budget = _next(runs, fails, limit_bytes, step)
    except NotMeasuredError as error:
        return runs, f"the search for the least budget ended at {format_bytes(budget)}: {error.message}"
    except SearchStopped as stop:
        return runs, f"{stop} ended the search for the least budget: it may run with less than that"
    return runs, None


def _next(runs: int, fails: int, limit_bytes: int, step: int) -> int:
    middle = (runs + fails) // 2
    if not fails:
        return max(middle, runs - step)
    return min(middle, fails + step) if runs == limit_bytes else middle


def _resolution(budget_bytes: int) -> int:
    return max(_RESOLUTION_BYTES, int(_RESOLUTION_SHARE * budget_bytes))
