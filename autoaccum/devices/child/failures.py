"""Failures of a child: what it raised, as a record, and how it died; and the errors that these are in the parent."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Literal

from autoaccum.devices.base import Outcome
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.units import GIB, KIB, MIB, format_bytes

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_USERS_FAULT = re.compile(r"device-side assert|illegal memory access", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, as a record (see `devices.base.Trial` for the fields)."""

    outcome: Outcome
    message: str
    traceback: str | None = None
    certain: bool = True
    blames: Literal["user", "measurement"] | None = None


class JobFailed(Exception):
    """A child has replied that its job failed; it can go on with another."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


Death = Literal["signal", "exit", "limit", "pipe"]


class ChildDied(Exception):
    """A child that will not answer any more, and has been ended; its text is a predicate ("was ended by SIGSEGV").

    Attributes:
        kind: "signal" or "exit": by itself; "limit": it took too long and was ended; "pipe": it closed its connection,
            and was ended.
        out_of_memory: It died by SIGKILL, and the kernel's count of kills for lack of memory rose meanwhile.
        number: The signal's, where the kind is "signal".
        seconds: From the request until its end was noticed.
    """

    def __init__(self, kind: Death, text: str, *, out_of_memory: bool = False, number: int | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.out_of_memory = out_of_memory
        self.number = number
        self.seconds = 0.0


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


def death_error(death: ChildDied, doing: str, limit_seconds: float) -> AutoaccumError:
    """The error that the death of a child is before any trial, `doing` such as `loading the workload`."""
    if death.kind == "limit":
        return NotMeasuredError(
            f"{doing} took longer than {limit_seconds:g} s, and was ended",
            hint="look for what does not end there, or raise --time-limit or --trial-limit",
        )
    message = f"{doing}: its process {death}"
    if death.out_of_memory:
        return DoesNotFitError(message, hint="it needs more memory than the machine has free")
    return NotMeasuredError(message)
