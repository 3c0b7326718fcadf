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
from autoaccum.planning.plan_request import DEFAULT_LONGEST_OF, PlanRequest, Prefer
from autoaccum.planning.planner import make_plan
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.study import (
    Search,
    Study,
    count_finished,
    open_storage,
    study_config,
)
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

    def __init__(self, processes: TrialProcesses, notify: Listener, on_output: Output | None) -> None:
        self._processes, self._notify, self._on_output = processes, notify, on_output

    def run(self, storage: RDBStorage) -> Tuning:
        request = self._processes.request
        facts = self._processes.describe()
        budget, default = request.budget_samples or _one_epoch(facts), facts.learning_rate
        rates = request.learning_rate or LearningRateRange(default / _RANGE_FACTOR, default * _RANGE_FACTOR)
        name = request.study or facts.name
        study = Study(storage, request.storage, name, study_config(request, facts, budget, rates))
        self._notify(StudyOpened(facts, name, request.storage, count_finished(study.rows()), request.trials))
        plan = study.load_plan()
        is_known = plan is not None
        if plan is None:
            plan = self._make_plan(facts, request.target_batches[-1], prefer="fastest")
            plan = study.load_plan() or study.save_plan(plan)  # If another worker was first, its plan holds for all.
        if plan.multiple_of > 1:
            options = request.options.with_spec(multiple_of=plan.multiple_of)
            self._processes.request = dataclasses.replace(request, options=options)
        space = SearchSpace(
            learning_rates=rates, target_batches=request.target_batches, micro_batches=_micro_batches(plan)
        )
        self._notify(SearchStarted(space, plan, remembered=is_known))
        ended = Search(study, space, default, budget, plan, self._processes, self._notify).run()
        rows = study.rows()
        complete = sorted((row for row in rows if row.state == "complete"), key=lambda row: (row.loss, row.number))
        best = complete[0] if complete else None
        rate = None if best is None else best.learning_rate
        for end in (rates.low, rates.high):
            if rate is not None and max(rate / end, end / rate) < _NEAR_FACTOR:
                words = f"the best learning rate lies near the end of the range, {end:.3g}: search beyond it"
                self._notify(Notice(words))
        return Tuning(
            study=name,
            storage=request.storage,
            workload={"reference": request.reference, **dataclasses.asdict(facts)},
            space=space,
            budget=budget,
            rows=rows,
            best=best,
            own=next((row for row in complete if row.learning_rate == default), None),
            plan=None if best is None else self._plan_best(facts, best, plan),
            ended=ended,
            throughput=plan.throughput,
        )

    def _plan_best(self, facts: WorkloadFacts, best: Row, plan: Plan) -> Plan | None:
        """Return the plan of the best setting, proved by a trial, with its learning rate; None where that fails."""
        if (best.target_batch, best.micro_batch) != (plan.target_batch, plan.micro_batch):
            try:
                plan = self._make_plan(facts, best.target_batch or plan.target_batch, best.micro_batch)
            except AutoaccumError as error:
                self._notify(Notice(f"the best setting has no plan: {error}"))
                return None
        return dataclasses.replace(plan, learning_rate=best.learning_rate)

    def _make_plan(
        self, facts: WorkloadFacts, target_batch: int, most: int | None = None, prefer: Prefer = "largest"
    ) -> Plan:
        """Plan updates as the study trains, in micro-batches of at most `most` samples; raises as the planner."""
        request = self._processes.request
        given = request.options
        options = Options(spec=given.spec, device=given.device, memory=given.memory, reserve=given.reserve)
        options = options.with_spec(longest_of=None if facts.has_batch else DEFAULT_LONGEST_OF)
        plan_request = PlanRequest(target_batch, options, max_micro_batch=most, exact_max=True, prefer=prefer)
        plan = make_plan(request.reference, plan_request, on_event=self._notify, on_output=self._on_output)
        self._processes.check_unchanged(plan.workload.digest)
        return plan


def _micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the micro-batches to search: those that were timed, where their samples depend on each other.

    Without such coupling the gradient is the full batch's whatever the micro-batch is, so that the plan's is best. A
    BatchNorm normalises no single sample.
    """
    if not plan.coupling or plan.throughput is None:
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
