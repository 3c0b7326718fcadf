"""Explain the memory of a proved schedule, where that is requested and the device can."""

from __future__ import annotations

from autoaccum.devices.explanation import Explanation
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.planning.plan_events import Explained, ExplanationStarted, Listener
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.trial_runner import SearchLimits


def explain_memory(
    setup: PlanSetup, request: PlanRequest, parts: tuple[int, ...], limits: SearchLimits, notify: Listener
) -> tuple[Explanation | None, tuple[str, ...]]:
    """Return the explanation of the memory of `parts`, if requested, and notes on what is missing.

    Whatever prevents it becomes a note, since the schedule is proved already. `notify` gets the whole report.
    """
    device = setup.device
    wanted = {
        "changes": request.explain or request.report,
        "curve": request.picture or request.report,
    }
    if not any(wanted.values()) or "explain" not in device.capabilities:
        return None, ()
    notify(ExplanationStarted())
    try:
        seconds = limits.seconds_left(None, 0.0)
        account = device.explain(parts, limit_seconds=seconds, **wanted)
    except SearchStopped as stopped:
        return None, (f"where the memory goes was not traced: {stopped} was over",)
    except KeyboardInterrupt:  # The proved schedule is worth more; a second Ctrl-C ends that too.
        return None, ("where the memory goes is not known (it was interrupted)",)
    except (WorkloadError, UsageError, NotMeasuredError) as error:
        return None, (f"where the memory goes is not known ({first_line(error.message)})",)
    notify(Explained(account))
    return (account.explanation, account.notes) if request.explain else (None, ())
