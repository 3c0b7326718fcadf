"""`tune`: find the setting that a workload trains best with, by a study that can be stopped and continued."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from optuna.storages import RDBStorage

from autoaccum.checks import check_alone
from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import DEFAULT_WORST_OF, PlanRequest, Prefer
from autoaccum.planning.planner import make_plan
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.study import (
    Search,
    Study,
    count_finished,
    is_default,
    open_storage,
    study_config,
)
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tuning_records import (
    LearningRateRange,
    Listener,
    SearchSpace,
    SearchStarted,
    Setting,
    StudyOpened,
    TuneRequest,
    Tuning,
    WorkloadFacts,
)

_RANGE_FACTOR = 100.0
"""The default range of learning rates extends by this factor from the workload's own rate, up and down."""

_NEAR_FACTOR = 2.0

Output = Callable[[str], None]


def tune(request: TuneRequest, *, on_event: Listener | None = None, on_output: Output | None = None) -> Tuning:
    """Run the trials that the study still lacks, and rank them all; `autoaccum.tune` documents the arguments.

    `on_event` receives every event of `tuning_records`, the planner's, and warnings (`fit_events.Notice`);
    `on_output` receives what the workload prints.

    Raises:
        AutoaccumError: As in `autoaccum.tune`.
    """
    check_alone("tune")
    began = time.monotonic()
    notices: list[str] = []

    def notify(event: Any) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)
        if on_event is not None:
            on_event(event)

    with open_storage(request.storage) as storage:
        tuning = _Tuner(TrialProcesses(request, on_output), notify, on_output).run(storage)
    return dataclasses.replace(tuning, seconds=time.monotonic() - began, warnings=tuple(dict.fromkeys(notices)))


class _Tuner:
    """The steps of one call, one after the other."""

    _facts: WorkloadFacts

    def __init__(self, processes: TrialProcesses, notify: Listener, on_output: Output | None) -> None:
        self._processes, self._notify, self._on_output = processes, notify, on_output

    def run(self, storage: RDBStorage) -> Tuning:
        request = self._processes.request
        facts = self._facts = self._processes.describe()
        budget, default = request.budget_samples or _one_epoch(facts), facts.learning_rate
        rates = request.learning_rate or LearningRateRange(default / _RANGE_FACTOR, default * _RANGE_FACTOR)
        name = request.study or facts.name
        study = Study(storage, request.storage, name, study_config(request, facts, budget, rates))
        self._notify(StudyOpened(facts, name, request.storage, count_finished(study.rows()), request.trials))
        plan = study.load_plan()
        is_known = plan is not None
        if plan is None:
            plan = self._make_plan(request.target_batch.high, prefer="fastest")
            plan = study.load_plan() or study.save_plan(plan)  # If another worker was first, its ceiling holds for all.
        if plan.multiple_of > 1:
            options = request.options.with_spec(multiple_of=plan.multiple_of)
            self._processes.request = dataclasses.replace(request, options=options)
        space = SearchSpace(
            learning_rates=rates,
            target_batches=request.target_batch,
            micro_batch=plan.micro_batch,
            default_learning_rate=default,
        )
        self._notify(SearchStarted(space, remembered=is_known))
        ended = Search(study, space, budget, plan.largest_fit, self._processes, self._notify).run()
        rows = study.rows()
        complete = sorted((row for row in rows if row.state == "complete"), key=lambda row: (row.loss, row.number))
        best = complete[0].setting if complete else None
        for end in (rates.low, rates.high):
            if best is not None and max(best.learning_rate / end, end / best.learning_rate) < _NEAR_FACTOR:
                self._warn(f"the best learning rate lies near the end of the range, {end:.3g}: search beyond it")
        return Tuning(
            study=name,
            storage=request.storage,
            workload={"reference": request.reference, **dataclasses.asdict(facts)},
            space=space,
            budget=budget,
            rows=rows,
            best=complete[0] if complete else None,
            own=next((row for row in complete if is_default(row, space)), None),
            plan=None if best is None else self._plan_best(best, plan),
            ended=ended,
            throughput=plan.throughput,
        )

    def _make_plan(self, target_batch: int, most: int | None = None, prefer: Prefer = "largest") -> Plan:
        """Plan updates as the study trains, with micro-batches of at most `most`. Raises as the planner."""
        request, facts = self._processes.request, self._facts
        given = request.options
        options = Options(spec=given.spec, device=given.device, memory=given.memory, reserve=given.reserve)
        options = options.with_spec(worst_of=None if facts.has_batch else DEFAULT_WORST_OF)
        plan_request = PlanRequest(target_batch, options, max_micro_batch=most, ceiling=True, prefer=prefer)
        plan = make_plan(request.reference, plan_request, on_event=self._notify, on_output=self._on_output)
        self._processes.check_unchanged(plan.workload.digest)
        return plan

    def _plan_best(self, setting: Setting, plan: Plan) -> Plan | None:
        """Plan the best setting's schedule, confirmed by a trial, with its learning rate; None where that fails."""
        parts = setting.cut(plan.multiple_of)
        if plan.kind != "measured" or plan.micro_batches != parts:
            try:
                plan = self._make_plan(setting.target_batch, max(parts))
            except AutoaccumError as error:
                self._warn(f"the best setting has no plan: {error}")
                return None
        if plan.micro_batches != parts:
            self._warn(f"micro-batches of {max(parts)} no longer fit: the plan has {plan.micro_batch}")
        return dataclasses.replace(plan, learning_rate=setting.learning_rate)

    def _warn(self, text: str) -> None:
        self._notify(Notice(text))


def _one_epoch(facts: WorkloadFacts) -> int:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} has no length, and no budget is given",
            hint="give the length of a trial: --budget-samples 10000 (budget_samples=10000)",
        )
    return facts.training_samples
