"""Measure one case by a simulation, which is exact and repeatable."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoaccum import __version__
from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.errors import DoesNotFitError, NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.options import coupled_word
from autoaccum.planning.plan_events import Event, Inspected
from autoaccum.planning.plan_messages import peak_bytes, trial_error
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.units import precise_bytes

_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)
"""These change library workspaces, the kernel that runs, or the CUDA context, on real and simulated cards."""


def measure(
    case: Case,
    checkout: Checkout,
    *,
    micro_batches: tuple[int, ...] | None = None,
    time_limit: float | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure the memory of a schedule, and search for the largest micro-batch that fits, as a plan does.

    Args:
        case: The case. Its `micro_batch` is both the measured size and the largest that is tried.
        checkout: The folder of the workload.
        micro_batches: The schedule, in samples, whether it fits or not; None: the planned one, which must fit.
        time_limit: Seconds that the search may take.
        on_output: Called with each line that the workload prints; None: they go to stderr.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As from `plan`.
        DoesNotFitError: As from `plan`; not where `micro_batches` are given and the workload can be loaded.
    """
    request = request_of(case, time_limit)
    requested = None if case.micro_batch is None else request.schedule(case.micro_batch).micro_batches
    setup = make_setup(case.workload, request, checkout=checkout, on_output=on_output, verb="guard")
    task = Task(setup, request, micro_batches or requested)
    with task.setup.device:
        found = measure_simulated(task)
    if micro_batches is None and not found.fits:
        largest = f"take {found.largest}, the largest that fits, or give no size to have it planned"
        none = "not even a micro-batch of 1 fits: take another card, or a smaller model"
        raise DoesNotFitError(
            f"micro-batch {found.micro_batch} does not fit: {describe_shortfall(found)}",
            hint=largest if found.largest else none,
        )
    return found


def request_of(case: Case, time_limit: float | None = None) -> PlanRequest:
    """Return the request to plan a complete case; without a target batch, for two of its micro-batches."""
    doubled = 2 * (case.micro_batch or 0) * case.options.world_size
    options = dataclasses.replace(case.options, time_limit=time_limit)
    return PlanRequest(
        case.target_batch or doubled, options, max_micro_batch=case.micro_batch, ceiling=True, chooses_reduce=False
    )


@dataclass(frozen=True)
class Task:
    """A case to measure with `micro_batches`, whether they fit or not; None: with the planned schedule."""

    setup: PlanSetup
    request: PlanRequest
    micro_batches: tuple[int, ...] | None

    def planned_by(self, plan: Plan | None) -> tuple[int, ...]:
        """Return the schedule to measure: that of a plan where none is given."""
        return self.micro_batches or (() if plan is None else plan.micro_batches)

    def trial_parts(self, micro_batches: tuple[int, ...], inspection: Inspection) -> tuple[int, ...]:
        """Return the parts of a schedule that have to run, over all ranks, as when a plan is confirmed.

        The parts of the other ranks follow from the largest one, as they do in the plan. Parts that need each other
        all run.
        """
        if inspection.joining is not None:
            return micro_batches
        planned = self.request.schedule(max(micro_batches))
        schedule = planned if planned.micro_batches == micro_batches else Schedule((micro_batches,))
        return schedule.trial_parts


def measure_simulated(task: Task) -> Measurement:
    """Trace the workload, search for the largest size, and explain the memory of the schedule.

    Raises:
        AutoaccumError: As from `measure`; or the workload takes another amount of memory each time.
    """
    device = task.setup.device
    assert isinstance(device, SimulatedDevice)
    inspection, plan = _search_size(task)
    parts = task.trial_parts(task.planned_by(plan), inspection)
    trial = _run(task, parts)
    account = device.explain(parts, changes=False, detail=True)
    if account.explanation.peak_bytes != peak_bytes(trial):
        # Explaining made a new trace, which differs from the scaled one: run the trial by the new one.
        trial = _run(task, parts)
        account = device.explain(parts, changes=False, detail=True)
    explanation, prediction, described = account.explanation, device.predict(parts), device.describe()
    return _measurement(
        task,
        inspection,
        plan,
        *prediction.warnings,
        card=described["card"] or str(described["name"]).removesuffix(" (simulated)"),
        fits=trial.ran,
        peak_bytes=explanation.peak_bytes,
        held_bytes=explanation.peak_bytes - explanation.categories["unused"],
        least_bytes=prediction.least_bytes,
        phase=explanation.phase,
        categories={category: held for category, held in explanation.categories.items() if held},
        holdings=account.holdings,
        settings={**described["allocator"], **{name: os.environ[name] for name in _VARIABLES if name in os.environ}},
    )


def _measurement(
    task: Task, inspection: Inspection, plan: Plan | None, *more_warnings: str, **measured: Any
) -> Measurement:
    warnings = () if plan is None else plan.warnings
    return Measurement(
        precision=inspection.precision,
        optimizer=inspection.optimizer,
        batchnorm=inspection.batchnorm,
        coupled=coupled_word(inspection.coupled) if inspection.coupled else None,
        savers=inspection.savers,
        parameters=inspection.parameters,
        micro_batches=task.planned_by(plan),
        largest=0 if plan is None else plan.largest_fit,
        capped=plan is not None and plan.capped,
        limit_bytes=task.setup.device.limit_bytes,
        versions={"torch": str(inspection.environment["torch"]).partition("+")[0], "autoaccum": __version__},
        warnings=tuple(dict.fromkeys((*warnings, *more_warnings))),
        **measured,
    )


def _run(task: Task, parts: tuple[int, ...]) -> Trial:
    trial = task.setup.device.trial(parts, fresh=True)
    if trial.outcome == "error":
        raise trial_error(trial)
    return trial


def _search_size(task: Task) -> tuple[Inspection, Plan | None]:
    """Inspect the workload and plan; there is no plan where nothing fits and a schedule is given.

    Raises:
        DoesNotFitError: Nothing fits and no schedule is given, or the workload cannot even be loaded.
        NotMeasuredError: As from `plan`; or a limit ended the search, so that the largest size is not known.
    """
    inspections: list[Inspection] = []

    def listen(event: Event) -> None:
        if isinstance(event, Inspected):
            inspections.append(event.inspection)

    try:
        plan = plan_on_device(task.setup, task.request, on_event=listen)
    except DoesNotFitError:
        if task.micro_batches is None or not inspections:
            raise
        return inspections[-1], None
    if plan.stopped is not None:
        raise NotMeasuredError(
            f"the limit on {plan.stopped} ended the search for the largest micro-batch at {plan.largest_fit}",
            hint="allow more, or name the size with --micro-batch",
        )
    return inspections[-1], plan


def describe_shortfall(measurement: Measurement) -> str:
    """Say what a schedule that does not fit needs, and what is available."""
    needed, limit = precise_bytes(measurement.least_bytes), precise_bytes(measurement.limit_bytes)
    return f"it needs at least {needed}, {limit} are available"
