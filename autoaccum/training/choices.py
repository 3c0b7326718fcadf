"""What a training begins with: the micro-batch and the learning rate, given, of a plan, or of the run that goes on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoaccum.accumulation.planned import differences, planned_facts
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.records import Plan
from autoaccum.training.data.source import Source
from autoaccum.training.events import Noted, Planning
from autoaccum.training.request import FitRequest
from autoaccum.training.resuming import Saved
from autoaccum.training.subjects import Subject
from autoaccum.training.trainee import Trainee

_ROUNDING = 1e-6
"""Of a rate that is a tensor in float32."""


@dataclass(frozen=True)
class Choice:
    """A micro-batch, the plan it is from (None where it was given as a number), and what it is a multiple of."""

    micro_batch: int
    plan: Plan | None = None
    multiple_of: int = 1


def choose_micro_batch(
    request: FitRequest, subject: Subject, source: Source, saved: Saved | None, tell: Callable[[Any], Any]
) -> Choice:
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
            tell(Noted(f"{' and '.join(unused)} {verb} not used: the micro-batch is known without planning"))
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
    return Choice(made.micro_batch, made, made.multiple_of)


def choose_learning_rate(request: FitRequest, plan: Plan | None, tell: Callable[[Any], Any]) -> float | None:
    """What was given, else what the plan was tuned with, which is told; None: the optimizer's own."""
    if request.learning_rate is not None or plan is None or plan.learning_rate is None:
        return request.learning_rate
    tell(Noted(f"the learning rate is {plan.learning_rate:.6g}: the plan was tuned with it", warns=False))
    return plan.learning_rate


def tell_of_schedule(learning_rate: float | None, trainee: Trainee, tell: Callable[[Any], Any]) -> None:
    """Say where a schedule begins, if it is elsewhere: some, such as `OneCycleLR`, have rates of their own."""
    if learning_rate is None or trainee.scheduler is None:
        return
    begins = float(trainee.optimizer.param_groups[0].get("initial_lr", learning_rate))
    if not math.isclose(begins, learning_rate, rel_tol=_ROUNDING):
        name = type(trainee.scheduler).__name__
        tell(Noted(f"the learning rate is to be {learning_rate:.6g}, and {name} begins at {begins:.6g}", warns=False))


def _without_trials(
    request: FitRequest, subject: Subject, saved: Saved | None, tell: Callable[[Any], Any]
) -> Choice | None:
    if request.micro_batch is not None:
        return Choice(request.micro_batch)
    if request.plan is not None:
        given = Plan.load(request.plan) if isinstance(request.plan, (str, os.PathLike)) else request.plan
        _check_given(given, request, subject, tell)
        return Choice(given.micro_batch, given)
    if saved is None:
        return None
    kept = saved.plan
    if kept is None:
        return Choice(saved.micro_batch)
    different = _elsewhere(kept, subject.device)
    if not different:
        return Choice(kept.micro_batch, kept)
    tell(Noted(f"the run was planned for {different[0][0]}, and here is {different[0][1]}: it is planned again"))
    return None


def _check_given(plan: Plan, request: FitRequest, subject: Subject, tell: Callable[[Any], Any]) -> None:
    """What the Accumulator does not see; it compares model, loss, optimizer, precision and device."""
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, or the file of one: "plan.json"')
    anyhow = f"plan again, or take its number all the same: {_as_number(plan.micro_batch)}"
    if plan.world_size != 1:
        raise UsageError(
            f"the plan is for {plan.world_size} ranks, training on several is not there yet",
            hint="plan with --world-size 1",
        )
    if plan.target_batch != request.target_batch:
        raise UsageError(
            f"the plan is for updates of {plan.target_batch} samples, here they have {request.target_batch}",
            hint=anyhow,
        )
    different = _elsewhere(plan, subject.device)
    if different:
        raise UsageError(f"the plan is for {different[0][0]}; here is {different[0][1]}", hint=anyhow)
    digest = plan.workload.get("digest")
    if digest and subject.digest and digest != subject.digest:
        changed = f"{subject.name} is not what the plan was made for, or has changed since"
        tell(Noted(f"{changed}: should memory run out, plan again"))


def _elsewhere(plan: Plan, device: torch.device) -> list[tuple[str, str]]:
    """By what the plan's device differs from this one, in words."""
    if device.type != "cuda":
        here: dict[str, Any] = {"kind": device.type}
    else:
        card = torch.cuda.get_device_properties(device)
        here = {"kind": "cuda", "card": card.name, "total_bytes": card.total_memory}
    return differences(planned_facts(plan), here)


def _as_number(micro_batch: int) -> str:
    return f"micro_batch={micro_batch} (--micro-batch {micro_batch})"
