"""What one case takes now, by a simulation or by runs of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.checkout import Checkout
from autoaccum.errors import DoesNotFitError, UsageError
from autoaccum.guarding.measuring.repeated_measuring import measure_by_runs
from autoaccum.guarding.measuring.simulated_measuring import measure_simulated
from autoaccum.guarding.measuring.sizing import Task
from autoaccum.guarding.records import Case, Measured, Measurement
from autoaccum.options import Options
from autoaccum.planning.events import Listener
from autoaccum.planning.request import Request
from autoaccum.planning.subjects import find_subject
from autoaccum.units import precise_bytes

_ASKED = ("gpu", "precision", "optimizer", "memory", "reserve", "keeps", "evaluation_batch", "worst_of", "batchnorm")


def measure(
    case: Case,
    checkout: Checkout,
    *,
    micro_batches: tuple[int, ...] | None = None,
    time_limit: float | None = None,
    is_stopped: Callable[[], bool] | None = None,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Measured:
    """Measure what a schedule takes, and search for the largest micro-batch that fits, as a plan does.

    On a simulated card one process traces the workload, and the figures are exact and repeatable; for a device that is
    here see `measure_by_runs`.

    Args:
        case: What is measured. Its `micro_batch` is both the size that is measured and the largest that is tried.
        checkout: Where the workload lies.
        micro_batches: The schedule, in samples, whether it fits or not; None: the one that is planned, and has to.
        time_limit: Seconds that the search may take; nothing is told where they are too few.
        is_stopped: As in `TrialSettings`.
        on_event: Told of every step, with a record of `autoaccum.planning.events`.
        on_output: Given what the workload prints, line by line; stderr otherwise.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As from `plan`.
        DoesNotFitError: Likewise; not where `micro_batches` are given and can be loaded.
    """
    request = request_of(case, time_limit)
    asked = None if case.micro_batch is None else request.schedule(case.micro_batch).micro_batches
    settings = TrialSettings(
        share=request.share,
        options=Options(device=case.device or "auto", **{name: getattr(case, name) for name in _ASKED}),
        load_limit_seconds=request.check_limit,
        checkout=checkout,
        is_stopped=is_stopped,
        on_output=on_output,
    )
    subject = find_subject(case.workload, {}, settings, verb="guard")
    task = Task(subject, request, micro_batches or asked, on_event or (lambda event: None))
    with subject.device:
        measured = measure_by_runs(task) if case.gpu is None else measure_simulated(task)
    found = measured.measurement
    if micro_batches is None and not found.fits:
        raise _too_large(found)
    if case.gpu is None and case.memory is None and not found.capped:
        return dataclasses.replace(measured, warnings=(*measured.warnings, _budget_warning(found)))
    return measured


def request_of(case: Case, time_limit: float | None = None) -> Request:
    """What a plan of the case is asked to do; without a target it is two micro-batches of the size that is asked for.

    Raises:
        UsageError: Its numbers cannot be honoured, or it has none.
    """
    if case.target_batch is None and case.micro_batch is None:
        raise UsageError(f"how much {case.workload} trains at once is not said", hint="add --target-batch N")
    return Request(
        2 * (case.micro_batch or 0) * case.world_size if case.target_batch is None else case.target_batch,
        Options(world_size=case.world_size, equal=case.equal, time_limit=time_limit),
        max_micro_batch=case.micro_batch,
    )


def _budget_warning(found: Measurement) -> str:
    """What is free differs from run to run."""
    there = precise_bytes(found.limit_bytes)
    return (
        f"the budget is what was free, {there}, and so is the largest that fits, {found.largest}: name one by --memory"
    )


def _too_large(measurement: Measurement) -> DoesNotFitError:
    """The error for a size that was asked for."""
    largest, there = measurement.largest, precise_bytes(measurement.limit_bytes)
    needs = f"at least {precise_bytes(measurement.least_bytes or measurement.peak_bytes)}, {there}"
    if measurement.kind == "measured":
        needs = f"more than the {there} that"
    return DoesNotFitError(
        f"micro-batch {measurement.micro_batch} does not fit: it needs {needs} are there",
        hint=f"take {largest}, the largest that fits, or have it planned by naming none"
        if largest
        else "not even a micro-batch of 1 fits: take another card, or a smaller model",
    )
