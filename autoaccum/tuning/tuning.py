"""`tune`: from a workload to the setting it trains best with, by a study that can be stopped and gone on with."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autoaccum.errors import AutoaccumError, UsageError, WorkloadError
from autoaccum.planning.planner import plan as make_plan
from autoaccum.planning.records import Plan
from autoaccum.planning.request import LOOKED_AT
from autoaccum.tuning.events import Confirming, Described, Listener, Noted, SearchBegan, StudyOpened, ThroughputKnown
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.judging.bracket import find_bracket
from autoaccum.tuning.judging.coupled import find_coupling
from autoaccum.tuning.judging.ladder import micro_batch_ladder
from autoaccum.tuning.judging.scaling import advise
from autoaccum.tuning.judging.standings import own_standing, rank
from autoaccum.tuning.records import Row, Standing, Tuning
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.child_runner import ChildRunner
from autoaccum.tuning.running.describing import describe
from autoaccum.tuning.running.measuring import measure_throughput
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Setting, Space

if TYPE_CHECKING:
    from autoaccum.tuning.studies.study import Study

_OWN_FACTOR = 100.0
"""How far the default range of learning rates reaches from the workload's own, either way."""
_NEAR_FACTOR = 2.0
"""How near to an end of the range a best rate says that the range was too short."""
_CONFIRMING_SEEDS = 2
"""With how many seeds a confirmed setting is run beside the search's own."""
_LEAST_COUPLED = 2
"""A BatchNorm has nothing to normalise one sample by."""

Output = Callable[[str], None]


