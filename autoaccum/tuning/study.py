"""The search by Optuna: a study in one of its storages, with its configuration, measurements and trials."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any, get_args

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from autoaccum.errors import StudyError, UsageError, WorkloadError, first_line
from autoaccum.planning.plan_record import Plan
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tuning_records import (
    MILESTONES,
    FinalState,
    LearningRateRange,
    Listener,
    Outcome,
    Row,
    SearchSpace,
    Setting,
    TrialEnded,
    TrialStarted,
    TuneRequest,
    WorkloadFacts,
)

RATE, TARGET, MICRO = "learning_rate", "target_batch", "micro_batch"
_JOURNALS, _JOURNAL = (".journal", ".log"), "journal"
_DATABASES = (".db", ".sqlite", ".sqlite3")
_HEARTBEAT_SECONDS = 20
"""Time between signs of life, by which Optuna detects trials whose process was killed, and retries them."""
_MAX_RETRIES = 3
_PATIENCE_SECONDS = 60
"""Seconds that a write to SQLite waits for other workers."""
_CONFIG, _PLAN = "autoaccum", "autoaccum_plan"
_FAILURES_IN_A_ROW = 3


def parse_storage_address(name: str | None) -> URL:
    """Parse where a study is stored: `tune.db`, `tune.journal`, or an SQLAlchemy URL; None: `tune.db` in this folder.

    >>> str(parse_storage_address("x.db")), str(parse_storage_address("x.journal"))
    ('sqlite:///x.db', 'journal:///x.journal')

    Raises:
        UsageError: It is none of them.
    """
    name = "tune.db" if name is None else name
    hint = "give a file like tune.db or tune.journal, or a URL like postgresql://user@host/name"
    if "://" in name:
        try:
            return make_url(name)
        except (ArgumentError, ValueError):
            scheme = name.partition("://")[0]
            raise UsageError(f"storage is not a valid URL: it begins with {scheme}://", hint=hint) from None
    ending = Path(name).suffix.lower()
    if ending in _JOURNALS + _DATABASES:
        return URL.create(_JOURNAL if ending in _JOURNALS else "sqlite", database=name)
    raise UsageError(f"storage is {name!r}", hint=hint)


def storage_file(address: URL) -> str | None:
    """Return the file of a storage; None for a server."""
    return address.database if address.drivername == _JOURNAL or address.get_backend_name() == "sqlite" else None


@contextmanager
def open_storage(address: URL) -> Iterator[RDBStorage | JournalStorage]:
    """Open Optuna's storage, creating it if necessary.

    Raises:
        UsageError: The database's driver is not installed.
        StudyError: It cannot be opened.
    """
    storage: RDBStorage | JournalStorage
    with storage_errors(address):
        try:
            if address.drivername == _JOURNAL:
                storage = JournalStorage(JournalFileBackend(str(address.database)))
            else:
                storage = RDBStorage(
                    # Optuna formats this string, so braces of a name or a password are escaped.
                    address.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),
                    engine_kwargs={"connect_args": {"timeout": _PATIENCE_SECONDS}} if storage_file(address) else None,
                    heartbeat_interval=_HEARTBEAT_SECONDS,
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=_MAX_RETRIES),
                )
        except (ImportError, NoSuchModuleError) as error:
            raise UsageError(f"no installed driver opens {address!r} ({error})", hint="install the driver") from None
    try:
        yield storage
    finally:
        if isinstance(storage, RDBStorage):
            storage.remove_session()
            storage.engine.dispose()


@contextmanager
def storage_errors(address: URL) -> Iterator[None]:
    """Turn errors of a storage into `StudyError`, and let Optuna log only errors."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Heartbeats and the retries after them.
            yield
    except (StorageInternalError, SQLAlchemyError, JSONDecodeError, OSError) as error:
        cause = error.__cause__ or error
        raise StudyError(
            f"the storage {address!r} cannot be used ({first_line(getattr(cause, 'orig', None) or cause)})",
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
        "target batches": f"{request.target_batch.low}..{request.target_batch.high}",
        "budget": budget,
        "seed": request.seed,
        "pruner": request.pruner,
        "precision": facts.precision,
        "BatchNorm mode": facts.batchnorm,
        "coupled loss": facts.coupled,
        "optimizer": facts.optimizer,
        "held-out data": facts.held_out,
        "device": facts.card or facts.device,
    }


