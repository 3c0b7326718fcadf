"""The start of a training: from a checkpoint or new, with its micro-batch and learning rate.

On resuming, these may change: `epochs` and `steps`, everything about evaluations, checkpoints and callbacks, the
workers that read data, the micro-batch, the plan, the device and its budget, `clip_norm`, `skip_nonfinite`, `check`,
and the workload's code (with a warning). A learning-rate schedule continues from its saved state. All else must
be equal.
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
from torch import nn

from autoaccum.accumulation.argument_checks import check_plan, current_facts, differences, plan_facts, unwrap_model
from autoaccum.accumulation.ranks.group import world_size
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.accumulation.sharded_tensors import model_class
from autoaccum.checks import counted
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.training.checkpoints import read_checkpoint
from autoaccum.training.data_source import Source
from autoaccum.training.fit_events import Notice, Planning
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.ranks_agreement import TrainingRanks
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup
from autoaccum.units import format_bytes

_RATE_TOLERANCE = 1e-6
"""Rounding of a learning rate that is a float32 tensor."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint to resume from."""

    path: Path
    record: Mapping[str, Any]

    @property
    def plan(self) -> Plan | None:
        """The plan of the run so far; None if its micro-batch was given as a number."""
        text = self.record["plan"]
        return None if text is None else Plan.from_json(text, source=f"the plan in {self.path}")


def find_checkpoint(
    folder: RunFolder | None, resume: str, notify: Callable[[Any], Any], ranks: TrainingRanks
) -> LoadedCheckpoint | None:
    """Return the newest undamaged checkpoint of the folder, subject to `resume`; None for a new run.

    All ranks read the one that rank 0 finds.

    Raises:
        UsageError: The folder holds a run that must not be resumed, or none although one is required.
        CheckpointError: All checkpoints are damaged, or the newest has another format.
    """
    if folder is None:
        return None
    own: LoadedCheckpoint | None = None

    def choose() -> Path | None:
        nonlocal own
        own = _find_newest(folder, resume, notify)
        return None if own is None else own.path

    path = ranks.by_first(choose)
    return own if path is None or own is not None else LoadedCheckpoint(path, read_checkpoint(path))


def _find_newest(folder: RunFolder, resume: str, notify: Callable[[Any], Any]) -> LoadedCheckpoint | None:
    if resume == "never":
        if folder.checkpoints.paths():
            raise UsageError(f"{folder.path} already holds a run, and resume is never", hint="use another folder")
        return None
    found = folder.checkpoints.newest(notify)
    if found is None and resume == "must":
        raise UsageError(f"{folder.path} holds no checkpoint to resume", hint="start the run without --resume must")
    return None if found is None else LoadedCheckpoint(*found)


def describe_request(request: FitRequest, source: Source) -> dict[str, Any]:
    """Return what must be equal on resuming, from the request and its data, as plain values."""
    return {"target batch": request.target_batch, "seed": request.seed, "data": source.fingerprint()}


def describe_run(request: FitRequest, components: TrainingComponents, source: Source) -> dict[str, Any]:
    """Return all that must be equal on resuming, except what `restore_training` compares."""
    return {
        **describe_request(request, source),
        "model": model_class(unwrap_model(components.model)).__name__,
        "optimizer": type(components.optimizer).__name__,
        "schedule": None if components.scheduler is None else type(components.scheduler).__name__,
        "loss": f"{components.objective.reduction} over {components.objective.source}",
        "precision": components.precision,
        "batchnorm": components.batchnorm,
        "coupled": components.objective.coupled,
        "accumulate_in": components.accumulate_in,
        "ema_decay": None if components.averages is None else components.averages.decay,
    }


def check_same_run(checkpoint: LoadedCheckpoint, here: Mapping[str, Any]) -> None:
    """Raise UsageError, which names all differences, rather than resume a different training."""
    then = {"coupled": False, **checkpoint.record["run"]}  # Earlier versions had no coupled losses.
    different = "; ".join(_differences("", then, here))
    if different:
        raise UsageError(
            f"{checkpoint.path} belongs to another training: {different}",
            hint="use the same arguments as before, or another run folder",
        )


