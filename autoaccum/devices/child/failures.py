"""Failures in a child: exceptions as records, its death, and the errors that its parent raises for them."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Literal

from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.units import GIB, KIB, MIB, format_bytes

Outcome = Literal["ok", "tight", "oom", "error"]
"""`ok`: it ran. `tight`: it ran, but only after the allocator had released its cache and tried again. `oom`: it ran out
of memory. `error`: it failed for another reason, so that a smaller batch would not help."""

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_USERS_FAULT = re.compile(r"device-side assert|illegal memory access", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, or the death of a child, as a record; `devices.base.Trial` describes most fields.

    `is_usage`: whether it is raised as a `UsageError`.
    """

    outcome: Outcome
    message: str
    traceback: str | None = None
    is_definite_oom: bool = True
    fault: Literal["user", "measurement"] | None = None
    is_usage: bool = False


class JobFailed(Exception):
    """A job failed in a child, which can run another."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ChildDied(JobFailed):
    """A child died or was ended during a job.

    Attributes:
        signal: The signal that ended it; None if none did.
        timed_out: Whether it took too long.
        seconds: The time from the request until its end was noticed.
    """

    def __init__(self, failure: Failure, *, signal: int | None = None, timed_out: bool = False) -> None:
        super().__init__(failure)
        self.signal, self.timed_out = signal, timed_out
        self.seconds = 0.0


def describe_failure(error: BaseException, doing: str, *, at: str = "") -> Failure:
    """Describe `error` as a record: its kind, a message, and who is to blame.

    Args:
        error: The exception that ended a job.
        doing: The job, as the start of a sentence: `micro-batch 8, forward`.
        at: A prefix for the message of autoaccum's own errors, which are sentences already.
    """
    from autoaccum.accumulation.out_of_memory import (  # They import torch, which the parent avoids.
        find_out_of_memory,
        is_context_dead,
    )
    from autoaccum.tracebacks import blame_workload, raised_by_autoaccum

    oom = find_out_of_memory(error)
    if oom is not None:
        found = _REQUESTED.search(str(error))
        more = f", which asked for {format_bytes(int(float(found[1]) * _UNITS[found[2]]))} more" if found else ""
        return Failure(
            outcome="oom", message=f"{doing} ran out of memory ({oom.text}{more})", is_definite_oom=oom.is_definite_oom
        )
    if is_context_dead(error):  # CUDA reports errors late: the line that raises is rarely at fault.
        return Failure(
            outcome="error",
            message=f"{doing} broke the card's context ({first_line(error)}): run it with CUDA_LAUNCH_BLOCKING=1"
            " to see which line did; an index out of range is the usual cause",
            traceback=blame_workload(error, doing).user_traceback,
            fault="user" if _USERS_FAULT.search(str(error)) else "measurement",
        )
    if isinstance(error, WorkloadError):
        return Failure(outcome="error", message=f"{at}{error}", traceback=error.user_traceback, fault="user")
    if isinstance(error, AutoaccumError):
        fault: Literal["user", "measurement"] = "user" if error.exit_code == UsageError.exit_code else "measurement"
        return Failure(outcome="error", message=f"{at}{error}", fault=fault)
    if raised_by_autoaccum(error):
        whole = "".join(traceback.format_exception(error)).rstrip()
        return Failure(
            outcome="error",
            message=f"{doing} raised {type(error).__name__} inside of autoaccum: please report it",
            traceback=whole,
            fault="measurement",
        )
    blamed = blame_workload(error, doing)
    return Failure(outcome="error", message=blamed.message, traceback=blamed.user_traceback, fault="user")


def failure_error(failure: Failure, owner: str) -> AutoaccumError:
    """Return the error for a failure before any trial; `owner` is the machine or card whose memory ran out."""
    if failure.outcome == "oom":
        return DoesNotFitError(failure.message, hint=f"it needs more memory than {owner} has free")
    if failure.is_usage:
        return UsageError(failure.message)
    if failure.fault == "user":
        return WorkloadError(failure.message, user_traceback=failure.traceback)
    detail = f"\n{failure.traceback}" if failure.traceback else ""
    return NotMeasuredError(failure.message + detail)
