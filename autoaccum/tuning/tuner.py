"""`tune`: from a workload to the setting it trains best with, by a study that can be stopped and gone on with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.argument_checks import check_launch
from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.options import Options
from autoaccum.planning.plan import Plan
from autoaccum.planning.plan_request import DEFAULT_WORST_OF, PlanRequest
from autoaccum.planning.planner import make_plan
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.ranking import describe_coupling, find_default_result, find_noise, find_range_warning, rank
from autoaccum.tuning.throughput import measure_throughput, micro_batch_ladder
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tune_request import Budget, LearningRateRange, TuneRequest
from autoaccum.tuning.tuning_result import (
    Listener,
    SearchSpace,
    SearchStarted,
    Setting,
    StudyOpened,
    Throughput,
    Tuning,
    WorkloadFacts,
)

if TYPE_CHECKING:
    from autoaccum.tuning.study import Study

_OWN_FACTOR = 100.0
"""How far the default range of learning rates reaches from the workload's own, either way."""

_PLANNED_WITH = ("device", "memory", "reserve", "precision", "batchnorm", "multiple_of", "optimizer")

Output = Callable[[str], None]


def tune(request: TuneRequest, *, on_event: Listener | None = None, on_output: Output | None = None) -> Tuning:
    """Run the trials that the study still lacks, and judge them all; `autoaccum.tune` says what can be asked for.

    Listeners are told of every event of `tuning.records` and of the planner's, and given what the workload prints.

    Raises:
        AutoaccumError: As `autoaccum.tune` says.
    """
    from autoaccum.tuning.study import open_storage, parse_storage_address

    check_launch()
    began = time.monotonic()
    noted: list[str] = []

    def tell(event: Any) -> None:
        if isinstance(event, Notice):
            noted.append(event.text)
        if on_event is not None:
            on_event(event)

    address = parse_storage_address(request.storage)
    with open_storage(address, request.heartbeat) as storage:
        tuning = _Tuner(TrialProcesses(request, on_output), tell, on_output).run(storage, address)
    return dataclasses.replace(tuning, seconds=time.monotonic() - began, warnings=tuple(dict.fromkeys(noted)))


class _Tuner:
    """Takes the steps of one call, one after the other."""

    _facts: WorkloadFacts

    def __init__(self, processes: TrialProcesses, tell: Listener, on_output: Output | None) -> None:
        self._processes, self._tell, self._on_output = processes, tell, on_output

    def run(self, storage: Any, address: Any) -> Tuning:
        from autoaccum.tuning.optuna_search import Search, count_finished
        from autoaccum.tuning.study import Study, study_config

        request = self._processes.request
        facts = self._facts = self._processes.describe()
        budget, own = request.budget or _once_over(facts), facts.learning_rate
        rates = request.learning_rate or LearningRateRange(own / _OWN_FACTOR, own * _OWN_FACTOR)
        study = Study(storage, address, request.study or facts.name, study_config(request, facts, budget, rates))
        self._tell(StudyOpened(facts, study.name, repr(address), count_finished(study.rows()), request.trials))
        known = study.load_measurements()
        plan, throughput, coupled = self._measure(study, known)
        space = SearchSpace(
            learning_rates=rates,
            target_batches=request.target_batch,
            micro_batches=tuple(speed.micro_batch for speed in throughput.speeds),
            # Sums of other parts differ in rounding: which is fastest is measured, and may be another the next time.
            micro_batch=plan.micro_batch if budget.unit == "samples" else throughput.knee,
            coupled=coupled,
            default_learning_rate=own,
        )
        self._tell(SearchStarted(space, throughput, remembered=known is not None))
        search = Search(study, space, budget, plan.largest_fit, self._processes, self._tell)
        ended = search.run()
        search.confirm()
        rows = study.rows()
        standings = rank(rows)
        if standings and (caution := find_range_warning(standings[0].setting.learning_rate, rates)):
            self._tell(Notice(caution))
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
        """Plan and time updates, unless that is known; with why samples are coupled."""
        request, facts = self._processes.request, self._facts
        plan = self._make_plan(request.target_batch.high) if known is None else known[0]
        each = plan.multiple_of
        if each > 1:
            options = dataclasses.replace(request.options, multiple_of=each)
            self._processes.request = dataclasses.replace(request, options=options)
        coupled, doubt = describe_coupling(plan, facts)
        if doubt is not None:
            self._tell(Notice(doubt))
        if known is not None:
            return plan, known[1], coupled
        # A BatchNorm has nothing to normalise one sample by.
        least = min(-(-2 // each) * each if coupled else each, plan.largest_fit)
        sizes = micro_batch_ladder(plan.largest_fit, request.target_batch.sizes, least, each)
        device = facts.card or facts.device
        throughput = measure_throughput(self._processes, request.target_batch.high, sizes, device)
        others = study.load_measurements()  # Another worker may have been first: one ceiling for all.
        if others is not None:
            return *others, coupled
        study.keep(plan, throughput)
        return plan, throughput, coupled

    def _make_plan(self, target_batch: int, most: int | None = None) -> Plan:
        """Plan updates as the study trains, with micro-batches of at most `most`; raises as the planner."""
        request, facts = self._processes.request, self._facts
        options = {name: getattr(request.options, name) for name in _PLANNED_WITH}
        options["worst_of"] = None if facts.has_batch else DEFAULT_WORST_OF
        asked = PlanRequest(target_batch, Options(**options), max_micro_batch=most)
        made = make_plan(request.reference, asked, on_event=self._tell, on_output=self._on_output)
        self._processes.check_unchanged(str(made.workload.get("digest")))
        return made

    def _plan_best(self, tuning: Tuning, plan: Plan) -> Plan | None:
        """Plan the best setting's own schedule, proved by a trial, with its learning rate; None where it has none."""
        if tuning.best is None:
            return None
        setting: Setting = tuning.best.setting
        if tuning.space.coupled is None:  # Which micro-batch is a matter of speed.
            setting = dataclasses.replace(setting, micro_batch=tuning.throughput.knee)
        parts = setting.cut(plan.multiple_of)
        if plan.kind != "measured" or plan.micro_batches != parts:
            try:
                plan = self._make_plan(setting.target_batch, max(parts))
            except AutoaccumError as error:
                self._tell(Notice(f"the best setting has no plan: {error}"))
                return None
        if plan.micro_batches != parts:
            self._tell(Notice(f"micro-batches of {max(parts)} do not fit any more: the plan has {plan.micro_batch}"))
        return dataclasses.replace(plan, learning_rate=setting.learning_rate)


def _once_over(facts: WorkloadFacts) -> Budget:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} does not tell its length, and no budget is given",
            hint="say how long a trial is: --budget-samples 10000 (budget_samples=10000)",
        )
    return Budget(facts.training_samples, "samples")
