"""What a training begins with: a checkpoint, and the micro-batch and learning rate of it, given, or of a plan.

What may change when a run is resumed: `epochs` and `steps`, how it is evaluated, kept and told, what reads the data,
the micro-batch, the plan, the device and its budget, `clip_norm`, `skip_nonfinite`, the workload's code (which is
told). A schedule goes on as it was kept. Everything else has to be the same, and is refused otherwise.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.plan_check import check_plan, differences, plan_facts, unwrap_model
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.plan import Plan
from autoaccum.training.data_source import Source
from autoaccum.training.fit_events import Notice, Planning
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup
from autoaccum.units import format_bytes

_ROUNDING = 1e-6
"""Of a rate that is a tensor in float32."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint to go on from.

    Attributes:
        path: Its file.
        record: What it holds.
    """

    path: Path
    record: Mapping[str, Any]

    @property
    def plan(self) -> Plan | None:
        """The plan of the run so far; None where its micro-batch was given."""
        text = self.record["plan"]
        return None if text is None else Plan.from_json(text, source=f"the plan in {self.path}")


def find_checkpoint(folder: RunFolder | None, resume: str, tell: Callable[[Any], Any]) -> LoadedCheckpoint | None:
    """The newest whole checkpoint of the folder, as `resume` has it; None for a run that begins anew.

    Raises:
        UsageError: The folder holds a run that is not to be resumed, or none that is.
        CheckpointError: There are checkpoints, and none is whole; or the newest is of another format.
    """
    if folder is None:
        return None
    if resume == "never":
        if folder.checkpoints.paths():
            raise UsageError(
                f"{folder.path} holds a run already, and resume is never", hint="choose another folder, or resume it"
            )
        return None
    found = folder.checkpoints.newest(tell)
    if found is None and resume == "must":
        raise UsageError(f"{folder.path} holds no checkpoint to resume", hint="begin the run without --resume must")
    return None if found is None else LoadedCheckpoint(*found)


def describe_request(request: FitRequest, source: Source) -> dict[str, Any]:
    """What of a request and its data must be the same for a run to be resumed, in plain values."""
    return {"target batch": request.target_batch, "seed": request.seed, "data": source.fingerprint()}


def describe_run(request: FitRequest, trainee: TrainingComponents, source: Source) -> dict[str, Any]:
    """All that must be the same, but for the names and settings that `restore_training` compares."""
    return {
        **describe_request(request, source),
        "model": type(unwrap_model(trainee.model)).__name__,
        "optimizer": type(trainee.optimizer).__name__,
        "schedule": None if trainee.scheduler is None else type(trainee.scheduler).__name__,
        "loss": f"{trainee.objective.reduction} over {trainee.objective.source}",
        "precision": trainee.precision,
        "batchnorm": trainee.batchnorm,
        "accumulate_in": trainee.accumulate_in,
        "ema_decay": None if trainee.averages is None else trainee.averages.decay,
    }


def check_same_run(saved: LoadedCheckpoint, here: Mapping[str, Any]) -> None:
    """Refuse to go on with another training than the one that was interrupted.

    Raises:
        UsageError: Names all that differs.
    """
    then = saved.record["run"]
    different = "; ".join(_differences("", then, here))
    if different:
        raise UsageError(
            f"{saved.path} is of another training: {different}",
            hint="give what was given then, or choose another run folder",
        )


def _differences(of: str, then: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name, value in here.items():
        was = then.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping) and was.keys() == value.keys():
            yield from _differences(f"{name}: ", was, value)
        elif was != value:
            yield f"{of}{name} was {was!r}, is {value!r}"


def warn_of_changes(saved: LoadedCheckpoint, name: str, digest: str, tell: Callable[[Any], Any]) -> None:
    """Say so where the workload's files are not those the run began with."""
    then = saved.record["digest"]
    if then and digest and then != digest:
        tell(Notice(f"{name} was changed since the checkpoint was written: what follows trains what it says now"))


@dataclass(frozen=True)
class MicroBatchChoice:
    """A micro-batch, the plan it is from (None where it was given as a number), and what it is a multiple of."""

    micro_batch: int
    plan: Plan | None = None
    multiple_of: int = 1


def choose_micro_batch(
    request: FitRequest,
    subject: TrainingSetup,
    source: Source,
    saved: LoadedCheckpoint | None,
    tell: Callable[[Any], Any],
) -> MicroBatchChoice:
    """What was given, else what the interrupted run had, else what a plan finds out now.

    Raises:
        UsageError: The plan that was given is for other updates or another device.
        DoesNotFitError, NotMeasuredError, WorkloadError: No plan could be made.
    """
    found = _without_trials(request, subject, saved, tell)
    if found is not None:
        asked = request.options
        unused = [name for name in ("memory", "reserve", "worst_of") if getattr(asked, name) is not None]
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            tell(Notice(f"{' and '.join(unused)} {verb} not used: the micro-batch is known without planning"))
        each = max(subject.multiple_of, 1 if found.plan is None else found.plan.multiple_of)
        check_multiple(request.target_batch, each, "the target batch")
        return replace(found, multiple_of=each)
    tell(Planning(subject.name))
    try:
        made = subject.plan(source.planning_batch, tell)
    except (UsageError, NotMeasuredError) as error:
        hint = "" if error.hint is None else f"{error.hint}; or "
        raise type(error)(error.message, hint=f"{hint}give a number of your own: {_as_number(32)}") from error.__cause__
    kept = None if saved is None else saved.plan
    if kept is not None:  # A tuned plan has no trials of its learning rate: it holds for the next one, too.
        made = replace(made, learning_rate=kept.learning_rate)
    return MicroBatchChoice(made.micro_batch, made, made.multiple_of)