class Study:
    """A study of Optuna's, available as `optuna`: created, or continued if its configuration is the same.

    Raises:
        UsageError: A study of that name has another configuration or is not autoaccum's; it stays as it is.
        StudyError: The storage cannot be read or written.
    """

    def __init__(self, storage: RDBStorage | JournalStorage, address: URL, name: str, config: dict[str, Any]) -> None:
        self.address = address
        with storage_errors(address):
            self.optuna = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
            stored = self.optuna.user_attrs.get(_CONFIG)
            is_new = stored is None and not self.optuna.get_trials(deepcopy=False)
            if is_new:
                self.optuna.set_user_attr(_CONFIG, config)
            else:
                _check_config(stored, config, name)
            # With the seed, the sampler of a second process would repeat earlier draws.
            self.optuna.sampler = optuna.samplers.TPESampler(seed=config["seed"] if is_new else None)
            halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=MILESTONES[0], reduction_factor=2)
            self.optuna.pruner = optuna.pruners.NopPruner() if config["pruner"] == "none" else halving

    def rows(self) -> tuple[Row, ...]:
        """Return all trials."""
        with storage_errors(self.address):
            return tuple(map(_read_trial, self.optuna.get_trials(deepcopy=False)))

    def load_plan(self) -> Plan | None:
        """Return the plan, whose ceiling and micro-batch hold for all trials; None before it is made."""
        with storage_errors(self.address):
            stored = self.optuna.user_attrs.get(_PLAN)
        return None if stored is None else Plan.from_json(stored)

    def save_plan(self, plan: Plan) -> Plan:
        """Save the plan for all workers, and return it."""
        with storage_errors(self.address):
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
    """Convert one of Optuna's trials. Only a trial that ended by itself has the user attribute `state`."""
    attributes, is_over = trial.user_attrs, trial.state.is_finished()
    ended: Any = attributes.get("state") if is_over else None
    of_optuna: Any = "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()
    rate, target, micro = (trial.params.get(RATE), *map(attributes.get, (TARGET, MICRO)))
    setting = None
    if rate is not None and target is not None and micro is not None:
        setting = Setting(learning_rate=rate, target_batch=target, micro_batch=micro)
    return Row(
        number=trial.number,
        state=ended if ended in get_args(FinalState) else of_optuna,
        setting=setting,
        loss=trial.value if ended == "complete" else None,
        losses=tuple((at, trial.intermediate_values[at]) for at in MILESTONES if at in trial.intermediate_values),
        seconds=attributes.get("seconds"),
        oom_retries=int(attributes.get("oom_retries", 0)),
        reason=attributes.get("reason"),
        lost=is_over and ended is None,
    )


class _TrialFailed(Exception):  # noqa: N818 (an outcome, for Optuna)
    """The user's code raised in a training, or its process died."""


