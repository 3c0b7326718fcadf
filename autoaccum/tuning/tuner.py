"""`tune`: find the setting that a workload trains best with, by a study that can be stopped and continued."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from autoaccum.accumulation.coupling import describe_modules
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
    parse_storage_address,
    study_config,
)
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tuning_records import (
    LearningRateRange,
    Listener,
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
_PLANNED_WITH = ("device", "memory", "reserve", "precision", "batchnorm", "coupled", "multiple_of", "optimizer")

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

    address = parse_storage_address(request.storage)
    with open_storage(address) as storage:
        tuning = _Tuner(TrialProcesses(request, on_output), notify, on_output).run(storage, address)
    return dataclasses.replace(tuning, seconds=time.monotonic() - began, warnings=tuple(dict.fromkeys(notices)))


class _Tuner:
    """The steps of one call, one after the other."""

    _facts: WorkloadFacts

    def __init__(self, processes: TrialProcesses, notify: Listener, on_output: Output | None) -> None:
        self._processes, self._notify, self._on_output = processes, notify, on_output

    def run(self, storage: Any, address: Any) -> Tuning:
        request = self._processes.request
        facts = self._facts = self._processes.describe()
        budget, default = request.budget_samples or _one_epoch(facts), facts.learning_rate
        rates = request.learning_rate or LearningRateRange(default / _RANGE_FACTOR, default * _RANGE_FACTOR)
        study = Study(storage, address, request.study or facts.name, study_config(request, facts, budget, rates))
        name = study.optuna.study_name
        self._notify(StudyOpened(facts, name, repr(address), count_finished(study.rows()), request.trials))
        plan = study.load_plan()
        is_known = plan is not None
        if plan is None:
            plan = self._make_plan(request.target_batch.high, prefer="fastest")
            plan = study.load_plan() or study.save_plan(plan)  # If another worker was first, its ceiling holds for all.
        if plan.multiple_of > 1:
            options = dataclasses.replace(request.options, multiple_of=plan.multiple_of)
            self._processes.request = dataclasses.replace(request, options=options)
        coupled, warning = describe_coupling(plan, facts)
        if warning is not None:
            self._notify(Notice(warning))
        timed = [] if plan.throughput is None else [speed.micro_batch for speed in plan.throughput.speeds]
        space = SearchSpace(
            learning_rates=rates,
            target_batches=request.target_batch,
            # BatchNorm cannot normalise a single sample.
            micro_batches=tuple(size for size in timed if size > 1) or (plan.micro_batch,),
            micro_batch=plan.micro_batch,
            coupled=coupled,
            default_learning_rate=default,
        )
        self._notify(SearchStarted(space, plan.micro_batch, remembered=is_known))
        search = Search(study, space, budget, plan.largest_fit, self._processes, self._notify)
        ended = search.run()
        rows = study.rows()
        complete = sorted((row for row in rows if row.state == "complete"), key=lambda row: (row.loss, row.number))
        best = complete[0] if complete else None
        if best is not None and best.setting is not None:
            self._warn_of_range(best.setting.learning_rate, rates)
        tuning = Tuning(
            study=name,
            storage=repr(address),
            workload={"reference": request.reference, **dataclasses.asdict(facts)},
            space=space,
            budget=budget,
            rows=rows,
            best=best,
            own=next((row for row in complete if is_default(row, space)), None),
            ended=ended,
            throughput=plan.throughput,
        )
        return dataclasses.replace(tuning, plan=self._plan_best(tuning, plan))

    def _warn_of_range(self, rate: float, rates: LearningRateRange) -> None:
        """Warn if the best learning rate lies near an end of the range."""
        for end in (rates.low, rates.high):
            if max(rate / end, end / rate) < _NEAR_FACTOR:
                self._notify(
                    Notice(f"the best learning rate lies near the end of the range, {end:.3g}: search beyond it")
                )

    def _make_plan(self, target_batch: int, most: int | None = None, prefer: Prefer = "largest") -> Plan:
        """Plan updates as the study trains, with micro-batches of at most `most`. Raises as the planner."""
        request, facts = self._processes.request, self._facts
        options = {name: getattr(request.options, name) for name in _PLANNED_WITH}
        options["worst_of"] = None if facts.has_batch else DEFAULT_WORST_OF
        plan_request = PlanRequest(target_batch, Options(**options), max_micro_batch=most, ceiling=True, prefer=prefer)
        plan = make_plan(request.reference, plan_request, on_event=self._notify, on_output=self._on_output)
        self._processes.check_unchanged(str(plan.workload.get("digest")))
        return plan

    def _plan_best(self, tuning: Tuning, plan: Plan) -> Plan | None:
        """Plan the best setting's schedule, confirmed by a trial, with its learning rate; None without a best."""
        if tuning.best is None or tuning.best.setting is None:
            return None
        setting = tuning.best.setting
        parts = setting.cut(plan.multiple_of)
        if plan.kind != "measured" or plan.micro_batches != parts:
            try:
                plan = self._make_plan(setting.target_batch, max(parts))
            except AutoaccumError as error:
                self._notify(Notice(f"the best setting has no plan: {error}"))
                return None
        if plan.micro_batches != parts:
            self._notify(Notice(f"micro-batches of {max(parts)} no longer fit: the plan has {plan.micro_batch}"))
        return dataclasses.replace(plan, learning_rate=setting.learning_rate)


def _one_epoch(facts: WorkloadFacts) -> int:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} has no length, and no budget is given",
            hint="give the length of a trial: --budget-samples 10000 (budget_samples=10000)",
        )
    return facts.training_samples


def describe_coupling(plan: Plan, facts: WorkloadFacts) -> tuple[str | None, str | None]:
    """Return why the micro-batch changes the training, as a clause, and a warning if that could not be determined.

    A BatchNorm counts wherever the model has one that is neither frozen nor exact: the plan's experiment uses the
    initial weights, and does not see one whose own weight is still zero, as at the start of residual blocks. A loss
    does not count where it is computed of the whole effective batch.
    """
    normed = () if facts.batchnorm in ("frozen", "exact") else facts.batchnorms
    coupling = plan.coupling
    loss = False if facts.coupled or coupling is None else coupling.loss
    others = [] if coupling is None else [name for name in coupling.modules if name not in facts.batchnorms]
    reasons = [
        *([f"BatchNorm in {describe_modules(normed)} normalises by the micro-batch"] if normed else []),
        *([f"samples of a micro-batch are coupled in {describe_modules(others)}"] if others else []),
        *(["the loss mixes the samples of a batch"] if loss else []),
    ]
    if not reasons and (coupling is None or coupling.reason is not None or loss is None):
        return None, (
            "it could not be determined whether the micro-batch changes the training: trials assume that it does not;"
            " check with `autoaccum verify`"
        )
    return " and ".join(reasons) or None, None
