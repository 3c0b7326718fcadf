"""`plan`: from a workload and a target batch to a plan that was proved by trials."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import Device, Trial, TrialSettings
from autoaccum.devices.prediction import Foreseeing, Foresight, Predicting
from autoaccum.options import OptionArguments, Options
from autoaccum.planning.allowance import Allowance
from autoaccum.planning.confirmation import Refuted, confirm, inspection_need
from autoaccum.planning.events import Inspected, Listener, Loading, Tracing
from autoaccum.planning.explained import check_explaining, explain_proof, told_of_plans_only
from autoaccum.planning.least import find_least
from autoaccum.planning.notes import all_notes, all_warnings, describe_workload
from autoaccum.planning.records import Plan
from autoaccum.planning.request import Request
from autoaccum.planning.runner import Runner
from autoaccum.planning.search import search
from autoaccum.planning.subjects import Subject, find_subject
from autoaccum.planning.verdicts import peak_bytes

_SIZES_FOR_FORESIGHT, _TRIALS_FOR_FORESIGHT = 6, 3
_FORESIGHT_SHARE = 0.25
"""Of a limit on time."""

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from autoaccum.workload.spec import Workload


def plan(
    workload: str | os.PathLike[str] | Workload | None = None,
    *,
    target_batch: int,
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Any = None,
    criterion: Any = None,
    weight: Callable[[Any], Any] | None = None,
    split: Callable[[Any, list[int]], Any] | None = None,
    size: Callable[[Any], int] | None = None,
    reduction: str | None = None,
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    max_micro_batch: int | None = None,
    max_trials: int | None = None,
    least: bool = False,
    explain: bool = False,
    picture: bool = False,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
    **options: Unpack[OptionArguments],
) -> Plan:
    """Find out by trials how to run updates of `target_batch` samples in the memory there is.

    What is trained is a file or module, whose trials run in processes of their own; or a `Workload` made in code, or
    the live objects `model`, `batch`, `loss` and `optimizer`, whose trials run in this process, one after the other,
    and leave everything as it was (see `devices.in_place`). Only a fresh process gives a clean state, so the ceiling
    of trials in place may be a little low on the CPU; for exact ones, plan through a file.

    Args:
        workload: `model.py`, `model.py:name` or `package.module:name`; or a `Workload`.
        target_batch: Samples per update, over all ranks.
        model: A live model, on the device it is to be trained on.
        batch: For it, `batch(size)`; or a batch to be repeated and cut to size.
        loss: For it, `loss(model, batch)`, or a criterion.
        criterion: For it, `criterion(outputs, targets)`, in place of `loss`.
        weight: For it, `weight(batch)`: what the mean in `loss` divides by; the number of samples when None.
        split: For it, `split(batch, sizes)`: a list of parts with so many samples each, where samples are not rows of
            tensors; `size` goes with it.
        size: For it, `size(batch)`: the number of its samples.
        reduction: For it, `mean` (when None) or `sum`.
        evaluate: For it, `evaluate(model, batch)`: a pass of an evaluation (`evaluation_batch`); the loss in eval mode
            when None.
        max_micro_batch: Try no larger size, in samples.
        max_trials: The search ends after as many trials; the largest size that ran by then is confirmed on top of
            them, and the plan is marked by `stopped`.
        least: Measure `least_bytes`, the smallest budget at which the schedule still runs, to 2 MiB or 0.5 %. A
            predicted plan has it anyway.
        explain: Tell where the memory of a card goes at the peak, by what it is for and by module, and what would
            change that (`Plan.explanation`): all of it simulated, also where trials really ran. Not of trials
            in this process.
        picture: Tell listeners what a picture of that needs, where the device can (`events.Explained`).
        on_event: Told of every step, with a record of `autoaccum.planning.events`.
        on_output: Given what the workload prints in processes of its own, line by line; stderr otherwise.
        options: The fields of `autoaccum.options.Options`: optimizer, precision, batchnorm, accumulate_in, keeps,
            evaluation_batch, worst_of and multiple_of, each in place of the workload's own; device or gpu, memory,
            reserve, world_size, equal, time_limit and trial_limit. For a live model, `optimizer` may be its live one,
            whose state is put back, or make one. With a `gpu` nothing runs on any card, and the plan is of kind
            `predicted`; live objects go to a process of their own for that, by `cloudpickle`, their weights without
            values. A `time_limit` counts from the call on; loading the workload and checking it may take half a
            minute whatever it is, and the confirmation of what ran comes on top.

    Raises:
        UsageError: An argument cannot be honoured.
        WorkloadError: The workload is not usable as it stands.
        DoesNotFitError: Not even a micro-batch of 1 runs.
        NotMeasuredError: Trials could not be run to an answer.
    """
    began = time.monotonic()
    asked = Options.of("plan", options)
    request = Request(
        target_batch,
        asked,
        max_micro_batch=max_micro_batch,
        max_trials=max_trials,
        least=least,
        explain=explain,
        picture=picture,
    )
    parts = {
        "model": model,
        "batch": batch,
        "loss": loss,
        "criterion": criterion,
        "weight": weight,
        "reduction": reduction,
        "evaluate": evaluate,
        "split": split,
        "size": size,
    }
    settings = TrialSettings(
        share=request.share, options=asked, load_limit_seconds=request.check_limit, on_output=on_output
    )
    subject = find_subject(workload, parts, settings)
    with subject.device, told_of_plans_only(request):
        return plan_on(subject, request, on_event=on_event, began=began)


def plan_on(
    subject: Subject, request: Request, *, on_event: Listener | None = None, began: float | None = None
) -> Plan:
    """Plan by trials of a subject that is already there; closing its device is the caller's.

    Args:
        subject: What is tried, and where.
        request: What is asked for.
        on_event: As in `plan`.
        began: When the limit on time began to count, by `time.monotonic`; now when None.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As in `plan`.
    """
    check_explaining(subject, request)
    device, tell = subject.device, on_event or (lambda event: None)
    allowance = Allowance(request.max_trials, request.options.time_limit, began=began)
    tell(Loading(subject.reference))
    asked = time.monotonic()
    inspection = device.inspect(limit_seconds=request.check_limit)
    if inspection.multiple_of != request.each:
        options = dataclasses.replace(request.options, multiple_of=inspection.multiple_of)
        request = dataclasses.replace(request, options=options)
    predicts = isinstance(device, Predicting)
    runner = Runner(device, request, tell, allowance)
    if not predicts:  # One that predicts starts no process for its confirmation.
        runner.proof_seconds = time.monotonic() - asked
    tell(Inspected(inspection, device.name, device.limit_bytes, request.cap, predicts))
    foresight = _foresee(device, request, tell)
    look = partial(
        search,
        runner.try_size,
        request.cap,
        limit_bytes=device.limit_bytes,
        need=inspection_need(inspection, predicts),
        least_size=inspection.least_size,
        multiple_of=inspection.multiple_of,
        fresh_trial=partial(runner.try_size, fresh=True) if subject.isolated else None,
    )
    prove = partial(confirm, runner, request, inspection=inspection, limit_bytes=device.limit_bytes, tell=tell)
    result, refuted = look(predict=foresight.peak_bytes), tuple[str, ...]()
    try:
        # Sizes that followed from others are traced from now on; there is no limit that could end that too early.
        found = prove(result, predicted=predicts, search_again=predicts and not request.limited)
    except Refuted as doubt:
        result, refuted = look(), (str(doubt),)
        found = prove(result, predicted=predicts)
    prediction = device.predict(found.proof.parts) if isinstance(device, Predicting) else None
    least_bytes = None if prediction is None else prediction.least_bytes
    further: tuple[str, ...] = ()
    if prediction is None and request.least:
        least_bytes, further = _find_least(runner, device, found.proof)
    explanation, said = explain_proof(subject, request, found.proof.parts, allowance, tell)
    of_sizes = (*found.doubts, *refuted, *result.warnings)
    return Plan(
        kind="measured" if prediction is None else "predicted",
        target_batch=found.schedule.target_batch,
        micro_batch=found.schedule.micro_batch,
        iter_size=found.schedule.iter_size,
        micro_batches=found.schedule.micro_batches,
        multiple_of=inspection.multiple_of,
        world_size=found.schedule.world_size,
        ranks=found.schedule.ranks if found.schedule.world_size > 1 else None,
        largest_fit=found.largest_fit,
        capped=result.capped and not found.doubts,
        stopped=result.stopped,
        limit_bytes=device.limit_bytes,
        peak_bytes=peak_bytes(found.proof),
        least_bytes=least_bytes,
        band_bytes=None if prediction is None else prediction.band_bytes,
        device=device.describe(),
        environment=inspection.environment,
        workload=describe_workload(inspection, subject.reference),
        trials=tuple(runner.trials),
        warnings=all_warnings(inspection, found.schedule, of_sizes, prediction),
        notes=all_notes(
            inspection, found.schedule, request, found.largest_fit, prediction, (*foresight.notes, *further, *said)
        ),
        coupling=inspection.coupling,
        explanation=explanation,
    )


def _foresee(device: Device, request: Request, tell: Listener) -> Foresight:
    """What peaks to expect, unless so few sizes are worth trying that the first trials tell as much.

    Where trials are predicted too, they need the same traces, so that few of them are no reason to do without.
    """
    few_trials = request.max_trials is not None and request.max_trials < _TRIALS_FOR_FORESIGHT
    if (
        (few_trials and not isinstance(device, Predicting))
        or request.cap < _SIZES_FOR_FORESIGHT
        or not isinstance(device, Foreseeing)
    ):
        return Foresight()
    tell(Tracing())
    limit = request.options.time_limit
    return device.foresee(limit_seconds=None if limit is None else limit * _FORESIGHT_SHARE)


def _find_least(runner: Runner, device: Device, proof: Trial) -> tuple[int, tuple[str, ...]]:
    """The least budget, and a sentence if the search for it ended early."""
    found, ended = find_least(
        partial(runner.try_budget, proof.parts), limit_bytes=device.limit_bytes, peak_bytes=peak_bytes(proof)
    )
    return found, () if ended is None else (ended,)
