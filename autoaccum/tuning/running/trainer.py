"""The parent's side of a child that describes, times and trains: start it, load the workload, ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoaccum.devices.process import ChildDied, ChildProcess, where_to_import
from autoaccum.devices.recording import Failure, failure_error
from autoaccum.devices.worker import death_error
from autoaccum.errors import WorkloadError
from autoaccum.tuning.request import TuneRequest

LEAVE_SECONDS = 5.0
"""A child that is done may leave by itself, so that what the workload registered at exit runs."""

MOST_SECONDS = 3600.0
"""Of loading, or of the first updates with one size, or of all rounds of them: whatever takes longer hangs."""

_MODULE = "autoaccum.tuning.running.child"


def start_trainer(on_output: Callable[[str], None] | None = None) -> ChildProcess:
    """Start a child and have it import what all of them need; does not wait for that.

    Raises:
        UsageError: This process is such a child itself.
        NotMeasuredError: It cannot be started.
    """
    process = ChildProcess(_MODULE, on_output=on_output, measured=False)
    process.tell({"job": "prepare", **where_to_import()})
    return process


def load_request(request: TuneRequest) -> dict[str, Any]:
    """What has a child load the workload as a study asks for it."""
    names = ("reference", "precision", "batchnorm", "optimizer", "multiple_of")
    asked = {name: getattr(request, name) for name in names}
    return {"job": "load", **asked, **where_to_import()}


def check_unchanged(request: TuneRequest, digest: str, found: str) -> None:
    """Hold what a child has loaded to the `digest` of what the study is of.

    Raises:
        WorkloadError: The workload's source files were changed meanwhile.
    """
    if found != digest:
        raise WorkloadError(
            f"{request.reference} was changed while it is tuned, so that trials cannot be compared any more",
            hint="put it back and go on, or begin another study: --study NAME",
        )


def ask(
    process: ChildProcess, request: Mapping[str, Any], doing: str, limit_seconds: float = MOST_SECONDS
) -> dict[str, Any]:
    """Its reply to a request before any trial, which has to be a good one.

    Raises:
        WorkloadError: The workload cannot be used.
        DoesNotFitError: It runs the machine out of memory.
        NotMeasuredError: The process died.
    """
    try:
        reply = process.ask(request, limit_seconds)
    except ChildDied as death:
        raise death_error(death, doing, limit_seconds) from None
    if "failure" in reply:
        raise failure_error(Failure(**reply["failure"]), "the machine")
    return reply
