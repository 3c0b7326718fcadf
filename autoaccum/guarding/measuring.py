"""Measure one case by a simulation, which is exact and repeatable."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from autoaccum import __version__
from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Device, Inspection
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.errors import DoesNotFitError, NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.planning.plan_messages import peak_bytes, trial_error
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.token_budget import trial_parts
from autoaccum.sources.command import read_command
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
    paths: ImportPaths,
    *,
    locked: Measurement | None = None,
    time_limit: float | None = None,
    on_output: Callable[[str], None] | None = None,
) -> tuple[Measurement, Mapping[str, str]]:
    """Measure the memory of a schedule, and search for the largest micro-batch that fits, as a plan does.

    Args:
        case: The case. Its `micro_batch` is both the measured size and the largest that is tried.
        paths: Where the workload and its modules are, and the command runs.
        locked: Has the schedule and the token budget, whether they fit or not; None: the planned ones, which must.
        time_limit: Seconds that the search may take.
        on_output: Called with each line that the workload prints; None: they go to stderr.

    Returns:
        The measurement, and the lines of the user's code that modules come from: `model.py:12`, from the folder of
        `paths`.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As from `plan`.
        DoesNotFitError: As from `plan`; not where it is `locked` and the workload can be loaded.
    """
    source, options = read_command(case.command(paths.folder) or case.workload, case.options, verb="guard")
    if case.command() is not None:
        on_output = None  # A command prints much.
    request = request_of(dataclasses.replace(case, options=options), time_limit)
    given = None if locked is None else locked.micro_batches
    if locked is None and case.micro_batch is not None:
        given = request.schedule(case.micro_batch).micro_batches
    setup = make_setup(source, request, paths=paths, on_output=on_output, verb="guard")
    with setup.device:
        measured, lines = measure_simulated(setup, request, given, locked)
    if locked is None and not measured.fits:
        needed, limit = precise_bytes(measured.min_budget_bytes), precise_bytes(measured.limit_bytes)
        largest = f"take {measured.largest}, the largest that fits, or give no size to have it planned"
        raise DoesNotFitError(
            f"micro-batch {measured.micro_batch} does not fit: it needs at least {needed}, {limit} are available",
            hint=largest if measured.largest else "not even 1 fits: take another card, or a smaller model",
        )
    return measured, {module: Path(os.path.relpath(line, paths.folder)).as_posix() for module, line in lines.items()}


def request_of(case: Case, time_limit: float | None = None) -> PlanRequest:
    """Return the request to plan a complete case; without a target batch, for two of its micro-batches if it can be."""
    doubled = 2 * (case.micro_batch or 0) * case.options.world_size if case.takes_iter_size else None
    options = dataclasses.replace(case.options, time_limit=time_limit)
    return PlanRequest(
        case.target_batch or doubled, options, max_micro_batch=case.micro_batch, exact_max=True, chooses_grad_sync=False
    )


def measure_simulated(
    setup: PlanSetup, request: PlanRequest, micro_batches: tuple[int, ...] | None, locked: Measurement | None = None
) -> tuple[Measurement, Mapping[str, str]]:
    """Trace the workload, search for the largest size, and explain the memory of a schedule; None: of the planned one.

    Of a workload that counts tokens, also measure the budget that is `locked`, or else the planned one.

    Raises:
        DoesNotFitError: Nothing fits and no schedule is given, or the workload cannot even be loaded.
        NotMeasuredError: As from `plan`; or a limit ended the search, so that the largest size is not known; or the
            workload takes another amount of memory each time.
    """
    device = setup.device.predictor
    assert device is not None
    plan: Plan | None = None
    try:
        plan = plan_on_device(setup, request)
    except DoesNotFitError:
        if micro_batches is None:
            raise
    if plan is not None and plan.stopped is not None:
        raise NotMeasuredError(
            f"the limit on {plan.stopped} ended the search for the largest micro-batch at {plan.largest_fit}",
            hint="allow more, or name the size with --micro-batch",
        )
    inspection = device.inspect()  # As the plan made it.
    micro_batches = micro_batches or (() if plan is None else plan.micro_batches)
    parts = _trial_parts(request, micro_batches, inspection)
    for _ in range(2):
        trial = device.trial(parts, fresh=True)
        if trial.outcome == "error":
            raise trial_error(trial)
        report = device.explain(parts, changes=False, repeatable=True)
        if report.explanation.peak_bytes == peak_bytes(trial):
            break  # Else explaining made a new trace, which differs from the scaled one.
    budget = locked or (plan and plan.tokens)
    micro_tokens = budget.micro_tokens if budget and inspection.sample_lengths else None
    prediction, described = device.predict(parts), device.describe()
    versions = {"torch": str(inspection.environment["torch"]).partition("+")[0], "autoaccum": __version__}
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    measured = Measurement(
        card=described.card or described.name.removesuffix(" (simulated)"),
        update={
            "precision": inspection.spec.precision,
            "optimizer": inspection.workload.optimizer,
            "batchnorm": inspection.spec.batchnorm,
            "coupled": "yes" if inspection.spec.coupled else "no",
            "savers": " + ".join(inspection.spec.savers) or "none",
            "parameters": f"{inspection.workload.parameters or 0:,}",
        },
        micro_batches=micro_batches,
        fits=trial.ran,
        largest=0 if plan is None else plan.largest_fit,
        capped=plan is not None and plan.capped,
        limit_bytes=device.limit_bytes,
        peak_bytes=report.explanation.peak_bytes,
        min_budget_bytes=prediction.min_budget_bytes,
        micro_tokens=micro_tokens,
        token_peak_bytes=None if micro_tokens is None else _token_peak(device, request, inspection, micro_tokens),
        phase=report.explanation.phase,
        holdings=report.holdings,
        environment={**versions, **device.allocator_settings, **variables},
        warnings=tuple(dict.fromkeys((*(() if plan is None else plan.warnings), *prediction.warnings))),
    )
    return measured, report.lines


def _token_peak(device: Device, request: PlanRequest, inspection: Inspection, micro_tokens: int) -> int | None:
    """Return the most that tensors hold in an update by the extreme shapes of a budget, or raise its trial's error."""
    assert inspection.sample_lengths is not None
    parts, lengths = trial_parts(inspection.sample_lengths, micro_tokens, request.rank_samples)
    trial = device.trial(parts, lengths=lengths, fresh=True)
    if trial.outcome == "error":
        raise trial_error(trial)
    return trial.peak_allocated_bytes  # What is reserved for so many shapes depends on the limit.


def _trial_parts(request: PlanRequest, micro_batches: tuple[int, ...], inspection: Inspection) -> tuple[int, ...]:
    """Return the parts of a schedule that have to run, over all ranks, as when a plan is confirmed.

    The parts of the other ranks follow from the largest one, as they do in the plan. Parts that need each other all
    run.
    """
    if inspection.workload.whole_batch is not None:
        return micro_batches
    planned = request.schedule(max(micro_batches))
    schedule = planned if planned.micro_batches == micro_batches else Schedule((micro_batches,))
    return schedule.trial_parts
