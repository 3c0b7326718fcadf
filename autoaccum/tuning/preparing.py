"""What the trials of a study need to know before the first: found out once, and kept with the study."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum.errors import UsageError
from autoaccum.planning.records import Plan
from autoaccum.tuning.ceiling import Output, check_plan, load_plan, make_ceiling_plan
from autoaccum.tuning.events import Described, Listener, Noted, StudyOpened, ThroughputKnown
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.judging.coupled import find_coupling
from autoaccum.tuning.judging.ladder import micro_batch_ladder
from autoaccum.tuning.records import Throughput
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.describing import describe
from autoaccum.tuning.running.measuring import measure_throughput
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Space

if TYPE_CHECKING:
    from autoaccum.tuning.studies.study import Study

_OWN_FACTOR = 100.0
"""How far the default range of learning rates reaches from the workload's own, either way."""
_LEAST_COUPLED = 2
"""A BatchNorm has nothing to normalise one sample by."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study whose trials can begin.

    Attributes:
        study: The study, which is there by now.
        facts: Of the workload.
        budget: Of every trial.
        plan: Whose ceiling no trial exceeds.
        throughput: Samples per second over micro-batches.
        space: What settings are drawn from.
    """

    study: Study
    facts: Facts
    budget: Budget
    plan: Plan
    throughput: Throughput
    space: Space


def prepare(request: TuneRequest, tell: Listener, on_output: Output | None) -> Prepared:
    """Find out what is not known yet; what cannot be used is refused before anything is made.

    Args:
        request: What the study is asked to do.
        tell: Told how it goes.
        on_output: Given what the workload prints.

    Raises:
        UsageError, PlanFileError, StudyError, WorkloadError, DoesNotFitError, NotMeasuredError: As `tuning.tune`.
    """
    from autoaccum.tuning.studies.storage import open_storage
    from autoaccum.tuning.studies.study import find_study, open_study
    from autoaccum.tuning.studies.terms import Terms

    storage = open_storage(request.storage, heartbeat=request.heartbeat)
    given = load_plan(request)
    facts = describe(request, on_output=on_output)
    tell(Described(facts))
    if given is not None:
        check_plan(given, request, facts)
    budget = request.budget or _once_over(facts)
    rates = request.learning_rate or RateSpan(facts.learning_rate / _OWN_FACTOR, facts.learning_rate * _OWN_FACTOR)
    terms = Terms.of(request, facts, budget, rates)
    study = find_study(storage, request.study or facts.name, terms)
    tell(_opened(study, request.trials))
    plan = _known_plan(study, given, request, tell)
    plan = plan or make_ceiling_plan(request, facts, request.target_batch.high, tell, on_output)
    request = with_multiple(request, plan)
    known = study.recall_throughput()
    sizes = _sizes(plan, request.target_batch, find_coupling(plan, facts)[0] is not None)
    throughput = known or measure_throughput(request, facts, sizes, tell=tell, on_output=on_output)
    study = open_study(storage, study.name, terms)
    plan, throughput = study.settle(plan, throughput)  # Another worker may have been first: one ceiling for all.
    tell(ThroughputKnown(throughput, remembered=known is not None))
    coupled, notes = find_coupling(plan, facts)
    for note in (*notes, *_scheduled(facts, request), *_short(budget, request.target_batch)):
        tell(Noted(note))
    space = Space(
        learning_rates=rates,
        target_batches=request.target_batch,
        micro_batches=tuple(speed.micro_batch for speed in throughput.speeds if speed.state != "out_of_memory"),
        # Sums of other parts differ in rounding: which is fastest is measured, and may be another one the next time.
        micro_batch=plan.micro_batch if budget.unit == "samples" else throughput.knee,
        coupled=coupled,
        own_rate=facts.learning_rate,
    )
    return Prepared(study=study, facts=facts, budget=budget, plan=plan, throughput=throughput, space=space)


def with_multiple(request: TuneRequest, plan: Plan) -> TuneRequest:
    """What is asked for, with what the plan found out that micro-batches have to be multiples of."""
    return dataclasses.replace(request, multiple_of=plan.multiple_of) if plan.multiple_of > 1 else request


def _opened(study: Study, trials: int) -> StudyOpened:
    rows = [row for row in study.rows() if row.confirms is None and row.state == "complete" and not row.shortages]
    losses = [row.loss for row in rows if row.loss is not None]
    return StudyOpened(
        name=study.name,
        storage=study.storage.shown,
        sampler=study.sampler_words,
        pruner=study.pruner_words,
        finished=study.finished,
        trials=trials,
        best=min(losses, default=None),
    )


def _once_over(facts: Facts) -> Budget:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} does not tell its length, and no budget is given",
            hint="say how long a trial is: --budget-samples 10000 (budget_samples=10000)",
        )
    return Budget(facts.training_samples, "samples")


def _known_plan(study: Study, given: Plan | None, request: TuneRequest, tell: Listener) -> Plan | None:
    """The study's own plan, or else the one that was given; None where there is neither."""
    kept = study.recall_plan()
    if kept is None:
        return given
    if given is not None and given.digest() != kept.digest():
        tell(Noted("the study has a plan of its own already: the one that is given is not used"))
    if request.memory is not None or request.reserve is not None:
        text = "memory and reserve are for planning, and the study has its plan: they hold for the best setting's only"
        tell(Noted(text, warns=False))
    return kept


def _scheduled(facts: Facts, request: TuneRequest) -> list[str]:
    """What to say where a schedule changes the learning rate on the way."""
    if facts.schedule is None or request.pruner == "none":
        return []
    return [
        f"{facts.schedule} changes the learning rate on the way, and runs only as far as the budget: a rate that is"
        " behind early may win late, which --pruner none lets it"
    ]


def _short(budget: Budget, targets: BatchSpan) -> list[str]:
    """What to say where a trial is not even one update long."""
    if budget.unit == "seconds" or budget.amount >= targets.high:
        return []
    return [
        f"the budget of {budget.amount:g} samples is less than one update of {targets.high}: such a trial makes one"
    ]


def _sizes(plan: Plan, targets: BatchSpan, coupled: bool) -> tuple[int, ...]:
    """The micro-batches to look at; where a BatchNorm needs two samples, those whose every part has them."""
    ceiling, each = plan.largest_fit, plan.multiple_of
    least = min(-(-_LEAST_COUPLED // each) * each, ceiling) if coupled else each
    return micro_batch_ladder(ceiling, least, targets.sizes, each)
