"""The study: Optuna's, in one of its storages, with the terms it was made on and what was measured for all trials."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any, cast, get_args

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from autoaccum.errors import PlanFileError, StudyError, UsageError, first_line
from autoaccum.planning.plan import Plan
from autoaccum.serialization import RecordError, read_record, to_plain
from autoaccum.tuning.tune_request import Budget, LearningRateRange, TuneRequest
from autoaccum.tuning.tuning_result import MILESTONES, FinalState, Row, RowState, Setting, Throughput, WorkloadFacts

RATE, TARGET, MICRO = "learning_rate", "target_batch", "micro_batch"
_DATABASES, _JOURNALS = (".db", ".sqlite", ".sqlite3"), (".journal", ".log")
_JOURNAL = "journal"
_MAX_RETRIES = 3
"""How often parameters are taken up again whose process died, each time."""
_PATIENCE_SECONDS = 60
"""How long a write to SQLite waits for those of other workers."""
_TERMS, _MEASURED = "autoaccum", "autoaccum_measured"


def parse_storage_address(name: str | None) -> URL:
    """Read where a study is kept: `tune.db`, `tune.journal`, or a URL of SQLAlchemy's; None: `tune.db` here.

    >>> str(parse_storage_address("x.db")), str(parse_storage_address("x.journal"))
    ('sqlite:///x.db', 'journal:///x.journal')

    Raises:
        UsageError: It is none of them.
    """
    name = "tune.db" if name is None else name
    hint = "give a file like tune.db or tune.journal, or a URL like postgresql://user@host/name"
    ending = Path(name).suffix.lower()
    if "://" in name:
        try:
            return make_url(name)
        except (ArgumentError, ValueError):
            scheme = name.partition("://")[0]
            raise UsageError(f"storage is no URL: it begins with {scheme}://", hint=hint) from None
    if ending in _JOURNALS + _DATABASES:
        return URL.create(_JOURNAL if ending in _JOURNALS else "sqlite", database=name)
    raise UsageError(f"storage is {name!r}", hint=hint)


def storage_file(address: URL) -> str | None:
    """Return the file that a study is kept in; None for a server."""
    return address.database if address.drivername == _JOURNAL or address.get_backend_name() == "sqlite" else None


@contextmanager
def open_storage(address: URL, heartbeat: int = 1) -> Iterator[RDBStorage | JournalStorage]:
    """Open Optuna's storage, made where there is none yet, with `heartbeat` seconds between signs of life.

    Raises:
        UsageError: The database's driver is not installed.
        StudyError: It cannot be opened.
    """
    with storage_errors(address):
        try:
            storage = _open(address, heartbeat)
        except (ImportError, NoSuchModuleError) as error:
            raise UsageError(
                f"nothing that is installed opens {address!r} ({error})", hint="install the database's driver"
            ) from None
    try:
        yield storage
    finally:
        if isinstance(storage, RDBStorage):
            storage.remove_session()
            storage.engine.dispose()


def _open(address: URL, heartbeat: int) -> RDBStorage | JournalStorage:
    if address.drivername == _JOURNAL:
        return JournalStorage(JournalFileBackend(str(address.database)))
    return RDBStorage(
        # Optuna fills a template with its version; braces of a name or a password are no part of one.
        address.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),
        engine_kwargs={"connect_args": {"timeout": _PATIENCE_SECONDS}} if storage_file(address) else None,
        heartbeat_interval=heartbeat,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=_MAX_RETRIES),
    )


@contextmanager
def storage_errors(address: URL) -> Iterator[None]:
    """Within, what a storage raises becomes a `StudyError`, and Optuna logs errors only."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Heartbeats, and what is tried again after one.
            yield
    except (StorageInternalError, SQLAlchemyError, JSONDecodeError, RuntimeError, OSError) as error:
        frames = traceback.walk_tb(error.__traceback__)
        if not any(str(frame.f_globals.get("__name__")).startswith("optuna.storages.") for frame, _ in frames):
            raise
        cause = error.__cause__ or error
        raise StudyError(
            f"the storage {address!r} cannot be used ({first_line(getattr(cause, 'orig', None) or cause)})",
            hint="see that it can be reached and written, or take another by --storage; the study stays as it is",
        ) from None
    finally:
        optuna.logging.set_verbosity(before)


def study_config(
    request: TuneRequest, facts: WorkloadFacts, budget: Budget, rates: LearningRateRange
) -> dict[str, Any]:
    """Collect what must be the same for all trials of a study, as JSON has it."""
    return {
        "workload": facts.name,
        "source files": facts.digest,
        "learning rates": to_plain(rates),
        "target batches": to_plain(request.target_batch),
        "budget": to_plain(budget),
        "seed": request.seed,
        "sampler": request.sampler,
        "pruner": request.pruner,
        "precision": facts.precision,
        "BatchNorm mode": facts.batchnorm,
        "optimizer": facts.optimizer,
        "held-out data": facts.held_out,
        "device": facts.card or facts.device,
    }


