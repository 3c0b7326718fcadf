"""`tune`: find the setting that a workload trains best with, by a study that can be stopped and continued."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from optuna.storages import RDBStorage

from autoaccum.checks import check_alone
from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import DEFAULT_LONGEST_OF, PlanRequest, Prefer
from autoaccum.planning.planner import make_plan
from autoaccum.tuning.study import Search, Study, open_storage, study_config
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tuning_records import (
    LearningRateRange,
    Listener,
    Row,
    SearchSpace,
    SearchStarted,
    StudyOpened,
    TuneRequest,
    Tuning,
    WorkloadFacts,
)

_RANGE_FACTOR = 100.0
"""The default range of learning rates extends by this factor from the workload's own rate, up and down."""
_NEAR_FACTOR = 2.0
"""A best rate closer than this to an end of the range is reported."""

Output = Callable[[str], None]


def tune(request: TuneRequest, *, on_event: Listener | None = None, on_output: Output | None = None) -> Tuning:
    """Run the trials that the study still lacks, and rank them all; `autoaccum.tune` documents the arguments.

    `on_event` is a `Listener`; `on_output` receives what the workload prints.

    Raises:
        AutoaccumError: As in `autoaccum.tune`.
    """
    check_alone("tune")
    began = time.monotonic()
    warnings: list[Message] = []

    def notify(event: Any) -> None:
        if isinstance(event, Message):
            warnings.append(event)
        if on_event is not None:
            on_event(event)

    with open_storage(request.storage) as storage:
        tuning = _tune(TrialProcesses(request, on_output), storage, notify)
    return dataclasses.replace(tuning, seconds=time.monotonic() - began, warnings=tuple(dict.fromkeys(warnings)))


def _tune(processes: TrialProcesses, storage: RDBStorage, notify: Listener) -> Tuning:
    request, facts = processes.request, processes.describe()
    processes = dataclasses.replace(processes, digest=facts.digest)
    budget, default = request.budget_samples or _one_epoch(facts), facts.learning_rate
    rates = request.learning_rate or LearningRateRange(default / _RANGE_FACTOR, default * _RANGE_FACTOR)
    name = request.study or facts.name
    study = Study(storage, name, study_config(request, facts, budget, rates))
    notify(StudyOpened(facts, name, request.storage, len(study.finished()), request.trials))
    plan = study.load_plan()
    is_known = plan is not None
    if plan is None:
        plan = _make_plan(processes, facts, notify, request.target_batches[-1], prefer="fastest")
        plan = study.load_plan() or study.save_plan(plan)  # If another worker was first, its plan holds for all.
    if plan.multiple_of > 1:
        request = dataclasses.replace(request, options=request.options.with_spec(multiple_of=plan.multiple_of))
        processes = dataclasses.replace(processes, request=request)
    batches = {"target_batches": request.target_batches, "micro_batches": _micro_batches(plan)}
    space = SearchSpace(learning_rates=rates, **batches)
    notify(SearchStarted(space, plan, remembered=is_known))
    ended = Search(
        study=study, space=space, default_rate=default, budget=budget, plan=plan, processes=processes, notify=notify
    ).run()
    rows = study.rows()
    complete = sorted((row for row in rows if row.state == "complete"), key=lambda row: (row.loss, row.number))
    best, best_plan = complete[0] if complete else None, None
    if best is not None:
        for end in (rates.low, rates.high):
            rate = best.learning_rate or end
            if max(rate / end, end / rate) < _NEAR_FACTOR:
                notify(message("rate_near_end", end=end))
        best_plan = _plan_best(processes, facts, notify, best, plan)
    return Tuning(
        study=name,
        storage=request.storage,
        workload=facts,
        space=space,
        budget=budget,
        rows=rows,
        best=best,
        own=next((row for row in complete if row.learning_rate == default), None),
        plan=best_plan,
        ended=ended,
        throughput=plan.throughput,
    )


def _plan_best(processes: TrialProcesses, facts: WorkloadFacts, notify: Listener, best: Row, plan: Plan) -> Plan | None:
    """Return the plan of the best setting, proved by a trial, with its learning rate; None where that fails."""
    if (best.target_batch, best.micro_batch) != (plan.target_batch, plan.micro_batch):
        try:
            plan = _make_plan(processes, facts, notify, best.target_batch or plan.target_batch, best.micro_batch)
        except AutoaccumError as error:
            notify(message("best_not_planned", error=str(error)))
            return None
    return dataclasses.replace(plan, learning_rate=best.learning_rate)


def _make_plan(
    processes: TrialProcesses,
    facts: WorkloadFacts,
    notify: Listener,
    target_batch: int,
    most: int | None = None,
    prefer: Prefer = "largest",
) -> Plan:
    """Plan updates as the study trains, in micro-batches of at most `most` samples; raises as the planner."""
    given = processes.request.options
    machine: dict[str, Any] = {"device": given.device, "memory": given.memory, "reserve": given.reserve}
    options = Options(spec=given.spec, overrides=given.overrides, **machine)
    options = options.with_spec(longest_of=None if facts.has_batch else DEFAULT_LONGEST_OF)
    request = PlanRequest(target_batch, options, max_micro_batch=most, exact_max=True, prefer=prefer)
    plan = make_plan(processes.request.reference, request, on_event=notify, on_output=processes.on_output)
    processes.check_unchanged(plan.workload.digest)
    return plan


def _micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the micro-batches to search: those that were timed, where their samples depend on each other.

    Without such coupling the gradient is the full batch's whatever the micro-batch is, so that the plan's is best. A
    BatchNorm normalises no single sample. The token budget is the plan's in all trials, and decides alone.
    """
    if not plan.coupling or plan.throughput is None or plan.tokens is not None:
        return (plan.micro_batch,)
    sizes = {speed.micro_batch for speed in plan.throughput.speeds if speed.micro_batch > 1}
    return tuple(sorted(sizes | {plan.micro_batch}))


def _one_epoch(facts: WorkloadFacts) -> int:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} has no length, and no budget is given",
            hint="give the length of a trial: --budget-samples 10000 (budget_samples=10000)",
        )
    return facts.training_samples
