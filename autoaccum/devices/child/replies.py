"""From what a child raises or answers, or how it died, to the record of a trial or an error."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoaccum.devices.base import Outcome, Trial
from autoaccum.devices.child.process import ChildDied
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.units import GIB, KIB, MIB, format_bytes

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_USERS_FAULT = re.compile(r"device-side assert|illegal memory access", re.IGNORECASE)
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def record_reply(reply: Mapping[str, Any], limit_bytes: int, about: Mapping[str, Any]) -> Trial:
    """The record of a trial that was held to `limit_bytes`, with the fields `about` that are known already.

    The reply has `seconds`, the fields of a `Reading`, and those of a `Failure` with its phase if there was one.
    """
    reading = Reading(**reply["reading"])
    measured = {
        **about,
        "peak_reserved_bytes": reading.peak_reserved_bytes,
        "peak_allocated_bytes": reading.peak_allocated_bytes,
        "allocator_retries": reading.retries,
        "seconds": reply["seconds"],
    }
    if "failure" in reply:
        return Trial(phase=reply.get("phase"), **reply["failure"], **measured)
    peak, shared = reading.peak_reserved_bytes or 0, reading.shared_bytes
    if shared and peak > limit_bytes:
        held = f"{format_bytes(peak)}, {format_bytes(shared)} of it shared memory, which no limit stops"
        return Trial(outcome="oom", phase="update", message=f"it ran, but held {held}", **measured)
    if reading.retries:
        times = "once" if reading.retries == 1 else f"{reading.retries} times"
        message = f"it ran, but the allocator released its cache and tried again {times}"
        return Trial(outcome="tight", message=message, **measured)
    if peak > limit_bytes and reading.retries is None:
        # The kernel has held it to the limit; its count of resident pages is some 100 KiB coarse.
        measured["peak_reserved_bytes"] = limit_bytes
    return Trial(outcome="ok", **measured)


def record_death(death: ChildDied, about: Mapping[str, Any]) -> Trial:
    """The record of a trial whose child will not answer any more."""
    message = f"micro-batch {max(about['parts'])}: the trial's process {death}"
    if death.out_of_memory:
        return Trial(outcome="oom", message=message, seconds=death.seconds, **about)
    timed_out = death.kind == "limit"
    message += ": raise --trial-limit" if timed_out else ""
    return Trial(
        outcome="error",
        message=message,
        blames="measurement",
        seconds=death.seconds,
        timed_out=timed_out,
        crashed=death.number in _FAULTS,
        **about,
    )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, as a record (see `devices.base.Trial` for the fields)."""

    outcome: Outcome
    message: str
    traceback: str | None = None
    certain: bool = True
    blames: Literal["user", "measurement"] | None = None


def describe_failure(error: BaseException, doing: str, *, at: str = "") -> Failure:
    """Say what `error` means.

    Args:
        error: What ended a trial or an inspection.
        doing: What was going on, as the start of a sentence: `micro-batch 8 (forward)`.
        at: Goes in front of what an error of autoaccum's own says, which names what was going on by itself.
    """
    from autoaccum.accumulation.recovery import (  # These need torch, a parent does not.
        find_out_of_memory,
        is_context_dead,
    )
    from autoaccum.workload.tracebacks import blame_workload, raised_by_autoaccum

    shortage = find_out_of_memory(error)
    if shortage is not None:
        asked = _ASKED.search(str(error))
        more = f", which asked for {format_bytes(int(float(asked[1]) * _UNITS[asked[2]]))} more" if asked else ""
        return Failure(
            outcome="oom", message=f"{doing} ran out of memory ({shortage.text}{more})", certain=shortage.certain
        )
    if is_context_dead(error):  # A card reports late: the line it came out at is rarely the one at fault.
        return Failure(
            outcome="error",
            message=f"{doing} broke the card's context ({first_line(error)}): run it with CUDA_LAUNCH_BLOCKING=1"
            " to see which line did; an index out of range is the usual cause",
            traceback=blame_workload(error, doing).user_traceback,
            blames="user" if _USERS_FAULT.search(str(error)) else "measurement",
        )
    if isinstance(error, WorkloadError):
        return Failure(outcome="error", message=f"{at}{error}", traceback=error.user_traceback, blames="user")
    if isinstance(error, AutoaccumError):
        blames: Literal["user", "measurement"] = "user" if isinstance(error, UsageError) else "measurement"
        return Failure(outcome="error", message=f"{at}{error}", blames=blames)
    if raised_by_autoaccum(error):
        whole = "".join(traceback.format_exception(error)).rstrip()
        return Failure(
            outcome="error",
            message=f"{doing} raised {type(error).__name__} inside of autoaccum: please report it",
            traceback=whole,
            blames="measurement",
        )
    blamed = blame_workload(error, doing)
    return Failure(outcome="error", message=blamed.message, traceback=blamed.user_traceback, blames="user")


def failure_error(failure: Failure, owner: str) -> AutoaccumError:
    """The error that ends a plan by a failure before any trial; `owner` is whose memory it was."""
    if failure.outcome == "oom":
        return DoesNotFitError(failure.message, hint=f"it needs more memory than {owner} has free")
    if failure.blames == "user":
        return WorkloadError(failure.message, user_traceback=failure.traceback)
    detail = f"\n{failure.traceback}" if failure.traceback else ""
    return NotMeasuredError(failure.message + detail)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory a job took of the kind it is limited in; None where that kind does not tell.

    Attributes:
        peak_reserved_bytes: The most that was held, as the limit counts it.
        peak_allocated_bytes: The most that tensors held.
        shared_bytes: How much of it is shared memory, which no limit stops.
        retries: How often the allocator released its cache and tried again.
    """

    peak_reserved_bytes: int | None
    peak_allocated_bytes: int | None = None
    shared_bytes: int = 0
    retries: int | None = None


def without_stretch(reading: Reading, beside: Sequence[Reading]) -> Reading:
    """`reading`, in whose retries those from the first to the last of `beside` do not count.

    An evaluation and the update behind it find the other's memory cached, and may have the allocator release it: once
    for each evaluation, which makes no size a slow one.

    >>> before, behind, end = (Reading(peak_reserved_bytes=9, retries=retries) for retries in (1, 4, 5))
    >>> without_stretch(end, [before, behind]).retries
    2
    """
    if len(beside) < 2 or reading.retries is None:
        return reading
    between = (beside[-1].retries or 0) - (beside[0].retries or 0)
    return replace(reading, retries=max(0, reading.retries - between))