def choose_learning_rate(request: FitRequest, plan: Plan | None) -> float | None:
    """What was given, else what the plan was tuned with; None: the optimizer's own."""
    return request.learning_rate if request.learning_rate is not None or plan is None else plan.learning_rate


def check_choice(
    request: FitRequest,
    subject: TrainingSetup,
    trainee: TrainingComponents,
    choice: MicroBatchChoice,
    tell: Callable[[Any], Any],
) -> None:
    """Refuse a plan for something else than is trained; then say what of the choice is worth knowing.

    Raises:
        UsageError: Names what differs, and what to run instead.
    """
    plan, rate = choice.plan, choose_learning_rate(request, choice.plan)
    if plan is not None:
        modes = trainee.precision, trainee.batchnorm, trainee.accumulate_in
        try:
            check_plan(plan, trainee.model, trainee.optimizer, trainee.objective, *modes)
        except UsageError as error:
            raise UsageError(error.message, hint=_instead(request, plan)) from None
        digest = plan.workload.get("digest")
        if request.plan is not None and digest and subject.digest and digest != subject.digest:
            changed = f"{subject.name} is not what the plan was made for, or has changed since"
            tell(Notice(f"{changed}: should memory run out, plan again"))
        if rate is not None and request.learning_rate is None:
            tell(Notice(f"the learning rate is {rate:.6g}: the plan was tuned with it", warns=False))
        if trainee.averages is not None and "ema" not in (plan.workload.get("keeps") or ()):
            size = format_bytes(sum(tensor.nbytes for tensor in trainee.averages.tensors))
            hint = 'should memory run out, plan again with keeps="ema" (--keeps ema)'
            tell(Notice(f"an average of the weights is kept, {size} that the plan does not count: {hint}"))
    if rate is not None and trainee.scheduler is not None:
        begins = float(trainee.optimizer.param_groups[0].get("initial_lr", rate))
        if not math.isclose(begins, rate, rel_tol=_ROUNDING):  # Some, such as OneCycleLR, have rates of their own.
            name = type(trainee.scheduler).__name__
            tell(Notice(f"the learning rate is to be {rate:.6g}, and {name} begins at {begins:.6g}", warns=False))


def _without_trials(
    request: FitRequest, subject: TrainingSetup, saved: LoadedCheckpoint | None, tell: Callable[[Any], Any]
) -> MicroBatchChoice | None:
    if request.micro_batch is not None:
        return MicroBatchChoice(request.micro_batch)
    if request.plan is not None:
        given = Plan.load(request.plan) if isinstance(request.plan, (str, os.PathLike)) else request.plan
        _check_given(given, request, subject)
        return MicroBatchChoice(given.micro_batch, given)
    if saved is None:
        return None
    kept = saved.plan
    if kept is None:
        return MicroBatchChoice(int(saved.record["micro_batch"]))
    different = _elsewhere(kept, subject.device)
    if not different:
        return MicroBatchChoice(kept.micro_batch, kept)
    tell(Notice(f"the run was planned for {different[0][0]}, and here is {different[0][1]}: it is planned again"))
    return None


def _check_given(plan: Plan, request: FitRequest, subject: TrainingSetup) -> None:
    """What can be seen before anything is built; `check_choice` compares the rest."""
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, or the file of one: "plan.json"')
    if plan.world_size != 1:
        raise UsageError(
            f"the plan is for {plan.world_size} ranks, training on several is not there yet",
            hint="plan with --world-size 1",
        )
    if plan.target_batch != request.target_batch:
        raise UsageError(
            f"the plan is for updates of {plan.target_batch} samples, here they have {request.target_batch}",
            hint=_instead(request, plan),
        )
    different = _elsewhere(plan, subject.device)
    if different:
        raise UsageError(f"the plan is for {different[0][0]}; here is {different[0][1]}", hint=_instead(request, plan))


def _elsewhere(plan: Plan, device: torch.device) -> list[tuple[str, str]]:
    """By what the plan's device differs from this one, in words."""
    if device.type != "cuda":
        here: dict[str, Any] = {"kind": device.type}
    else:
        card = torch.cuda.get_device_properties(device)
        here = {"kind": "cuda", "card": card.name, "total_bytes": card.total_memory}
    return differences(plan_facts(plan), here)


def _instead(request: FitRequest, plan: Plan) -> str:
    """What to run where a plan is for something else."""
    again = "plan again"
    if isinstance(request.subject, (str, os.PathLike)):
        words = ["autoaccum", "plan", os.fspath(request.subject), "--target-batch", str(request.target_batch)]
        again = f"run {shlex.join(words)} -o FILE for a plan of it, or this without --plan"
    return f"{again}, or take its number all the same: {_as_number(plan.micro_batch)}"


def _as_number(micro_batch: int) -> str:
    return f"micro_batch={micro_batch} (--micro-batch {micro_batch})"
