"""From what a child answers, or how it died, to the record of a trial or an error."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoaccum.devices.base import Outcome, Trial
from autoaccum.devices.process import ChildDied
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, WorkloadError
from autoaccum.units import format_bytes

_LONGER = "raise --trial-limit"
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def record_reply(reply: Mapping[str, Any], limit_bytes: int, about: Mapping[str, Any]) -> Trial:
    """The record of a trial that the child has answered for.

    Args:
        reply: `seconds`, the fields of a `Reading`, and of a `Failure` with its phase if there was one.
        limit_bytes: What the trial was held to.
        about: Fields of the record that are known already: `parts` among them.
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
        failure = dict(reply["failure"])
        if failure["outcome"] == "oom":
            failure["message"] += _taken_by_others(reading, limit_bytes)
        return Trial(phase=reply.get("phase"), **failure, **measured)
    peak, shared = reading.peak_reserved_bytes or 0, reading.shared_bytes
    if shared and peak > limit_bytes:
        held = f"{format_bytes(peak)}, {format_bytes(shared)} of it shared memory, which no limit stops"
        return Trial(outcome="oom", phase="update", message=f"it ran, but held {held}", **measured)
    if reading.retries:
        return Trial(outcome="tight", message=_tight_message(reading), **measured)
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
    if timed_out:
        message += f": {_LONGER}"
    return Trial(
        outcome="error",
        message=message,
        blames="measurement",
        seconds=death.seconds,
        timed_out=timed_out,
        crashed=death.number in _FAULTS,
        **about,
    )


def _tight_message(reading: Reading) -> str:
    times = "once" if reading.retries == 1 else f"{reading.retries} times"
    refused = ", and was refused all the same where a smaller workspace did" if reading.refusals else ""
    return f"it ran, but the allocator released its cache and tried again {times}{refused}"


def _taken_by_others(reading: Reading, limit_bytes: int) -> str:
    """Whether less was there than the budget promises: somebody else has come to the card since it was set."""
    available = reading.available_bytes
    if available is None or available >= limit_bytes:
        return ""
    return (
        f"; only {format_bytes(available)} of the budget of {format_bytes(limit_bytes)} were there: other processes"
        " have taken the rest since"
    )


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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory a job took of the kind it is limited in; None where that kind does not tell.

    Attributes:
        peak_reserved_bytes: The most that was held, as the limit counts it.
        peak_allocated_bytes: The most that tensors held.
        shared_bytes: How much of it is shared memory, which no limit stops.
        retries: How often the allocator released its cache and tried again.
        refusals: How often it said no all the same.
        available_bytes: What the process could hold at the end, if nobody limited it.
    """

    peak_reserved_bytes: int | None
    peak_allocated_bytes: int | None = None
    shared_bytes: int = 0
    retries: int | None = None
    refusals: int | None = None
    available_bytes: int | None = None


def without_stretch(reading: Reading, beside: Sequence[Reading]) -> Reading:
    """`reading`, in whose retries and refusals those from the first to the last of `beside` do not count.

    An evaluation and the update behind it find the other's memory cached, and may have the allocator release it: once
    for each evaluation, which makes no size a slow one.

    >>> before, behind, end = (Reading(peak_reserved_bytes=9, retries=retries) for retries in (1, 4, 5))
    >>> without_stretch(end, [before, behind]).retries
    2
    """
    if len(beside) < 2:
        return reading
    first, last = beside[0], beside[-1]
    return replace(
        reading,
        retries=_less(reading.retries, first.retries, last.retries),
        refusals=_less(reading.refusals, first.refusals, last.refusals),
    )


def _less(count: int | None, start: int | None, end: int | None) -> int | None:
    """A counter without what it went up by from `start` to `end`; None where it does not tell."""
    if count is None or start is None or end is None:
        return count
    return max(0, count - (end - start))
