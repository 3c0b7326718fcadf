"""The search by Optuna: a study in an SQLite file, with its configuration, its plan and its trials."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from autoaccum.errors import StudyError, UsageError, WorkloadError, first_line
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.serialization import read_record, to_plain
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tuning_records import (
    MILESTONES,
    LearningRateRange,
    Listener,
    Outcome,
    Row,
    SearchSpace,
    TuneRequest,
    WorkloadFacts,
)

_RATE, _TARGET, _MICRO = "learning_rate", "target_batch", "micro_batch"
_HEARTBEAT_SECONDS = 20
"""Time between signs of life, by which Optuna detects trials whose process was killed, and retries them."""
_MAX_RETRIES = 3
_PATIENCE_SECONDS = 60
"""Seconds that a write waits for other workers."""
_CONFIG, _PLAN = "autoaccum", "autoaccum_plan"
_OUTCOME = "outcome"
"""Attributes of ours, of a study and of a trial."""


@contextmanager
def open_storage(file: str) -> Iterator[RDBStorage]:
    """Open Optuna's storage in an SQLite file, creating it if necessary.

    Raises:
        StudyError: It cannot be opened.
    """
    url = URL.create("sqlite", database=file).render_as_string()
    with storage_errors(file):
        storage = RDBStorage(
            url.replace("{", "{{").replace("}", "}}"),  # Optuna formats this string.
            engine_kwargs={"connect_args": {"timeout": _PATIENCE_SECONDS}},
            heartbeat_interval=_HEARTBEAT_SECONDS,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=_MAX_RETRIES),
        )
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


@contextmanager
def storage_errors(file: str) -> Iterator[None]:
    """Turn errors of a storage into `StudyError`, and let Optuna log only errors."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Heartbeats and the retries after them.
            yield
    except (StorageInternalError, SQLAlchemyError, OSError) as error:
        cause = error.__cause__ or error
        raise StudyError(
            f"the study in {file} cannot be read or written ({first_line(getattr(cause, 'orig', None) or cause)})",
            hint="check access to it, or choose another by --storage; the study is unchanged",
        ) from None
    finally:
        optuna.logging.set_verbosity(before)


def study_config(request: TuneRequest, facts: WorkloadFacts, budget: int, rates: LearningRateRange) -> dict[str, Any]:
    """Return what must be equal for all trials of a study, as plain values."""
    return {
        "workload": facts.name,
        "source files": facts.digest,
        "learning rates": f"{rates.low:g}..{rates.high:g}",
        "target batches": list(request.target_batches),
        "budget": budget,
        "seed": request.seed,
        "options": Options(spec=request.options.spec).to_record(),
        "held-out data": facts.held_out,
        "device": facts.device,
    }


class Study:
    """A study of Optuna's, available as `optuna`: created, or continued if its configuration is the same.

    Raises:
        UsageError: A study of that name has another configuration or is not autoaccum's; it stays as it is.
        StudyError: The storage cannot be read or written.
    """

    def __init__(self, storage: RDBStorage, file: str, name: str, config: dict[str, Any]) -> None:
        self.file = file
        with storage_errors(file):
            self.optuna = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            stored = self.optuna.user_attrs.get(_CONFIG)
            is_new = stored is None and not self.optuna.get_trials(deepcopy=False)
            if is_new:
                self.optuna.set_user_attr(_CONFIG, config)
            else:
                _check_config(stored, config, name)
            # With the seed, the sampler of a second process would repeat earlier draws.
            self.optuna.sampler = optuna.samplers.TPESampler(seed=config["seed"] if is_new else None)
            self.optuna.pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=MILESTONES[0], reduction_factor=2)

    def rows(self) -> tuple[Row, ...]:
        """Return all trials."""
        with storage_errors(self.file):
            return tuple(map(_read_trial, self.optuna.get_trials(deepcopy=False)))

    def load_plan(self) -> Plan | None:
        """Return the plan, whose ceiling and micro-batch hold for all trials; None before it is made."""
        with storage_errors(self.file):
            stored = self.optuna.user_attrs.get(_PLAN)
        return None if stored is None else Plan.from_json(stored)

    def save_plan(self, plan: Plan) -> Plan:
        """Save the plan for all workers, and return it."""
        with storage_errors(self.file):
            self.optuna.set_user_attr(_PLAN, plan.to_json())
        return plan


def _check_config(stored: object, requested: dict[str, Any], study: str) -> None:
    if not isinstance(stored, dict):
        raise UsageError(f"the study {study!r} exists and is not autoaccum's", hint="choose another name by --study")
    differing = [
        f"{name} {str(stored.get(name)):.40}, now {str(requested.get(name)):.40}"
        for name in dict.fromkeys((*requested, *stored))
        if stored.get(name) != requested.get(name)
    ]
    if differing:
        raise UsageError(
            f"the study {study!r} was made with other settings ({'; '.join(differing)})",
            hint="choose another name by --study, or use the same settings again",
        )