class Search:
    """Runs trials of a study in child processes; `ceiling` is the micro-batch of every evaluation."""

    def __init__(
        self,
        study: Study,
        space: SearchSpace,
        budget: int,
        ceiling: int,
        processes: TrialProcesses,
        notify: Listener,
    ) -> None:
        self._study, self._space, self._budget, self._ceiling = study, space, budget, ceiling
        self._processes, self._notify = processes, notify
        self._last: Outcome | None = None
        self._failures = 0

    def run(self) -> str | None:
        """Run trials until the study has as many as requested; return why it ended before, as a clause.

        Several workers may do so at once, each with up to one trial too many.

        Raises:
            WorkloadError: The user's code fails in the very first trial, or repeatedly.
            StudyError: The storage can no longer be read or written.
        """
        request, space, rows = self._processes.request, self._space, self._study.rows()
        if count_finished(rows) >= request.trials:
            return None
        is_covered = space.learning_rates.low <= space.default_learning_rate <= space.learning_rates.high
        with storage_errors(self._study.address):
            if is_covered and not any(is_default(row, space) and not row.lost for row in rows):
                self._study.optuna.enqueue_trial(_default_parameters(space))
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
        setting = _suggest_setting(trial, self._space)
        trial.set_user_attr(TARGET, setting.target_batch)
        trial.set_user_attr(MICRO, setting.micro_batch)
        self._notify(TrialStarted(trial.number, setting))

        def should_continue(percent: int, loss: float) -> bool:
            trial.report(loss, percent)
            return not trial.should_prune()

        seed = self._processes.request.seed
        outcome = self._processes.train(setting, self._budget, seed, self._ceiling, should_continue)
        self._last = outcome
        for text in outcome.warnings:
            self._notify(Notice(f"trial {trial.number}: {text}"))
        for name, value in dataclasses.asdict(outcome).items():
            if name not in ("loss", "user_traceback", "warnings") and value is not None:
                trial.set_user_attr(name, value)
        if outcome.state == "failed":
            raise _TrialFailed(outcome.reason)
        if outcome.state == "pruned":
            raise optuna.TrialPruned
        # A trial that diverged or ran out of memory is worse than any other, so the sampler avoids it.
        return math.inf if outcome.loss is None else outcome.loss

    def _on_trial_end(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Report the result of a trial, and end the search if it has enough trials or keeps failing."""
        self._notify(TrialEnded(_read_trial(trial)))
        finished = count_finished(self._study.rows())
        self._failures = self._failures + 1 if trial.state == TrialState.FAIL else 0
        if self._failures and (self._failures >= _FAILURES_IN_A_ROW or finished == 1):
            which = "the first trial" if finished == 1 else f"each of the last {self._failures} trials"
            assert self._last is not None
            raise WorkloadError(
                f"{which} failed: {self._last.reason or 'no reason is known'}",
                hint="fix the workload; a changed workload needs another study: --study NAME",
                user_traceback=self._last.user_traceback,
            )
        if finished >= self._processes.request.trials:
            study.stop()


def count_finished(rows: tuple[Row, ...]) -> int:
    """Count the finished trials; lost ones do not count."""
    return sum(not row.lost and row.state not in ("running", "waiting") for row in rows)


def is_default(row: Row, space: SearchSpace) -> bool:
    """Return whether a trial has the workload's own learning rate, and the smallest of the target batches."""
    setting = row.setting
    return setting is not None and (setting.learning_rate, setting.target_batch) == (
        space.default_learning_rate,
        space.target_batches.low,
    )


def _suggest_setting(trial: Trial, space: SearchSpace) -> Setting:
    rates, targets = space.learning_rates, space.target_batches
    rate = trial.suggest_float(RATE, rates.low, rates.high, log=True)
    target = targets.low if len(targets.sizes) == 1 else trial.suggest_categorical(TARGET, targets.sizes)
    micro = space.micro_batch if space.coupled is None else trial.suggest_categorical(MICRO, space.micro_batches)
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)


def _default_parameters(space: SearchSpace) -> dict[str, float | int]:
    """Return the workload's default learning rate, the smallest batch, and a micro-batch that fits into it."""
    low = space.target_batches.low
    parameters: dict[str, float | int] = {RATE: space.default_learning_rate}
    if len(space.target_batches.sizes) > 1:
        parameters[TARGET] = low
    if space.coupled is not None:
        parameters[MICRO] = max([size for size in space.micro_batches if size <= low] or space.micro_batches[:1])
    return parameters
