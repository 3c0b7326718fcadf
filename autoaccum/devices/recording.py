"""From what a child answered, or how it died, to the record of a trial."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from autoaccum.devices.base import Trial
from autoaccum.devices.process import ChildDied
from autoaccum.devices.reading import Reading
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
