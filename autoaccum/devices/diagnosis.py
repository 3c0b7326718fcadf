"""What an exception in the child means: memory ran out, the user's code is at fault, or the measurement is."""

from __future__ import annotations

import re
import traceback
from typing import Literal

from autoaccum.accumulation.recovery import find_shortage, is_context_dead
from autoaccum.devices.recording import Failure
from autoaccum.errors import AutoaccumError, UsageError, WorkloadError, first_line
from autoaccum.units import GIB, KIB, MIB, format_bytes
from autoaccum.workload.tracebacks import blame_workload, is_own

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_USERS_FAULT = re.compile(r"device-side assert|illegal memory access", re.IGNORECASE)


def describe_failure(error: BaseException, doing: str, *, at: str = "") -> Failure:
    """Say what `error` means.

    Args:
        error: What ended a trial or an inspection.
        doing: What was going on, as the start of a sentence: `micro-batch 8 (forward)`.
        at: Goes in front of what an error of autoaccum's own says, which names what was going on by itself.
    """
    shortage = find_shortage(error)
    if shortage is not None:
        asked = _ASKED.search(str(error))
        more = f", which asked for {format_bytes(int(float(asked[1]) * _UNITS[asked[2]]))} more" if asked else ""
        return Failure(
            outcome="oom", message=f"{doing} ran out of memory ({shortage.text}{more})", certain=shortage.certain
        )
    if is_context_dead(error):
        return _describe_dead_context(error, doing)
    if isinstance(error, WorkloadError):
        return Failure(outcome="error", message=f"{at}{error}", traceback=error.user_traceback, blames="user")
    if isinstance(error, AutoaccumError):
        blames: Literal["user", "measurement"] = "user" if isinstance(error, UsageError) else "measurement"
        return Failure(outcome="error", message=f"{at}{error}", blames=blames)
    if is_own(error):
        whole = "".join(traceback.format_exception(error)).rstrip()
        return Failure(
            outcome="error",
            message=f"{doing} raised {type(error).__name__} inside of autoaccum: please report it",
            traceback=whole,
            blames="measurement",
        )
    blamed = blame_workload(error, doing)
    return Failure(outcome="error", message=blamed.message, traceback=blamed.user_traceback, blames="user")


def _describe_dead_context(error: BaseException, doing: str) -> Failure:
    """A card reports what went wrong on it late: the line it came out at is rarely the one at fault."""
    blamed = blame_workload(error, doing)
    return Failure(
        outcome="error",
        message=f"{doing} broke the card's context ({first_line(error)}): run it with CUDA_LAUNCH_BLOCKING=1"
        " to see which line did; an index out of range is the usual cause",
        traceback=blamed.user_traceback,
        blames="user" if _USERS_FAULT.search(str(error)) else "measurement",
    )
