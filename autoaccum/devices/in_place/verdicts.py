"""What an inspection or a trial in place ended with, as an error."""

from __future__ import annotations

import torch

from autoaccum.devices.diagnosis import describe_failure
from autoaccum.devices.failures import failure_error
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError

_RELOAD = "the model is not as it was: load it again before training"
_SHOWN = 8


def inspection_error(failure: BaseException, name: str, device: torch.device) -> BaseException:
    """The error an inspection of `name` on `device` ends with."""
    if isinstance(failure, UsageError | WorkloadError):
        return failure
    owner = "the machine" if device.type == "cpu" else str(device)
    return failure_error(describe_failure(failure, f"an update from a small batch of {name}"), owner)


def not_restored(what: Exception | list[str]) -> NotMeasuredError:
    """The error that says what a trial in place has changed for good."""
    if isinstance(what, Exception):
        text = (str(what).splitlines() or [""])[0]
        return NotMeasuredError(f"a trial in place could not be undone ({type(what).__name__}: {text})", hint=_RELOAD)
    listed = ", ".join(what[:_SHOWN]) + (f" and {len(what) - _SHOWN} more" if len(what) > _SHOWN else "")
    return NotMeasuredError(f"a trial in place has changed {listed}, which could not be put back", hint=_RELOAD)
