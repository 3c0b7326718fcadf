"""What one case takes now: by a simulation, exact and repeatable, or by runs on the device that is here."""

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
from autoaccum.planning.plan_events import Event, Inspected
from autoaccum.planning.plan_messages import peak_bytes, trial_error
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.units import precise_bytes

RUNS = 3
"""Of a device that is here, each in a fresh process."""

_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)
"""They change what libraries take beside tensors, which kernel runs, or what a context holds: really, and simulated."""
_CARD_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def measure(
    case: Case,
    checkout: Checkout,
    *,
    micro_batches: tuple[int, ...] | None = None,
    time_limit: float | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure what a schedule takes, and search for the largest micro-batch that fits, as a plan does.

    Args:
        case: What is measured. Its `micro_batch` is both the size that is measured and the largest that is tried.
        checkout: Where the workload lies.
        micro_batches: The schedule, in samples, whether it fits or not; None: the one that is planned, and has to.
        time_limit: Seconds that the search may take.
        on_output: Given what the workload prints, line by line; stderr otherwise.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As from `plan`.
        DoesNotFitError: Likewise; not where `micro_batches` are given and can be loaded.
    """
    request = request_of(case, time_limit)
    asked = None if case.micro_batch is None else request.schedule(case.micro_batch).micro_batches
    setup = make_setup(case.workload, request, checkout=checkout, on_output=on_output, verb="guard")
    task = Task(setup, request, micro_batches or asked)
    simulated = case.options.gpu is not None
    with task.setup.device:
        found = measure_simulated(task) if simulated else measure_by_runs(task)
    if micro_batches is None and not found.fits:
        raise _too_large(found)
    if not simulated and case.options.memory is None and not found.capped:
        there = precise_bytes(found.limit_bytes)
        warning = f"the budget is what was free, {there}, and so is the largest that fits: name one by --memory"
        return dataclasses.replace(found, warnings=(*found.warnings, warning))
    return found


def request_of(case: Case, time_limit: float | None = None) -> PlanRequest:
    """What a plan of a whole case is asked to do; without a target, two micro-batches of the size that is asked for."""
    doubled = 2 * (case.micro_batch or 0) * case.options.world_size
    options = dataclasses.replace(case.options, time_limit=time_limit)
    return PlanRequest(case.target_batch or doubled, options, max_micro_batch=case.micro_batch)


@dataclass(frozen=True)
class Task:
    """What is to be measured: of `micro_batches`, whether they fit or not; None: of the schedule that is planned."""

    setup: PlanSetup
    request: PlanRequest
    micro_batches: tuple[int, ...] | None

    def trial_parts(self, micro_batches: tuple[int, ...]) -> tuple[int, ...]:
        """What has to run of a schedule, on all ranks: as the confirmation of its plan does.

        The parts of the other ranks follow from the largest one, as they do in the plan.
        """
        planned = self.request.schedule(max(micro_batches))
        schedule = planned if planned.micro_batches == micro_batches else Schedule((micro_batches,))
        return schedule.trial_parts


@dataclass(frozen=True, kw_only=True)
class _Sizing:
    """What planning found out: the schedule to measure, the largest size that fits, and trials that ran it."""

    inspection: Inspection
    micro_batches: tuple[int, ...]
    largest: int
    capped: bool
    proved: tuple[Trial, ...] = ()
    warnings: tuple[str, ...] = ()

    def measurement(self, device: Any, *more_warnings: str, **found: Any) -> Measurement:
        """The measurement of the schedule on this device."""
        described, seen = device.describe(), self.inspection
        return Measurement(
            precision=seen.precision,
            optimizer=seen.optimizer,
            batchnorm=seen.batchnorm,
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
    """Trace the workload, search for the largest size, and account for the schedule.

    Where the schedule is given and runs in parts of the largest size worth trying, that is the answer of the search.

    Raises:
        AutoaccumError: As of `measure`; or it takes other memory each time.
    """
    device = task.setup.device
    assert isinstance(device, SimulatedDevice)
    sizing = _at_the_cap(task) or _size_up(task)
    parts = task.trial_parts(sizing.micro_batches)
    trial = _run(task, parts)
    account = device.explain(parts, changes=False, detail=True)
    if account.explanation.peak_bytes != peak_bytes(trial):
        # The account found that a trace is not what others promised: the figures rest on the one that was made.
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
        settings={**described["allocator"], **_variables(os.environ, _VARIABLES)},
    )


def measure_by_runs(task: Task) -> Measurement:
    """Plan by real trials, then run the schedule from clean states until there are three such runs with the plan's.

    The peak is the median of those that went through: of a card what PyTorch's allocator held, of the CPU what the
    process held beyond the loaded workload. Where one does not go through, the schedule does not fit; where none does,
    the peak is the budget. Nothing is told of modules and categories.

    Raises:
        AutoaccumError: As of `measure`.
    """
    sizing = _size_up(task)
    parts = task.trial_parts(sizing.micro_batches)
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


def _size_up(task: Task) -> _Sizing:
    """Plan, and keep what a guard needs of it.

    Raises:
        DoesNotFitError: Nothing fits, and no schedule is given; or it cannot even be loaded.
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
        return _Sizing(inspection=seen[-1], micro_batches=task.micro_batches, largest=0, capped=False)
    if plan.stopped is not None:
        raise NotMeasuredError(
            f"the limit on {plan.stopped} ended the search for the largest micro-batch at {plan.largest_fit}",
            hint="allow more, or name the size with --micro-batch",
        )
    return _Sizing(
        inspection=seen[-1],
        micro_batches=task.micro_batches or plan.micro_batches,
        largest=plan.largest_fit,
        capped=plan.capped,
        proved=tuple(trial for trial in plan.trials if trial.fresh and trial.ran),
        warnings=plan.warnings,
    )


def _at_the_cap(task: Task) -> _Sizing | None:
    """What a search would find, from one trial of a given schedule; None where that takes a search."""
    if task.micro_batches is None or max(task.micro_batches) != task.request.cap:
        return None
    device = task.setup.device
    inspection = device.inspect(limit_seconds=task.request.load_limit_seconds)
    if device.trial(task.trial_parts(task.micro_batches), fresh=True).outcome != "ok":
        return None
    further = inspection.accumulation_warnings if len(task.micro_batches) > 1 else ()
    return _Sizing(
        inspection=inspection,
        micro_batches=task.micro_batches,
        largest=task.request.cap,
        capped=True,
        warnings=(*inspection.warnings, *further, *inspection.cautions),
    )


def _versions(inspection: Inspection, described: Mapping[str, Any]) -> dict[str, str]:
    """Those of torch, whichever its build: what a card takes does not depend on that; of autoaccum, and of a card."""
    own = {"torch": str(inspection.environment["torch"]).partition("+")[0], "autoaccum": __version__}
    known = {**inspection.environment, **described} if described["kind"] == "cuda" else {}
    return own | {name: str(known[name]) for name in ("cuda", "cudnn", "driver") if known.get(name)}


def _settings(described: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a device that are not as they come; threads of the CPU have scratch of their own."""
    if described["kind"] != "cuda":
        return {"threads": environment["threads"]}
    allocator = {} if described["allocator"] == "native" else {"allocator": described["allocator"]}
    return {**allocator, **_variables(os.environ, _VARIABLES), **_variables(environment["variables"], _CARD_VARIABLES)}


def _variables(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _too_large(measurement: Measurement) -> DoesNotFitError:
    """The error for a size that was asked for."""
    largest = measurement.largest
    return DoesNotFitError(
        f"micro-batch {measurement.micro_batch} does not fit: {describe_shortfall(measurement)}",
        hint=f"take {largest}, the largest that fits, or have it planned by naming none"
        if largest
        else "not even a micro-batch of 1 fits: take another card, or a smaller model",
    )


def describe_shortfall(measurement: Measurement) -> str:
    """What a schedule that does not fit needs, and what is there."""
    there = precise_bytes(measurement.limit_bytes)
    if measurement.kind == "measured":
        return f"it needs more than the {there} that are available"
    return (
        f"it needs at least {precise_bytes(measurement.least_bytes or measurement.peak_bytes)}, {there} are available"
    )
