"""The search by Optuna: a study in an SQLite file, with its configuration, its plan and its trials."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from autoaccum.errors import StudyError, UsageError, WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.serialization import read_record, to_plain
from autoaccum.tuning.trial_processes import Train, TrialProcesses
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
"""What is searched: names of Optuna's parameters, and of the fields of `Row` and `Train`."""
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
    """Open Optuna's storage in an SQLite file, creating it if necessary; meanwhile Optuna logs only errors.

    Raises:
        StudyError: It cannot be opened, or not be read or written while it is open.
    """
    url = URL.create("sqlite", database=file).render_as_string()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Heartbeats and the retries after them.
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
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise StudyError(
            f"the study in {file} cannot be read or written ({first_line(getattr(cause, 'orig', None) or cause)})",
            hint="check access to it, or choose another by --storage; the study is unchanged",
        ) from None
    finally:
        optuna.logging.set_verbosity(verbosity)


def study_config(request: TuneRequest, facts: WorkloadFacts, budget: int, rates: LearningRateRange) -> dict[str, Any]:
    """Return what must be equal for all trials of a study, as plain values."""
    return {
        "format": 2,  # Of what is stored with a trial.
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
    """

    def __init__(self, storage: RDBStorage, name: str, config: dict[str, Any]) -> None:
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
        return tuple(map(_read_trial, self.optuna.get_trials(deepcopy=False)))

    def finished(self) -> list[Row]:
        """Return the trials that are over, without those that were lost."""
        return [row for row in self.rows() if not row.lost and row.state not in ("running", "waiting")]

    def load_plan(self) -> Plan | None:
        """Return the plan, whose ceiling and micro-batch hold for all trials; None before it is made."""
        stored = self.optuna.user_attrs.get(_PLAN)
        return None if stored is None else Plan.from_json(stored)

    def save_plan(self, plan: Plan) -> Plan:
        """Save the plan for all workers, and return it."""
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
    ended, losses = trial.user_attrs.get(_OUTCOME), trial.intermediate_values
    is_over = trial.state.is_finished()
    outcome = read_record(ended, Outcome) if ended and is_over else Outcome(state=state)
    return Row(
        **vars(outcome),
        number=trial.number,
        learning_rate=trial.params.get(_RATE),
        target_batch=trial.user_attrs.get(_TARGET),
        micro_batch=trial.user_attrs.get(_MICRO),
        losses=tuple((percent, losses[percent]) for percent in MILESTONES if percent in losses),
        lost=is_over and ended is None,
    )


class _TrialFailed(Exception):  # noqa: N818 (an outcome, for Optuna)
    """The user's code raised in a training, or its process died."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Runs trials of a study in child processes.

    Attributes:
        default_rate: The workload's own learning rate.
        budget: Samples that a trial trains on.
        plan: That of the largest target batch.
        notify: Called with each trial as it starts and when it has ended, and with warnings.
    """

    study: Study
    space: SearchSpace
    default_rate: float
    budget: int
    plan: Plan
    processes: TrialProcesses
    notify: Listener

    def run(self) -> Message | None:
        """Run trials until the study has as many as requested; return why it ended before.

        The first one has the workload's own learning rate, and the smallest target batch. Several workers may search at
        once, each with up to one trial too many.

        Raises:
            WorkloadError: The user's code fails in the very first trial.
        """
        if self._has_enough():
            return None
        rate, rates, limit = self.default_rate, self.space.learning_rates, self.processes.request.options.time_limit
        is_tried = any(row.learning_rate == rate and not row.lost for row in self.study.rows())
        if rates.low <= rate <= rates.high and not is_tried:
            first = {_RATE: rate, _TARGET: self.space.target_batches[0], _MICRO: self.space.micro_batches[-1]}
            self.study.optuna.enqueue_trial(first)
        self.study.optuna.optimize(
            self._objective, timeout=limit, catch=(_TrialFailed,), callbacks=[self._on_trial_end]
        )
        return None if self._has_enough() else message("study_out_of_time", seconds=limit)

    def _has_enough(self) -> bool:
        return len(self.study.finished()) >= self.processes.request.trials

    def _objective(self, trial: Trial) -> float:
        """Train with a trial's setting: Optuna's objective."""
        rates = self.space.learning_rates
        setting: dict[str, Any] = {
            _RATE: trial.suggest_float(_RATE, rates.low, rates.high, log=True),
            _TARGET: _choose(trial, _TARGET, self.space.target_batches),
            _MICRO: _choose(trial, _MICRO, self.space.micro_batches),
        }
        self.notify(Row(number=trial.number, state="running", **setting))
        common: dict[str, Any] = {"budget": self.budget, "seed": self.processes.request.seed}
        if self.plan.tokens is not None:
            common["micro_tokens"] = self.plan.tokens.micro_tokens

        def should_continue(percent: int, loss: float) -> bool:
            trial.report(loss, percent)
            return not trial.should_prune()

        training = Train(**setting, **common, evaluation_batch=self.plan.largest_fit)
        outcome = self.processes.train(training, should_continue)
        for warning in outcome.warnings:
            self.notify(message("trial_warning", number=trial.number, warning=warning))
        trial.set_user_attr(_OUTCOME, to_plain(outcome))
        if outcome.state == "failed":
            if self.study.finished():
                raise _TrialFailed(str(outcome.reason))
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
        self.notify(_read_trial(trial))
        if self._has_enough():
            study.stop()


def _choose(trial: Trial, name: str, choices: tuple[int, ...]) -> int:
    """Let the sampler choose one of several numbers, and note it with the trial."""
    chosen: int = trial.suggest_categorical(name, choices) if len(choices) > 1 else choices[0]
    trial.set_user_attr(name, chosen)
    return chosen
