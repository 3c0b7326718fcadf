"""`tune`: find the setting that a workload trains best with, by a study that can be stopped and continued."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoaccum.checks import check_alone
from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import DEFAULT_WORST_OF, PlanRequest
from autoaccum.planning.planner import make_plan
from autoaccum.planning.throughput import Throughput, measure_throughput, micro_batch_ladder
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.ranking import describe_coupling, find_default_result, find_noise, find_range_warning, rank
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tune_request import Budget, LearningRateRange, TuneRequest
from autoaccum.tuning.tuning_result import (
    Listener,
    SearchSpace,
    SearchStarted,
    Setting,
    StudyOpened,
    Tuning,
    WorkloadFacts,
)

if TYPE_CHECKING:
    from autoaccum.tuning.study import Study

_RANGE_FACTOR = 100.0
"""The default range of learning rates extends by this factor from the workload's own rate, up and down."""

_PLANNED_WITH = ("device", "memory", "reserve", "precision", "batchnorm", "coupled", "multiple_of", "optimizer")

Output = Callable[[str], None]


def tune(request: TuneRequest, *, on_event: Listener | None = None, on_output: Output | None = None) -> Tuning:
    """Run the trials that the study still lacks, and rank them all; `autoaccum.tune` documents the arguments.

    `on_event` receives every event of `tuning_result`, the planner's, and warnings (`fit_events.Notice`);
    `on_output` receives what the workload prints.

    Raises:
        AutoaccumError: As in `autoaccum.tune`.
    """
    from autoaccum.tuning.study import open_storage, parse_storage_address

    check_alone("tune")
    began = time.monotonic()
    notices: list[str] = []

    def notify(event: Any) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)
        if on_event is not None:
            on_event(event)

    address = parse_storage_address(request.storage)
    with open_storage(address, request.heartbeat) as storage:
        tuning = _Tuner(TrialProcesses(request, on_output), notify, on_output).run(storage, address)
    return dataclasses.replace(tuning, seconds=time.monotonic() - began, warnings=tuple(dict.fromkeys(notices)))


class _Tuner:
    """The steps of one call, one after the other."""

    _facts: WorkloadFacts

    def __init__(self, processes: TrialProcesses, notify: Listener, on_output: Output | None) -> None:
        self._processes, self._notify, self._on_output = processes, notify, on_output

    def run(self, storage: Any, address: Any) -> Tuning:
        from autoaccum.tuning.optuna_search import Search, count_finished
        from autoaccum.tuning.study import Study, study_config

        request = self._processes.request
        facts = self._facts = self._processes.describe()
        budget, default = request.budget or _one_epoch(facts), facts.learning_rate
        rates = request.learning_rate or LearningRateRange(default / _RANGE_FACTOR, default * _RANGE_FACTOR)
        study = Study(storage, address, request.study or facts.name, study_config(request, facts, budget, rates))
        self._notify(StudyOpened(facts, study.name, repr(address), count_finished(study.rows()), request.trials))
        known = study.load_measurements()
        plan, throughput, coupled = self._measure(study, known)
        space = SearchSpace(
            learning_rates=rates,
            target_batches=request.target_batch,
            micro_batches=tuple(speed.micro_batch for speed in throughput.speeds),
            # Other micro-batches round differently, and the fastest may be another the next time.
            micro_batch=plan.micro_batch if budget.unit == "samples" else throughput.knee,
            coupled=coupled,
            default_learning_rate=default,
        )
        self._notify(SearchStarted(space, throughput, remembered=known is not None))
        search = Search(study, space, budget, plan.largest_fit, self._processes, self._notify)
        ended = search.run()
        search.confirm()
        rows = study.rows()
        standings = rank(rows)
        if standings and (caution := find_range_warning(standings[0].setting.learning_rate, rates)):
            self._notify(Notice(caution))
        tuning = Tuning(
            study=study.name,
            storage=repr(address),
            workload={"reference": request.reference, **dataclasses.asdict(facts)},
            space=space,
            budget=budget,
            held_out=facts.held_out,
            sampler=request.sampler,
            pruner=request.pruner,
            seed=request.seed,
            throughput=throughput,
            rows=rows,
            standings=standings,
            best=standings[0] if standings else None,
            own=find_default_result(rows),
            noise=find_noise(standings),
            ended=ended,
        )
        return dataclasses.replace(tuning, plan=self._plan_best(tuning, plan))

    def _measure(self, study: Study, known: tuple[Plan, Throughput] | None) -> tuple[Plan, Throughput, str | None]:
        """Plan and time updates, unless that is known; also return why samples are coupled."""
        request, facts = self._processes.request, self._facts
        plan = self._make_plan(request.target_batch.high) if known is None else known[0]
        each = plan.multiple_of
        if each > 1:
            options = dataclasses.replace(request.options, multiple_of=each)
            self._processes.request = dataclasses.replace(request, options=options)
        coupled, warning = describe_coupling(plan, facts)
        if warning is not None:
            self._notify(Notice(warning))
        if known is not None:
            return plan, known[1], coupled
        # BatchNorm cannot normalise a single sample.
        least = min(-(-2 // each) * each if coupled else each, plan.largest_fit)
        sizes = micro_batch_ladder(plan.largest_fit, request.target_batch.sizes, least, each)
        device = facts.card or facts.device
        with self._processes.timing() as time_update:
            throughput = measure_throughput(time_update, request.target_batch.high, sizes, device)
        others = study.load_measurements()  # If another worker was first, its ceiling holds for all.
        if others is not None:
            return *others, coupled
        study.save_measurements(plan, throughput)
        return plan, throughput, coupled

    def _make_plan(self, target_batch: int, most: int | None = None) -> Plan:
        """Plan updates as the study trains, with micro-batches of at most `most`. Raises as the planner."""
        request, facts = self._processes.request, self._facts
        options = {name: getattr(request.options, name) for name in _PLANNED_WITH}
        options["worst_of"] = None if facts.has_batch else DEFAULT_WORST_OF
        plan_request = PlanRequest(target_batch, Options(**options), max_micro_batch=most, ceiling=True)
        plan = make_plan(request.reference, plan_request, on_event=self._notify, on_output=self._on_output)
        self._processes.check_unchanged(str(plan.workload.get("digest")))
        return plan

    def _plan_best(self, tuning: Tuning, plan: Plan) -> Plan | None:
        """Plan the best setting's schedule, confirmed by a trial, with its learning rate; None without a best."""
        if tuning.best is None:
            return None
        setting: Setting = tuning.best.setting
        if tuning.space.coupled is None:  # The micro-batch changes only the speed.
            setting = dataclasses.replace(setting, micro_batch=tuning.throughput.knee)
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


def _one_epoch(facts: WorkloadFacts) -> Budget:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} has no length, and no budget is given",
            hint="give the length of a trial: --budget-samples 10000 (budget_samples=10000)",
        )
    return Budget(facts.training_samples, "samples")
