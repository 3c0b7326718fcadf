"""From a request to what a study has to know of its workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autoaccum.planning.device_choice import check_device
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.trainer import LEAVE_SECONDS, MOST_SECONDS, ask, load_request, start_trainer

_LEAST_SECONDS = 60.0
"""Of loading and of building, under any limit on time: PyTorch is imported meanwhile."""


def describe(request: TuneRequest, *, on_output: Callable[[str], None] | None = None) -> Facts:
    """Load the workload in a process of its own, and build what it trains.

    Args:
        request: What the study is asked to do.
        on_output: Gets each line the workload prints; None: it goes to stderr.

    Raises:
        UsageError: There is no such device.
        WorkloadError: The workload cannot be loaded, or cannot be tuned.
        DoesNotFitError: Loading it runs the machine out of memory.
        NotMeasuredError: The process cannot be started, or died.
    """
    check_device(request.device)
    process = start_trainer(on_output)
    try:
        limit = MOST_SECONDS if request.time_limit is None else max(request.time_limit, _LEAST_SECONDS)
        ask(process, load_request(request), "loading the workload", limit)
        facts = ask(process, _describe_request(request), "building the workload", limit)["facts"]
        return Facts(**{**facts, "batchnorms": tuple(facts["batchnorms"])})
    finally:
        process.end(grace_seconds=LEAVE_SECONDS)


def _describe_request(request: TuneRequest) -> dict[str, Any]:
    return {
        "job": "describe",
        "device": request.device,
        "target_batch": request.target_batch.high,
        "least_batch": request.target_batch.low,
        "budget": None if request.budget is None else dataclasses.asdict(request.budget),
    }
