"""What went wrong in a child, as a record, and the error it is for whoever asked: without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoaccum.devices.base import Outcome
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, WorkloadError


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, as a record (see `devices.base.Trial` for the fields)."""

    outcome: Outcome
    message: str
    traceback: str | None = None
    certain: bool = True
    blames: Literal["user", "measurement"] | None = None


def failure_error(failure: Failure, owner: str) -> AutoaccumError:
    """The error that ends a plan by a failure before any trial.

    Args:
        failure: Of loading or of the inspection.
        owner: Whose memory it was, as the subject of `... has free`.
    """
    if failure.outcome == "oom":
        return DoesNotFitError(failure.message, hint=f"it needs more memory than {owner} has free")
    if failure.blames == "user":
        return WorkloadError(failure.message, user_traceback=failure.traceback)
    detail = f"\n{failure.traceback}" if failure.traceback else ""
    return NotMeasuredError(failure.message + detail)
