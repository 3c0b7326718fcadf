"""The start of a training: from a checkpoint or new, with its micro-batch and learning rate.

On resuming, these may change: `epochs` and `steps`, everything about evaluations, checkpoints and callbacks, the
workers that read data, the micro-batch, the plan, the device and its budget, `clip_norm`, `skip_nonfinite`, `check`,
and the workload's code (with a warning). A learning-rate schedule continues from its saved state. All else must
be equal.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoaccum.accumulation.argument_checks import check_plan, current_facts, differences, plan_facts, unwrap_model
from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.ranks.group import world_size
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.accumulation.sharded_tensors import model_class
from autoaccum.checks import counted
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.training.checkpoints import read_checkpoint
from autoaccum.training.data_source import Source
from autoaccum.training.fit_events import Notice
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.stopping import TrainingRanks
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup


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
    read: LoadedCheckpoint | None = None

    def choose() -> Path | None:
        nonlocal read
        if resume == "never" and folder.checkpoints.paths():
            raise UsageError(f"{folder.path} already holds a run, and resume is never", hint="use another folder")
        newest = folder.checkpoints.newest(notify)
        if newest is None and resume == "must":
            raise UsageError(f"{folder.path} holds no checkpoint to resume", hint="start the run without --resume must")
        read = None if newest is None else LoadedCheckpoint(*newest)
        return None if newest is None else newest[0]

    path = ranks.by_first(choose)
    return read if path is None or read is not None else LoadedCheckpoint(path, read_checkpoint(path))


def describe_run(request: FitRequest, components: TrainingComponents, source: Source) -> dict[str, Any]:
    """Return what must be equal on resuming, as plain values, except what `restore_training` compares."""
    return {
        "target batch": request.target_batch,
        "seed": request.seed,
        **{f"data: {name}": value for name, value in source.fingerprint().items()},
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


def check_same_run(
    checkpoint: LoadedCheckpoint, here: Mapping[str, Any], setup: TrainingSetup, notify: Callable[[Any], Any]
) -> None:
    """Raise UsageError, which names all differences, rather than resume a different training; warn of changed code."""
    then = checkpoint.record["run"]
    different = "; ".join(
        f"{name} was {then.get(name)!r}, is {value!r}" for name, value in here.items() if then.get(name) != value
    )
    if different:
        raise UsageError(
            f"{checkpoint.path} belongs to another training: {different}",
            hint="use the same arguments as before, or another run folder",
        )
    if checkpoint.record["digest"] != setup.digest:
        notify(Notice(f"{setup.name} has changed since the run began: training continues with the new code"))


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
    known = _choose_without_planning(request, setup, checkpoint, notify)
    if known is not None:
        multiple = max(setup.multiple_of, 1 if known.plan is None else known.plan.multiple_of)
        check_multiple(request.target_batch, multiple, "the target batch")
        return replace(known, multiple_of=multiple)
    try:
        plan = setup.plan(source.planning_batch, notify)
    except (UsageError, NotMeasuredError) as error:
        hint = "" if error.hint is None else f"{error.hint}; or "
        raise type(error)(error.message, hint=f"{hint}give a number of your own: {_as_option(32)}") from error.__cause__
    if checkpoint is not None and checkpoint.plan is not None:  # A tuned learning rate stays valid for the new plan.
        plan = replace(plan, learning_rate=checkpoint.plan.learning_rate)
    return MicroBatchChoice(plan.micro_batch, plan, plan.multiple_of)


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
    plan = choice.plan
    if plan is None:
        return
    of_model = components.model, components.optimizer, components.objective
    modes = components.precision, components.batchnorm, components.accumulate_in
    try:
        check_plan(plan, current_facts(*of_model, *modes, components.savers))
    except UsageError as error:
        raise UsageError(error.message, hint=_replan_hint(request, plan)) from None
    digest = plan.workload.get("digest")
    if request.plan is not None and digest and setup.digest and digest != setup.digest:
        notify(Notice(f"{setup.name} is not the workload of the plan, or has changed since: the plan may not fit"))
    if plan.learning_rate is not None and request.learning_rate is None:
        notify(Notice(f"the learning rate is {plan.learning_rate:.6g}: the plan was tuned with it", warns=False))
    if components.averages is not None and "ema" not in (plan.workload.get("keeps") or ()):
        notify(Notice('the plan does not count the averaged weights: if memory runs out, plan again with keeps="ema"'))
    if plan.coupling is not None and plan.iter_size > 1:
        # The Accumulator itself warns of BatchNorm layers, in more detail; exact ones are those of the whole window.
        already_warned = () if components.batchnorm == "frozen" else batchnorm_names(components.model)
        for sentence in plan.coupling.warnings(already_warned, is_joint=bool(components.objective.coupled)):
            notify(Notice(sentence))


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
    different = _place_differences(plan, setup.device)
    if not different:
        return MicroBatchChoice(plan.micro_batch, plan)
    notify(Notice(f"the run was planned for {different[0][0]}, and this is {different[0][1]}: it is planned again"))
    return None


def _check_given_plan(plan: Plan, request: FitRequest, setup: TrainingSetup) -> None:
    """Check a plan before anything is built; `check_choice` compares the rest."""
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, or the file of one: "plan.json"')
    if plan.parallel == "fsdp2" and isinstance(request.model_or_workload, nn.Module):
        raise UsageError("the plan shards the model, and fit shards those that it builds", hint="give it a workload")
    different = _place_differences(plan, setup.device)
    if plan.target_batch != request.target_batch:
        different.append((f"updates of {plan.target_batch} samples", f"updates of {request.target_batch}"))
    for name in ("parallel", "mesh"):
        planned, asked = getattr(plan, name), getattr(request.options, name)
        if None not in (planned, asked) and planned != asked:
            different.append((f"{name}={planned!r}", f"{name}={asked!r}"))
    if different:
        planned, here = different[0]
        raise UsageError(f"the plan is for {planned}; here is {here}", hint=_replan_hint(request, plan))


def _place_differences(plan: Plan, device: torch.device) -> list[tuple[str, str]]:
    """Return how the plan's ranks and device differ from those here, as text for both."""
    here: dict[str, Any] = {"kind": device.type}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        here |= {"card": card.name, "total_bytes": card.total_memory}
    different = [(plan.world_size, world_size())] if plan.world_size != world_size() else []
    by_ranks = [(counted(planned, "rank"), counted(ranks, "rank")) for planned, ranks in different]
    return [*by_ranks, *differences(plan_facts(plan), here)]


def _replan_hint(request: FitRequest, plan: Plan) -> str:
    again = "plan again"
    if isinstance(request.model_or_workload, (str, os.PathLike)):
        words = ["autoaccum", "plan", os.fspath(request.model_or_workload), "--target-batch", str(request.target_batch)]
        again = f"run {shlex.join(words)} -o FILE for a new plan, or omit --plan"
    return f"{again}, or use its micro-batch anyway: {_as_option(plan.micro_batch)}"


def _as_option(micro_batch: int) -> str:
    return f"micro_batch={micro_batch} (--micro-batch {micro_batch})"