def _differences(of: str, then: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name, value in here.items():
        was = then.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping) and was.keys() == value.keys():
            yield from _differences(f"{name}: ", was, value)
        elif was != value:
            yield f"{of}{name} was {was!r}, is {value!r}"


def warn_of_changes(checkpoint: LoadedCheckpoint, name: str, digest: str, notify: Callable[[Any], Any]) -> None:
    """Warn if the workload's files have changed since the run began."""
    then = checkpoint.record["digest"]
    if then and digest and then != digest:
        notify(Notice(f"{name} has changed since the checkpoint was written: training continues with the new code"))


@dataclass(frozen=True)
class MicroBatchChoice:
    """A micro-batch, its plan (None if it was given as a number), and the number that sizes are multiples of."""

    micro_batch: int
    plan: Plan | None = None
    multiple_of: int = 1


def choose_micro_batch(
    request: FitRequest,
    setup: TrainingSetup,
    source: Source,
    checkpoint: LoadedCheckpoint | None,
    notify: Callable[[Any], Any],
) -> MicroBatchChoice:
    """Return the micro-batch that was given, else that of the interrupted run, else that of a new plan.

    Raises:
        UsageError: The given plan is for other updates or another device.
        DoesNotFitError, NotMeasuredError, WorkloadError: Planning failed.
    """
    found = _choose_without_planning(request, setup, checkpoint, notify)
    if found is not None:
        unused = [name for name in ("memory", "reserve", "worst_of") if getattr(request.options, name) is not None]
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            notify(Notice(f"{' and '.join(unused)} {verb} not used: the micro-batch is known without planning"))
        each = max(setup.multiple_of, 1 if found.plan is None else found.plan.multiple_of)
        check_multiple(request.target_batch, each, "the target batch")
        return replace(found, multiple_of=each)
    notify(Planning(setup.name))
    try:
        made = setup.plan(source.planning_batch, notify)
    except (UsageError, NotMeasuredError) as error:
        hint = "" if error.hint is None else f"{error.hint}; or "
        raise type(error)(error.message, hint=f"{hint}give a number of your own: {_as_option(32)}") from error.__cause__
    earlier = None if checkpoint is None else checkpoint.plan
    if earlier is not None:  # Trials do not depend on the learning rate: a tuned one stays valid for the new plan.
        made = replace(made, learning_rate=earlier.learning_rate)
    return MicroBatchChoice(made.micro_batch, made, made.multiple_of)


def choose_learning_rate(request: FitRequest, plan: Plan | None) -> float | None:
    """Return the learning rate that was given, else that of a tuned plan; None: the optimizer's default."""
    return request.learning_rate if request.learning_rate is not None or plan is None else plan.learning_rate


def check_choice(
    request: FitRequest,
    setup: TrainingSetup,
    components: TrainingComponents,
    choice: MicroBatchChoice,
    notify: Callable[[Any], Any],
) -> None:
    """Raise UsageError for a plan of another training, with what to run instead; then send notices on the choice."""
    plan, rate = choice.plan, choose_learning_rate(request, choice.plan)
    if plan is not None:
        of_model = components.model, components.optimizer, components.objective
        modes = components.precision, components.batchnorm, components.accumulate_in
        try:
            check_plan(plan, current_facts(*of_model, *modes, components.savers))
        except UsageError as error:
            raise UsageError(error.message, hint=_replan_hint(request, plan)) from None
        digest = plan.workload.get("digest")
        if request.plan is not None and digest and setup.digest and digest != setup.digest:
            changed = f"{setup.name} is not the workload of the plan, or has changed since"
            notify(Notice(f"{changed}: if memory runs out, plan again"))
        if rate is not None and request.learning_rate is None:
            notify(Notice(f"the learning rate is {rate:.6g}: the plan was tuned with it", warns=False))
        if components.averages is not None and "ema" not in (plan.workload.get("keeps") or ()):
            size = format_bytes(sum(tensor.nbytes for tensor in components.averages.tensors))
            hint = 'if memory runs out, plan again with keeps="ema" (--keeps ema)'
            notify(Notice(f"the averaged weights take {size} that the plan does not count: {hint}"))
    if rate is not None and components.scheduler is not None:
        begins = float(components.optimizer.param_groups[0].get("initial_lr", rate))
        if not math.isclose(begins, rate, rel_tol=_RATE_TOLERANCE):  # Some, such as OneCycleLR, set their own.
            name = type(components.scheduler).__name__
            notify(Notice(f"the learning rate is set to {rate:.6g}, but {name} starts at {begins:.6g}", warns=False))


