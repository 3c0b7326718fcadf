"""Measure one case: by a simulation, exact and repeatable, or by runs on a device of this machine."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping
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
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.units import precise_bytes
from autoaccum.workload.module_names import compact_names

RUNS = 3
"""The number of runs on a real device, each in a fresh process."""

_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)
"""These change library workspaces, the kernel that runs, or the CUDA context, on real and simulated cards."""
_CARD_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


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
    simulated = case.options.gpu is not None
    with task.setup.device:
        found = measure_simulated(task) if simulated else measure_by_runs(task)
    if micro_batches is None and not found.fits:
        largest = f"take {found.largest}, the largest that fits, or give no size to have it planned"
        none = "not even a micro-batch of 1 fits: take another card, or a smaller model"
        raise DoesNotFitError(
            f"micro-batch {found.micro_batch} does not fit: {describe_shortfall(found)}",
            hint=largest if found.largest else none,
        )
    if not simulated and case.options.memory is None and not found.capped:
        free = precise_bytes(found.limit_bytes)
        warning = f"the largest fit depends on the {free} that were free: give a fixed budget by --memory"
        return dataclasses.replace(found, warnings=(*found.warnings, warning))
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


@dataclass(frozen=True, kw_only=True)
class _SearchResult:
    """The result of planning: the schedule to measure, the largest size that fits, and trials that ran it."""

    inspection: Inspection
    micro_batches: tuple[int, ...]
    largest: int
    capped: bool
    proved: tuple[Trial, ...] = ()
    warnings: tuple[str, ...] = ()

    def measurement(self, device: Any, *more_warnings: str, **found: Any) -> Measurement:
        """Return the measurement of the schedule on this device."""
        described, seen = device.describe(), self.inspection
        return Measurement(
            precision=seen.precision,
            optimizer=seen.optimizer,
            batchnorm=seen.batchnorm,
            coupled=coupled_word(seen.coupled) if seen.coupled else None,
            savers=seen.savers,
            parameters=seen.parameters,
            micro_batches=self.micro_batches,
            largest=self.largest,
            capped=self.capped,
            limit_bytes=device.limit_bytes,
            versions=_versions(seen, described),
            warnings=tuple(dict.fromkeys((*self.warnings, *more_warnings))),
            **found,
        )


def measure_simulated(task: Task) -> Measurement:
    """Trace the workload, search for the largest size, and explain the memory of the schedule.

    Where the schedule is given and its parts have the largest size allowed, one trial replaces the search.

    Raises:
        AutoaccumError: As from `measure`; or the workload takes another amount of memory each time.
    """
    device = task.setup.device
    assert isinstance(device, SimulatedDevice)
    sizing = _confirm_cap(task) or _search_size(task)
    parts = task.trial_parts(sizing.micro_batches, sizing.inspection)
    trial = _run(task, parts)
    account = device.explain(parts, changes=False, detail=True)
    if account.explanation.peak_bytes != peak_bytes(trial):
        # Explaining made a new trace, which differs from the scaled one: run the trial by the new one.
        trial = _run(task, parts)
        account = device.explain(parts, changes=False, detail=True)
    explanation, prediction, described = account.explanation, device.predict(parts), device.describe()
    return sizing.measurement(
        device,
        *prediction.warnings,
        kind="predicted",
        card=described["card"] or str(described["name"]).removesuffix(" (simulated)"),
        fits=trial.ran,
        peak_bytes=explanation.peak_bytes,
        held_bytes=explanation.peak_bytes - explanation.categories["unused"],
        least_bytes=prediction.least_bytes,
        phase=explanation.phase,
        op=explanation.op,
        module=explanation.module,
        categories={category: held for category, held in explanation.categories.items() if held},
        holdings=account.holdings,
        moments=account.moments,
        recomputed=tuple(pattern for pattern, _ in compact_names(account.recomputed)),
        settings={**described["allocator"], **_variables(os.environ, _VARIABLES)},
    )


def measure_by_runs(task: Task) -> Measurement:
    """Plan by real trials, then run the schedule from clean states until there are three runs, the plan's included.

    The peak is the median of the runs that fitted: on a card the memory reserved by PyTorch's allocator, on the CPU the
    memory of the process beyond the loaded workload. If one run does not fit, the schedule does not fit; if none does,
    the peak is the budget. There are no modules and categories.

    Raises:
        AutoaccumError: As of `measure`.
    """
    sizing = _search_size(task)
    parts = task.trial_parts(sizing.micro_batches, sizing.inspection)
    runs = [trial for trial in sizing.proved if trial.parts == parts][-1:]
    runs += [_run(task, parts) for _ in range(len(runs), RUNS)]
    peaks = sorted(peak_bytes(run) or 0 for run in runs if run.ran)
    device, environment = task.setup.device, sizing.inspection.environment
    described = device.describe()
    return sizing.measurement(
        device,
        kind="measured",
        card=str(described["card"] if described["kind"] == "cuda" else environment["processor"]),
        fits=len(peaks) == RUNS,
        peak_bytes=int(statistics.median(peaks)) if peaks else device.limit_bytes,
        runs=tuple(peaks),
        settings=_settings(described, environment),
    )


def _run(task: Task, parts: tuple[int, ...]) -> Trial:
    trial = task.setup.device.trial(parts, fresh=True)
    if trial.outcome == "error":
        raise trial_error(trial)
    return trial


def _search_size(task: Task) -> _SearchResult:
    """Plan, and return what a guard needs of the plan.

    Raises:
        DoesNotFitError: Nothing fits and no schedule is given, or the workload cannot even be loaded.
        NotMeasuredError: As from `plan`; or a limit ended the search, so that the largest size is not known.
    """
    seen: list[Inspection] = []

    def listen(event: Event) -> None:
        if isinstance(event, Inspected):
            seen.append(event.inspection)

    try:
        plan = plan_on_device(task.setup, task.request, on_event=listen)
    except DoesNotFitError:
        if task.micro_batches is None or not seen:
            raise
        return _SearchResult(inspection=seen[-1], micro_batches=task.micro_batches, largest=0, capped=False)
    if plan.stopped is not None:
        raise NotMeasuredError(
            f"the limit on {plan.stopped} ended the search for the largest micro-batch at {plan.largest_fit}",
            hint="allow more, or name the size with --micro-batch",
        )
    return _SearchResult(
        inspection=seen[-1],
        micro_batches=task.micro_batches or plan.micro_batches,
        largest=plan.largest_fit,
        capped=plan.capped,
        proved=tuple(trial for trial in plan.trials if trial.fresh and trial.ran),
        warnings=plan.warnings,
    )


def _confirm_cap(task: Task) -> _SearchResult | None:
    """Return what a search would find if the given schedule has the largest size allowed and runs; else None."""
    if task.micro_batches is None or max(task.micro_batches) != task.request.cap:
        return None
    device = task.setup.device
    inspection = device.inspect(limit_seconds=task.request.load_limit_seconds)
    if device.trial(task.trial_parts(task.micro_batches, inspection), fresh=True).outcome != "ok":
        return None
    further = inspection.accumulation_warnings if len(task.micro_batches) > 1 else ()
    return _SearchResult(
        inspection=inspection,
        micro_batches=task.micro_batches,
        largest=task.request.cap,
        capped=True,
        warnings=(*inspection.warnings, *further, *inspection.cautions),
    )


def _versions(inspection: Inspection, described: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of torch (without its build), of autoaccum, and on a card of CUDA, cuDNN and the driver."""
    own = {"torch": str(inspection.environment["torch"]).partition("+")[0], "autoaccum": __version__}
    known = {**inspection.environment, **described} if described["kind"] == "cuda" else {}
    return own | {name: str(known[name]) for name in ("cuda", "cudnn", "driver") if known.get(name)}


def _settings(described: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a device that are not the default; on the CPU the threads, which have workspaces."""
    if described["kind"] != "cuda":
        return {"threads": environment["threads"]}
    allocator = {} if described["allocator"] == "native" else {"allocator": described["allocator"]}
    return {**allocator, **_variables(os.environ, _VARIABLES), **_variables(environment["variables"], _CARD_VARIABLES)}


def _variables(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def describe_shortfall(measurement: Measurement) -> str:
    """Say what a schedule that does not fit needs, and what is available."""
    limit = precise_bytes(measurement.limit_bytes)
    if measurement.kind == "measured":
        return f"it needs more than the available {limit}"
    return (
        f"it needs at least {precise_bytes(measurement.least_bytes or measurement.peak_bytes)}, {limit} are available"
    )
