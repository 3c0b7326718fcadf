"""The plans of a study: the one whose ceiling no trial exceeds, and that of the best setting."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.planning.planner import plan as make_plan
from autoaccum.planning.records import Plan
from autoaccum.planning.request import LOOKED_AT
from autoaccum.tuning.events import Listener, Noted
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.trainer import check_unchanged
from autoaccum.tuning.settings import Setting

Output = Callable[[str], None]


def load_plan(request: TuneRequest) -> Plan | None:
    """The plan that was given.

    Raises:
        UsageError: It is none, or for several ranks.
        PlanFileError: It cannot be read.
    """
    given = request.plan
    if given is None:
        return None
    plan = Plan.load(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, or the file of one: "plan.json"')
    if plan.world_size != 1:
        raise UsageError(
            f"the plan is for {plan.world_size} ranks, and trials train on one", hint="plan with --world-size 1"
        )
    return plan


def check_plan(plan: Plan, request: TuneRequest, facts: Facts) -> None:
    """Refuse a plan whose ceiling says nothing here.

    Raises:
        UsageError: It is for another workload, device, precision, optimizer or mode of BatchNorm, or for smaller
            updates.
    """
    here = "cpu" if facts.card is None else facts.card
    kind = plan.device.get("kind")
    planned = "cpu" if kind == "cpu" else plan.device.get("card") or (facts.card if kind == "simulated" else None)
    if planned != here:
        raise UsageError(f"the plan is for {plan.device.get('name')}; here is {here}", hint="plan again here")
    if plan.target_batch < request.target_batch.high:
        raise UsageError(
            f"the plan is for updates of {plan.target_batch} samples, the study has such of up to"
            f" {request.target_batch.high}",
            hint=f"plan with --target-batch {request.target_batch.high}",
        )
    for name in ("digest", "precision", "optimizer", "batchnorm"):
        planned, own = plan.workload.get(name), getattr(facts, name)
        if planned is not None and planned != own:
            raise UsageError(_difference(name, planned, own, facts), hint="plan again, or leave --plan away")


def make_ceiling_plan(
    request: TuneRequest,
    facts: Facts,
    target_batch: int,
    tell: Listener,
    on_output: Output | None,
    most: int | None = None,
) -> Plan:
    """Plan updates of `target_batch` samples as the study trains, with micro-batches of at most `most`.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As `planning.planner.plan`.
    """
    made = make_plan(
        request.reference,
        target_batch=target_batch,
        device=request.device,
        memory=request.memory,
        reserve=request.reserve,
        precision=request.precision,
        batchnorm=request.batchnorm,
        multiple_of=request.multiple_of,
        optimizer=request.optimizer,
        worst_of=None if facts.has_batch else LOOKED_AT,
        max_micro_batch=most,
        on_event=tell,
        on_output=on_output,
    )
    check_unchanged(request, facts.digest, str(made.workload.get("digest")))
    return made


def plan_setting(
    setting: Setting, plan: Plan, request: TuneRequest, facts: Facts, tell: Listener, on_output: Output | None
) -> Plan | None:
    """The setting's own schedule, proved by a trial, with its learning rate; None where it could not be proved.

    Args:
        setting: What is to be trained with.
        plan: The study's, which is taken where it is that schedule.
        request: What the study is asked to do.
        facts: Of the workload.
        tell: Told of the planner's steps.
        on_output: Given what the workload prints.
    """
    same = plan.kind == "measured" and plan.target_batch == setting.target_batch
    parts = setting.cut(plan.multiple_of)
    if not (same and plan.micro_batches == parts):
        most: int = max(parts)
        try:
            plan = make_ceiling_plan(request, facts, setting.target_batch, tell, on_output, most)
        except AutoaccumError as error:
            tell(Noted(f"the best setting has no plan: {error}"))
            return None
    return dataclasses.replace(plan, learning_rate=setting.learning_rate)


def _difference(name: str, planned: Any, own: Any, facts: Facts) -> str:
    if name == "digest":
        return f"the plan is for another workload than {facts.name}, or for another state of its files"
    return f"the plan is for {planned}; here is {own}"
