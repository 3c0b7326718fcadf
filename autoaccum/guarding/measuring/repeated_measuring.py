"""What a schedule takes on a device that is here: the same runs again, each in a fresh process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from autoaccum.devices.base import Inspection, Trial
from autoaccum.guarding.measuring.sizing import Task, size_up
from autoaccum.guarding.measuring.surroundings import variables_set, versions_of
from autoaccum.guarding.records import Measured, Measurement
from autoaccum.planning.events import TrialFinished, TrialStarted
from autoaccum.planning.verdicts import peak_bytes, trial_error

RUNS = 3
_CARD_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def measure_by_runs(task: Task) -> Measured:
    """Plan by real trials, then run the schedule from clean states until there are three such runs with the plan's.

    The peak is the median of the runs that went through: of a card what PyTorch's allocator held at most, in whole
    segments, without the context; of the CPU what the process held beyond what it held with the workload loaded
    (`devices.cpu.CpuDevice`), which differs by some hundred KiB from run to run. Where one does not go through, the
    schedule does not fit; where none does, the peak is the budget, which it would exceed. Nothing is told of modules
    and categories.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As from `plan`.
        DoesNotFitError: Nothing fits, and no schedule is given.
    """
    sizing = size_up(task)
    parts = task.trial_parts(sizing.micro_batches)
    runs = [trial for trial in sizing.proved if trial.parts == parts][-1:]
    runs += [_run(task, parts, number) for number in range(len(runs) + 1, RUNS + 1)]
    peaks = sorted(peak_bytes(run) or 0 for run in runs if run.ran)
    device, inspection = task.subject.device, sizing.inspection
    described = device.describe()
    measurement = Measurement(
        kind="measured",
        card=_card(described, inspection),
        precision=inspection.precision,
        optimizer=inspection.optimizer,
        batchnorm=inspection.batchnorm,
        parameters=inspection.parameters,
        micro_batches=sizing.micro_batches,
        fits=len(peaks) == RUNS,
        largest=sizing.largest,
        capped=sizing.capped,
        limit_bytes=device.limit_bytes,
        peak_bytes=int(statistics.median(peaks)) if peaks else device.limit_bytes,
        runs=tuple(peaks),
        versions=_versions(described, inspection),
        settings=_settings(described, inspection),
    )
    return Measured(measurement=measurement, warnings=tuple(dict.fromkeys(sizing.warnings)))


def _run(task: Task, parts: tuple[int, ...], number: int) -> Trial:
    task.tell(TrialStarted(number, parts, confirming=True))
    trial = task.subject.device.trial(parts, fresh=True)
    task.tell(TrialFinished(number, trial, confirming=True))
    if trial.outcome == "error":
        raise trial_error(trial)
    return trial


def _card(described: Mapping[str, Any], inspection: Inspection) -> str:
    """The card's name, or the processor's."""
    return str(described["card"] if described["kind"] == "cuda" else inspection.environment["processor"])


def _versions(described: Mapping[str, Any], inspection: Inspection) -> dict[str, str]:
    if described["kind"] != "cuda":
        return versions_of(inspection)
    driver = {"driver": str(described["driver"])} if described["driver"] else {}
    return {**versions_of(inspection, "cuda", "cudnn"), **driver}


def _settings(described: Mapping[str, Any], inspection: Inspection) -> dict[str, Any]:
    """What is not as it comes; threads of the CPU have scratch of their own."""
    if described["kind"] != "cuda":
        return {"threads": inspection.environment["threads"]}
    allocator = {} if described["allocator"] == "native" else {"allocator": described["allocator"]}
    variables: Mapping[str, str] = inspection.environment["variables"]
    return {**allocator, **variables_set(), **{name: variables[name] for name in _CARD_VARIABLES if name in variables}}