def tune(request: TuneRequest, *, on_event: Listener | None = None, on_output: Output | None = None) -> Tuning:
    """Run the trials that the study still lacks, and judge them all; `autoaccum.tune` says what can be asked for.

    Whatever ends it, the study keeps every finished trial, and the same request goes on from there.

    Args:
        request: What is asked for.
        on_event: Told of every event of `tuning.events`, and of the planner's.
        on_output: Given what the workload prints in processes of its own, line by line; stderr otherwise.

    Raises:
        UsageError: The request cannot be honoured, or the study of that name is another one.
        StudyError: The storage cannot be read or written.
        WorkloadError: The workload cannot be tuned.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made, or no process started.
        KeyboardInterrupt: The trial that ran is put back.
    """
    from autoaccum.tuning.studies.storage import open_storage
    from autoaccum.tuning.studies.study import find_study, open_study
    from autoaccum.tuning.studies.terms import Terms

    began = time.monotonic()
    warnings: list[str] = []
    tell = _remembering(on_event or (lambda event: None), warnings)
    storage = open_storage(request.storage, heartbeat=request.heartbeat)
    given = _load_plan(request)
    facts = describe(request, on_output=on_output)
    tell(Described(facts))
    if given is not None:
        _check_plan(given, request, facts, tell)
    budget = request.budget or _once_over(facts)
    rates = request.learning_rate or RateSpan(facts.learning_rate / _OWN_FACTOR, facts.learning_rate * _OWN_FACTOR)
    terms = Terms.of(request, facts, budget, rates)
    study = find_study(storage, request.study or facts.name, terms)
    tell(
        StudyOpened(
            name=study.name,
            storage=storage.shown,
            sampler=study.sampler_words,
            pruner=study.pruner_words,
            finished=study.finished,
            trials=request.trials,
            best=_least_loss(study.rows()),
        )
    )
    plan = _known_plan(study, given, tell)
    plan = plan or _make_plan(request, facts, request.target_batch.high, tell, on_output)
    coupled, notes = find_coupling(plan, facts)
    for note in notes:
        tell(Noted(note))
    sizes = _sizes(plan.largest_fit, request.target_batch, coupled is not None)
    known = study.recall_throughput()
    throughput = known or measure_throughput(request, facts, sizes, tell=tell, on_output=on_output)
    study = open_study(storage, study.name, terms)
    plan, throughput = study.settle(plan, throughput)  # Another worker may have been first: one ceiling for all.
    tell(ThroughputKnown(throughput, remembered=known is not None))
    space = Space(
        learning_rates=rates,
        target_batches=request.target_batch,
        micro_batches=tuple(speed.micro_batch for speed in throughput.speeds if speed.state != "out_of_memory"),
        micro_batch=throughput.knee,
        coupled=coupled,
        own_rate=facts.learning_rate,
    )
    tell(SearchBegan(space))
    with ChildRunner(request, budget, plan.largest_fit, on_output=on_output) as runner:
        ended = _run_trials(request, study, space, runner, tell)
    rows = study.rows()
    standings = rank(rows)
    best = _winner(standings)
    for note in _edges(best, rates):
        tell(Noted(note))
    return Tuning(
        study=study.name,
        storage=storage.shown,
        storage_url=storage.command_url,
        workload={"reference": request.reference, **dataclasses.asdict(facts)},
        space=space,
        budget=budget,
        held_out=facts.held_out,
        sampler=study.sampler_words,
        pruner=study.pruner_words,
        seed=request.seed,
        throughput=throughput,
        rows=rows,
        standings=standings,
        best=best,
        own=own_standing(rows),
        bracket=find_bracket(rows, standings),
        advice=() if best is None else advise(best.setting),
        plan=None if best is None else _plan_of(best.setting, plan, request, facts, tell, on_output),
        ended=ended,
        seconds=time.monotonic() - began,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _remembering(tell: Listener, warnings: list[str]) -> Listener:
    def listen(event: Any) -> None:
        if isinstance(event, Noted) and event.warns:
            warnings.append(event.text)
        tell(event)

    return listen


def _once_over(facts: Facts) -> Budget:
    if facts.training_samples is None:
        raise UsageError(
            f"the dataset of {facts.name} does not tell its length, and no budget is given",
            hint="say how long a trial is: --budget-samples 10000 (budget_samples=10000)",
        )
    return Budget(facts.training_samples, "samples")


def _load_plan(request: TuneRequest) -> Plan | None:
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


def _known_plan(study: Study, given: Plan | None, tell: Listener) -> Plan | None:
    kept = study.recall_plan()
    if kept is not None and given is not None and given.digest() != kept.digest():
        tell(Noted("the study has a plan of its own already: the one that is given is not used"))
    return kept or given


def _check_plan(plan: Plan, request: TuneRequest, facts: Facts, tell: Listener) -> None:
    here = "cuda" if facts.device.startswith("cuda") else "cpu"
    planned = "cuda" if plan.kind == "predicted" else plan.device.get("kind")
    if planned != here:
        raise UsageError(f"the plan is for {plan.device.get('name')}; here is {facts.device}", hint="plan again here")
    if plan.target_batch < request.target_batch.high:
        raise UsageError(
            f"the plan is for updates of {plan.target_batch} samples, the study has such of up to"
            f" {request.target_batch.high}",
            hint=f"plan with --target-batch {request.target_batch.high}",
        )
    if plan.workload.get("digest") != facts.digest:
        tell(Noted(f"{facts.name} was changed since the plan was made: should memory run out, plan again"))


def _make_plan(
    request: TuneRequest, facts: Facts, target_batch: int, tell: Listener, on_output: Output | None, **more: Any
) -> Plan:
    return make_plan(
        request.reference,
        target_batch=target_batch,
        device=request.device,
        memory=request.memory,
        reserve=request.reserve,
        precision=request.precision,
        batchnorm=request.batchnorm,
        optimizer=request.optimizer,
        worst_of=None if facts.has_batch else LOOKED_AT,
        on_event=tell,
        on_output=on_output,
        **more,
    )


def _sizes(ceiling: int, targets: BatchSpan, coupled: bool) -> tuple[int, ...]:
    """The micro-batches to look at; where a BatchNorm needs two samples, those whose every part has them."""
    least = min(_LEAST_COUPLED, ceiling) if coupled else 1
    ladder = micro_batch_ladder(min(ceiling, targets.high), least, targets.high)
    fitting = [size for size in ladder if all(min(_parts(size, target)) >= least for target in targets.sizes)]
    return tuple(fitting or ladder[-1:])


def _parts(size: int, target_batch: int) -> tuple[int, ...]:
    return Setting(learning_rate=1.0, target_batch=target_batch, micro_batch=size).parts


def _run_trials(request: TuneRequest, study: Study, space: Space, runner: ChildRunner, tell: Listener) -> str | None:
    """Search, then repeat the best few with other seeds; why the search ended early."""
    from autoaccum.tuning.studies.confirming import confirm
    from autoaccum.tuning.studies.searching import search

    ended = search(study, space, runner, trials=request.trials, time_limit=request.time_limit, tell=tell)
    chosen = [(one.trial, one.setting) for one in rank(_searched(study.rows())) if one.mean is not None]
    chosen = chosen[: request.confirm]
    if chosen:
        seeds = [request.seed + 1 + number for number in range(_CONFIRMING_SEEDS)]
        tell(Confirming(tuple(trial for trial, _ in chosen), len(chosen) * len(seeds)))
        confirm(study, chosen, runner, seeds=seeds, tell=tell)
    return ended


def _least_loss(rows: Sequence[Row]) -> float | None:
    return min((row.loss for row in _searched(rows) if row.state == "complete" and row.loss is not None), default=None)


def _searched(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.confirms is None)


def _winner(standings: Sequence[Standing]) -> Standing | None:
    return next((one for one in standings if one.mean is not None), None)


def _edges(best: Standing | None, rates: RateSpan) -> list[str]:
    """What to say where the optimum may lie outside of what was searched."""
    if best is None:
        return []
    rate, said = best.setting.learning_rate, "the best learning rate lies near the end of the range: search"
    if rate < rates.low * _NEAR_FACTOR < rates.high:
        return [f"{said} below {rates.low:.3g}, too"]
    if rate > rates.high / _NEAR_FACTOR > rates.low:
        return [f"{said} above {rates.high:.3g}, too"]
    return []


def _plan_of(
    setting: Setting, plan: Plan, request: TuneRequest, facts: Facts, tell: Listener, on_output: Output | None
) -> Plan | None:
    """The setting's own schedule, proved by a trial, with its learning rate; None where it could not be proved."""
    same = plan.kind == "measured" and plan.target_batch == setting.target_batch
    if not (same and plan.micro_batches == setting.parts):
        try:
            plan = _make_plan(request, facts, setting.target_batch, tell, on_output, max_micro_batch=max(setting.parts))
        except WorkloadError:
            raise
        except AutoaccumError as error:
            tell(Noted(f"the best setting has no plan: {error}"))
            return None
    return dataclasses.replace(plan, learning_rate=setting.learning_rate)