class Study:
    """A study of Optuna's (its `optuna`); made, or gone on with where it was made on the same terms.

    Raises:
        UsageError: There is one of that name, made on other terms or by somebody else; it stays as it is.
        StudyError: The storage cannot be read or written.
    """

    def __init__(self, storage: RDBStorage | JournalStorage, address: URL, name: str, terms: dict[str, Any]) -> None:
        self.address = address
        with storage_errors(address):
            try:
                self.optuna = optuna.create_study(storage=storage, study_name=name)
                is_new = True
            except optuna.exceptions.DuplicatedStudyError:
                self.optuna = optuna.load_study(storage=storage, study_name=name)
                is_new = False
            kept = self.optuna.user_attrs.get(_TERMS)
            minimises = self.optuna.directions == [optuna.study.StudyDirection.MINIMIZE]
            if minimises and not self.optuna.get_trials(deepcopy=False):
                if kept not in (None, terms):  # What was measured was measured for something else.
                    self.optuna.set_user_attr(_MEASURED, None)
                self.optuna.set_user_attr(_TERMS, terms)
            else:
                _check_terms(kept, terms, name)
            # A sampler begins anew in every process: with the seed it would draw what was drawn already.
            seed = terms["seed"] if is_new else None
            self.optuna.sampler = (
                optuna.samplers.RandomSampler(seed=seed)
                if terms["sampler"] == "random"
                else optuna.samplers.TPESampler(seed=seed)
            )
            self.optuna.pruner = (
                optuna.pruners.NopPruner()
                if terms["pruner"] == "none"
                else optuna.pruners.SuccessiveHalvingPruner(min_resource=MILESTONES[0], reduction_factor=2)
            )

    @property
    def name(self) -> str:
        """Return its name."""
        return self.optuna.study_name

    def rows(self) -> tuple[Row, ...]:
        """Return all trials."""
        with storage_errors(self.address):
            return tuple(map(read_trial, self.optuna.get_trials(deepcopy=False)))

    def load_measurements(self) -> tuple[Plan, Throughput] | None:
        """Return the plan whose ceiling holds for all trials, and the throughput; None before they are known.

        Raises:
            StudyError: They are damaged.
        """
        with storage_errors(self.address):
            kept = self.optuna.user_attrs.get(_MEASURED)
        if kept is None:
            return None
        try:
            return Plan.from_json(kept["plan"]), read_record(kept["throughput"], Throughput)
        except (RecordError, PlanFileError, KeyError, TypeError) as error:
            raise StudyError(
                f"the study {self.name!r} in {self.address!r} is damaged: {error}",
                hint="take another name by --study",
            ) from None

    def keep(self, plan: Plan, throughput: Throughput) -> None:
        """Write down what was measured once for all trials."""
        with storage_errors(self.address):
            self.optuna.set_user_attr(_MEASURED, {"plan": plan.to_json(), "throughput": to_plain(throughput)})


def _check_terms(kept: object, asked: Mapping[str, Any], study: str) -> None:
    if not isinstance(kept, Mapping):
        raise UsageError(f"the study {study!r} is there already, and not of autoaccum", hint="take another by --study")
    differing = [
        f"{name} {_shown(kept.get(name))}, now {_shown(value)}"
        for name, value in asked.items()
        if kept.get(name) != value
    ]
    if differing:
        raise UsageError(
            f"the study {study!r} was made with other terms ({'; '.join(differing)})",
            hint="take another name by --study, or ask for the same again",
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "..".join(str(each) for each in dict.fromkeys(value.values()))
    return str(value)[:40]


def read_trial(trial: FrozenTrial) -> Row:
    """Read one trial of Optuna's. A trial has ended by itself where its user attributes have its `state`."""
    told = trial.user_attrs
    ended = told.get("state") if trial.state.is_finished() else None
    of_optuna = "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()
    state = cast(RowState, ended if ended in get_args(FinalState) else of_optuna)
    return Row(
        number=trial.number,
        state=state,
        setting=_setting_of(trial),
        seed=int(told.get("seed", 0)),
        loss=trial.value if state == "complete" else None,
        losses=tuple((at, trial.intermediate_values[at]) for at in MILESTONES if at in trial.intermediate_values),
        samples=int(told.get("samples", 0)),
        seconds=told.get("seconds"),
        oom_retries=int(told.get("oom_retries", 0)),
        repeats=trial.system_attrs.get("failed_trial"),
        confirms=told.get("confirms"),
        own=bool(told.get("own")),
        reason=told.get("reason"),
        lost=trial.state.is_finished() and ended is None,
    )


def _setting_of(trial: FrozenTrial) -> Setting | None:
    rate, target, micro = (trial.params.get(RATE), *map(trial.user_attrs.get, (TARGET, MICRO)))
    if rate is None or target is None or micro is None:
        return None
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)
