"""What a schedule takes on a card that is not here: exact, and the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoaccum.devices.base import Trial
from autoaccum.devices.explanation import Account
from autoaccum.devices.simulated.device import SimulatedDevice
from autoaccum.guarding.measuring.sizing import Sizing, Task, size_up
from autoaccum.guarding.measuring.surroundings import variables_set, versions_of
from autoaccum.guarding.records import Measured, Measurement
from autoaccum.planning.events import ExplanationStarted, Inspected, Loading
from autoaccum.planning.verdicts import peak_bytes, trial_error


def measure_simulated(task: Task) -> Measured:
    """Trace the workload, search for the largest size, and account for the schedule.

    Where the schedule is given and runs in parts of the largest size worth trying, that is the answer of the search.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As from `plan`; or it takes other memory each time.
        DoesNotFitError: Nothing fits, and no schedule is given.
    """
    device = task.subject.device
    assert isinstance(device, SimulatedDevice)
    sizing = _at_the_cap(task, device) or size_up(task)
    parts = task.trial_parts(sizing.micro_batches)
    task.tell(ExplanationStarted())
    account, trial = _account_and_trial(device, parts)
    prediction = device.predict(parts)
    explanation, inspection, described = account.explanation, sizing.inspection, device.describe()
    categories = {category: held for category, held in explanation.categories.items() if held}
    measurement = Measurement(
        kind="predicted",
        card=_card(described),
        precision=inspection.precision,
        optimizer=inspection.optimizer,
        batchnorm=inspection.batchnorm,
        parameters=inspection.parameters,
        micro_batches=sizing.micro_batches,
        fits=trial.ran,
        largest=sizing.largest,
        capped=sizing.capped,
        limit_bytes=device.limit_bytes,
        peak_bytes=explanation.peak_bytes,
        held_bytes=explanation.peak_bytes - explanation.categories["unused"],
        least_bytes=prediction.least_bytes,
        phase=explanation.phase,
        op=explanation.op,
        module=explanation.module,
        categories=categories,
        holdings=account.holdings,
        moments=account.moments,
        versions=versions_of(inspection),
        settings={**described["allocator"], **variables_set()},
    )
    return Measured(measurement=measurement, warnings=tuple(dict.fromkeys((*sizing.warnings, *prediction.warnings))))


def _account_and_trial(device: SimulatedDevice, parts: tuple[int, ...]) -> tuple[Account, Trial]:
    """What parts take, where it goes, and whether they fit: of the same traces.

    An account may find that a trace is not what others promised: the figures then rest on the one that was made.
    """
    trial = _trial(device, parts)
    account = device.explain(parts, changes=False, detail=True)
    if account.explanation.peak_bytes != peak_bytes(trial):
        trial = _trial(device, parts)
        account = device.explain(parts, changes=False, detail=True)
    return account, trial


def _trial(device: SimulatedDevice, parts: tuple[int, ...]) -> Trial:
    trial = device.trial(parts, fresh=True)
    if trial.outcome == "error":
        raise trial_error(trial)
    return trial


def _at_the_cap(task: Task, device: SimulatedDevice) -> Sizing | None:
    """What a search would find, from one trial of a given schedule; None where that takes a search."""
    if task.micro_batches is None or max(task.micro_batches) != task.request.cap:
        return None
    task.tell(Loading(task.subject.reference))
    inspection = device.inspect(limit_seconds=task.request.check_limit)
    task.tell(Inspected(inspection, device.name, device.limit_bytes, task.request.cap, predicted=True))
    if device.trial(task.trial_parts(task.micro_batches), fresh=True).outcome != "ok":
        return None
    further = inspection.accumulation_warnings if len(task.micro_batches) > 1 else ()
    return Sizing(
        inspection=inspection,
        micro_batches=task.micro_batches,
        largest=task.request.cap,
        capped=True,
        warnings=(*inspection.warnings, *further, *inspection.cautions),
    )


def _card(described: Mapping[str, Any]) -> str:
    """The card's full name; of one that is given by its size, that."""
    return described["card"] or str(described["name"]).removesuffix(" (simulated)")