def _choose_without_planning(
    request: FitRequest,
    setup: TrainingSetup,
    checkpoint: LoadedCheckpoint | None,
    notify: Callable[[Any], Any],
) -> MicroBatchChoice | None:
    if request.micro_batch is not None:
        return MicroBatchChoice(request.micro_batch)
    if request.plan is not None:
        given = Plan.load(request.plan) if isinstance(request.plan, (str, os.PathLike)) else request.plan
        _check_given_plan(given, request, setup)
        return MicroBatchChoice(given.micro_batch, given)
    if checkpoint is None:
        return None
    plan = checkpoint.plan
    if plan is None:
        return MicroBatchChoice(int(checkpoint.record["micro_batch"]))
    different = _device_differences(plan, setup.device)
    if plan.world_size != (ranks := world_size()):
        different = [(counted(plan.world_size, "rank"), counted(ranks, "rank")), *different]
    if not different:
        return MicroBatchChoice(plan.micro_batch, plan)
    notify(Notice(f"the run was planned for {different[0][0]}, and this is {different[0][1]}: it is planned again"))
    return None


def _check_given_plan(plan: Plan, request: FitRequest, setup: TrainingSetup) -> None:
    """Check a plan before anything is built; `check_choice` compares the rest."""
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, or the file of one: "plan.json"')
    if plan.world_size != (ranks := world_size()):
        planned, here = counted(plan.world_size, "rank"), counted(ranks, "rank")
        raise UsageError(f"the plan is for {planned}, fit trains on {here}", hint=f"plan with --world-size {ranks}")
    for name in ("parallel", "mesh"):
        planned, given = getattr(plan, name), getattr(request.options, name)
        if None not in (planned, given) and planned != given:
            raise UsageError(f"the plan is for {name}={planned!r}, and {given!r} is given", hint="leave it out")
    if plan.parallel == "fsdp2" and isinstance(request.model_or_workload, nn.Module):
        raise UsageError("the plan shards the model, and fit shards those that it builds", hint="give it a workload")
    if plan.target_batch != request.target_batch:
        raise UsageError(
            f"the plan is for updates of {plan.target_batch} samples, but {request.target_batch} are requested",
            hint=_replan_hint(request, plan),
        )
    different = _device_differences(plan, setup.device)
    if different:
        (planned, here), *_ = different
        raise UsageError(f"the plan is for {planned}; this is {here}", hint=_replan_hint(request, plan))


def _device_differences(plan: Plan, device: torch.device) -> list[tuple[str, str]]:
    """Return how the plan's device differs from this one, as text for both."""
    if device.type != "cuda":
        here: dict[str, Any] = {"kind": device.type}
    else:
        card = torch.cuda.get_device_properties(device)
        here = {"kind": "cuda", "card": card.name, "total_bytes": card.total_memory}
    return differences(plan_facts(plan), here)


def _replan_hint(request: FitRequest, plan: Plan) -> str:
    again = "plan again"
    if isinstance(request.model_or_workload, (str, os.PathLike)):
        words = ["autoaccum", "plan", os.fspath(request.model_or_workload), "--target-batch", str(request.target_batch)]
        again = f"run {shlex.join(words)} -o FILE for a new plan, or omit --plan"
    return f"{again}, or use its micro-batch anyway: {_as_option(plan.micro_batch)}"


def _as_option(micro_batch: int) -> str:
    return f"micro_batch={micro_batch} (--micro-batch {micro_batch})"
