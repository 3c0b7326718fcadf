"""`tune`: from a workload to the setting it trains best with, by a study that can be stopped and gone on with."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.ranks import check_launch
from autoaccum.tuning.ceiling import Output, plan_setting
from autoaccum.tuning.events import Confirming, Listener, Noted, SearchBegan
from autoaccum.tuning.judging.bracket import find_bracket
from autoaccum.tuning.judging.cautions import cautions
from autoaccum.tuning.judging.scaling import advise
from autoaccum.tuning.judging.standings import own_standing, rank
from autoaccum.tuning.preparing import Prepared, prepare, with_multiple
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.child_runner import ChildRunner
from autoaccum.tuning.settings import Setting, Space

if TYPE_CHECKING:
    from autoaccum.planning.records import Plan
    from autoaccum.tuning.runner import Runner
    from autoaccum.tuning.studies.study import Study

_CONFIRMING_SEEDS = 2
"""With how many seeds a confirmed setting is run beside the search's own."""
_MOST_ROUNDS = 5
"""After so many rounds of repetitions in which settings fail, the next one is not repeated any more."""


def tune(request: TuneRequest, *, on_event: Listener | None = None, on_output: Output | None = None) -> Tuning:
    """Run the trials that the study still lacks, and judge them all; `autoaccum.tune` says what can be asked for.

    Whatever ends it, the study keeps every finished trial, and the same request goes on from there.

    Args:
        request: What is asked for.
        on_event: Told of every event of `tuning.events`, and of the planner's.
        on_output: Given what the workload prints in processes of its own, line by line; stderr otherwise.

    Raises:
        UsageError: The request cannot be honoured, or the study of that name is another one.
        PlanFileError: The plan that is given cannot be read.
        StudyError: The storage cannot be read or written.
        WorkloadError: The workload cannot be tuned.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made, or no process started.
        KeyboardInterrupt: The trial that ran is put back.
    """
    check_launch()
    began = time.monotonic()
    warnings: list[str] = []
    tell = _remembering(on_event or (lambda event: None), warnings)
    prepared = prepare(request, tell, on_output)
    request = with_multiple(request, prepared.plan)
    tell(SearchBegan(prepared.space))
    ceiling, digest = prepared.plan.largest_fit, prepared.facts.digest
    with ChildRunner(request, prepared.budget, ceiling, on_output=on_output, digest=digest) as runner:
        ended = run_trials(request, prepared.study, prepared.space, runner, tell)
    tuning = _judge(request, prepared, ended, tell)
    if tuning.best is not None:
        setting, coupled = tuning.best.setting, prepared.space.coupled
        if coupled is None:  # Which micro-batch is a matter of speed.
            setting = dataclasses.replace(setting, micro_batch=prepared.throughput.knee)
        plan = plan_setting(setting, prepared.plan, request, prepared.facts, tell, on_output)
        if plan is not None and plan.micro_batches != setting.cut(plan.multiple_of):
            tell(Noted(_other_parts(setting, plan, coupled)))
        tuning = dataclasses.replace(tuning, plan=plan)
    return dataclasses.replace(tuning, seconds=time.monotonic() - began, warnings=tuple(dict.fromkeys(warnings)))


def _remembering(tell: Listener, warnings: list[str]) -> Listener:
    def listen(event: Any) -> None:
        if isinstance(event, Noted) and event.warns:
            warnings.append(event.text)
        tell(event)

    return listen


def run_trials(request: TuneRequest, study: Study, space: Space, runner: Runner, tell: Listener) -> str | None:
    """Search, then repeat the best few with other seeds.

    Where the repetitions go so badly that a setting leads which was run once, that is repeated, too, for some rounds.

    Args:
        request: What the study is asked to do.
        study: The study.
        space: What settings are drawn from.
        runner: Who trains.
        tell: Told how it goes.

    Returns:
        Why the search ended early, as a clause; None when all trials are run.

    Raises:
        WorkloadError, StudyError, KeyboardInterrupt: As `tune`.
    """
    from autoaccum.tuning.studies.confirming import confirm
    from autoaccum.tuning.studies.searching import search

    ended = search(study, space, runner, trials=request.trials, time_limit=request.time_limit, tell=tell)
    seeds = [request.seed + 1 + number for number in range(_CONFIRMING_SEEDS)]
    chosen = list(rank([row for row in study.rows() if row.confirms is None])[: request.confirm])
    for _ in range(_MOST_ROUNDS):
        if not chosen:
            break
        settings = [(one.trial, one.setting) for one in chosen]
        tell(Confirming(tuple(one.trial for one in chosen), len(settings) * len(seeds)))
        confirm(study, settings, runner, seeds=seeds, tell=tell)
        chosen = [one for one in rank(study.rows())[:1] if len(one.losses) + one.failed == 1]
    return ended


def _judge(request: TuneRequest, prepared: Prepared, ended: str | None, tell: Listener) -> Tuning:
    """What all trials of the study come to, without a plan for the best."""
    study, facts, space, storage = prepared.study, prepared.facts, prepared.space, prepared.study.storage
    rows = study.rows()
    standings = rank(rows)
    best = standings[0] if standings else None
    for text in cautions(standings, space.learning_rates):
        tell(Noted(text))
    return Tuning(
        study=study.name,
        storage=storage.shown,
        storage_url=storage.command_url,
        workload={"reference": request.reference, **dataclasses.asdict(facts)},
        space=space,
        budget=prepared.budget,
        held_out=facts.held_out,
        sampler=study.sampler_words,
        pruner=study.pruner_words,
        seed=request.seed,
        throughput=prepared.throughput,
        rows=rows,
        standings=standings,
        best=best,
        own=own_standing(rows),
        bracket=find_bracket(rows, standings, scheduled=facts.schedule is not None),
        advice=() if best is None else advise(best.setting),
        plan=None,
        ended=ended,
    )


def _other_parts(setting: Setting, plan: Plan, coupled: str | None) -> str:
    said = f"micro-batches of {setting.micro_batch} do not fit any more: the plan has such of {plan.micro_batch}"
    return said if coupled is None else f"{said}, which is another training, since {coupled}"