def _read_trial(trial: FrozenTrial) -> Row:
    """Convert one of Optuna's trials. Only a trial that ended by itself has the user attribute `_OUTCOME`."""
    state: Any = "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()
    ended, known = trial.user_attrs.get(_OUTCOME), trial.intermediate_values
    is_over = trial.state.is_finished()
    outcome = read_record(ended, Outcome) if ended and is_over else Outcome(state=state)
    return Row(
        **vars(outcome),
        number=trial.number,
        learning_rate=trial.params.get(_RATE),
        target_batch=trial.user_attrs.get(_TARGET),
        micro_batch=trial.user_attrs.get(_MICRO),
        losses=tuple((at, known[at]) for at in MILESTONES if at in known),
        lost=is_over and ended is None,
    )


class _TrialFailed(Exception):  # noqa: N818 (an outcome, for Optuna)
    """The user's code raised in a training, or its process died."""


class Search:
    """Runs trials of a study in child processes; `plan` is that of the largest target batch."""

    def __init__(
        self,
        study: Study,
        space: SearchSpace,
        default_rate: float,
        budget: int,
        plan: Plan,
        processes: TrialProcesses,
        notify: Listener,
    ) -> None:
        self._study, self._space, self._default_rate = study, space, default_rate
        self._budget, self._plan = budget, plan
        self._processes, self._notify = processes, notify

    def run(self) -> str | None:
        """Run trials until the study has as many as requested; return why it ended before, as a clause.

        The first one has the workload's own learning rate, and the smallest target batch. Several workers may search at
        once, each with up to one trial too many.

        Raises:
            WorkloadError: The user's code fails in the very first trial.
            StudyError: The storage can no longer be read or written.
        """
        request, rate, rows = self._processes.request, self._default_rate, self._study.rows()
        space = self._space
        if count_finished(rows) >= request.trials:
            return None
        is_covered = space.learning_rates.low <= rate <= space.learning_rates.high
        with storage_errors(self._study.file):
            if is_covered and not any(row.learning_rate == rate and not row.lost for row in rows):
                self._study.optuna.enqueue_trial(
                    {_RATE: rate, _TARGET: space.target_batches[0], _MICRO: space.micro_batches[-1]}
                )
            self._study.optuna.optimize(
                self._objective,
                timeout=request.options.time_limit,
                catch=(_TrialFailed,),
                callbacks=[self._on_trial_end],
            )
        is_over = count_finished(self._study.rows()) >= request.trials
        return None if is_over else f"its time of {request.options.time_limit:g} s is over"

    def _objective(self, trial: Trial) -> float:
        """Train with a trial's setting: Optuna's objective."""
        rates = self._space.learning_rates
        row = Row(
            number=trial.number,
            state="running",
            learning_rate=trial.suggest_float(_RATE, rates.low, rates.high, log=True),
            target_batch=_choose(trial, _TARGET, self._space.target_batches),
            micro_batch=_choose(trial, _MICRO, self._space.micro_batches),
        )
        self._notify(row)

        def should_continue(percent: int, loss: float) -> bool:
            trial.report(loss, percent)
            return not trial.should_prune()

        outcome = self._processes.train(row, self._plan, self._budget, should_continue)
        for text in outcome.warnings:
            self._notify(Notice(f"trial {trial.number}: {text}"))
        trial.set_user_attr(_OUTCOME, to_plain(outcome))
        if outcome.state == "failed":
            if count_finished(self._study.rows()):
                raise _TrialFailed(outcome.reason)
            raise WorkloadError(
                f"the first trial failed: {outcome.reason}",
                hint="fix the workload; a changed workload needs another study: --study NAME",
                user_traceback=outcome.user_traceback,
            )
        if outcome.state == "pruned":
            raise optuna.TrialPruned
        # A trial that diverged or ran out of memory is worse than any other, so the sampler avoids it.
        return math.inf if outcome.loss is None else outcome.loss

    def _on_trial_end(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Report the result of a trial, and end the search if it has enough trials."""
        self._notify(_read_trial(trial))
        if count_finished(self._study.rows()) >= self._processes.request.trials:
            study.stop()


def _choose(trial: Trial, name: str, choices: tuple[int, ...]) -> int:
    """Let the sampler choose one of several numbers, and note it with the trial."""
    chosen: int = trial.suggest_categorical(name, choices) if len(choices) > 1 else choices[0]
    trial.set_user_attr(name, chosen)
    return chosen


def count_finished(rows: tuple[Row, ...]) -> int:
    """Count the finished trials; lost ones do not count."""
    return sum(not row.lost and row.state not in ("running", "waiting") for row in rows)
