"""An Optuna study in one of Optuna's storages, with its configuration and the measurements for all trials."""

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
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput
from autoaccum.serialization import RecordError, read_record, to_plain
from autoaccum.tuning.tune_request import Budget, LearningRateRange, TuneRequest
from autoaccum.tuning.tuning_result import MILESTONES, FinalState, Row, RowState, Setting, WorkloadFacts

RATE, TARGET, MICRO = "learning_rate", "target_batch", "micro_batch"
_DATABASES, _JOURNALS = (".db", ".sqlite", ".sqlite3"), (".journal", ".log")
_JOURNAL = "journal"
_MAX_RETRIES = 3
"""Retries of a trial after its process died."""
_PATIENCE_SECONDS = 60
"""Seconds that a write to SQLite waits for other workers."""
_CONFIG, _MEASURED = "autoaccum", "autoaccum_measured"


def parse_storage_address(name: str | None) -> URL:
    """Parse where a study is stored: `tune.db`, `tune.journal`, or an SQLAlchemy URL; None: `tune.db` in this folder.

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
            raise UsageError(f"storage is not a valid URL: it begins with {scheme}://", hint=hint) from None
    if ending in _JOURNALS + _DATABASES:
        return URL.create(_JOURNAL if ending in _JOURNALS else "sqlite", database=name)
    raise UsageError(f"storage is {name!r}", hint=hint)


def storage_file(address: URL) -> str | None:
    """Return the file of a storage; None for a server."""
    return address.database if address.drivername == _JOURNAL or address.get_backend_name() == "sqlite" else None


@contextmanager
def open_storage(address: URL, heartbeat: int = 1) -> Iterator[RDBStorage | JournalStorage]:
    """Open Optuna's storage, creating it if necessary, with `heartbeat` seconds between heartbeats.

    Raises:
        UsageError: The database's driver is not installed.
        StudyError: It cannot be opened.
    """
    with storage_errors(address):
        try:
            storage = _open(address, heartbeat)
        except (ImportError, NoSuchModuleError) as error:
            raise UsageError(f"no installed driver opens {address!r} ({error})", hint="install the driver") from None
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
        # Optuna formats this string, so braces of a name or a password are escaped.
        address.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),
        engine_kwargs={"connect_args": {"timeout": _PATIENCE_SECONDS}} if storage_file(address) else None,
        heartbeat_interval=heartbeat,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=_MAX_RETRIES),
    )


@contextmanager
def storage_errors(address: URL) -> Iterator[None]:
    """Turn errors of a storage into `StudyError`, and let Optuna log only errors."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Heartbeats and the retries after them.
            yield
    except (StorageInternalError, SQLAlchemyError, JSONDecodeError, RuntimeError, OSError) as error:
        frames = traceback.walk_tb(error.__traceback__)
        if not any(str(frame.f_globals.get("__name__")).startswith("optuna.storages.") for frame, _ in frames):
            raise
        cause = error.__cause__ or error
        raise StudyError(
            f"the storage {address!r} cannot be used ({first_line(getattr(cause, 'orig', None) or cause)})",
            hint="check access to it, or choose another by --storage; the study is unchanged",
        ) from None
    finally:
        optuna.logging.set_verbosity(before)


def study_config(
    request: TuneRequest, facts: WorkloadFacts, budget: Budget, rates: LearningRateRange
) -> dict[str, Any]:
    """Return what must be equal for all trials of a study, as plain values."""
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
        **({"coupled loss": facts.coupled} if facts.coupled else {}),
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
            try:
                self.optuna = optuna.create_study(storage=storage, study_name=name)
                is_new = True
            except optuna.exceptions.DuplicatedStudyError:
                self.optuna = optuna.load_study(storage=storage, study_name=name)
                is_new = False
            stored = self.optuna.user_attrs.get(_CONFIG)
            minimises = self.optuna.directions == [optuna.study.StudyDirection.MINIMIZE]
            if minimises and not self.optuna.get_trials(deepcopy=False):
                if stored not in (None, config):  # The measurements belong to another configuration.
                    self.optuna.set_user_attr(_MEASURED, None)
                self.optuna.set_user_attr(_CONFIG, config)
            else:
                _check_config(stored, config, name)
            # With the seed, the sampler of a second process would repeat earlier draws.
            seed = config["seed"] if is_new else None
            samplers: dict[str, Any] = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
            self.optuna.sampler = samplers[config["sampler"]](seed=seed)
            halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=MILESTONES[0], reduction_factor=2)
            self.optuna.pruner = optuna.pruners.NopPruner() if config["pruner"] == "none" else halving

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.optuna.study_name

    def rows(self) -> tuple[Row, ...]:
        """Return all trials."""
        with storage_errors(self.address):
            return tuple(map(read_trial, self.optuna.get_trials(deepcopy=False)))

    def load_measurements(self) -> tuple[Plan, Throughput] | None:
        """Return the plan, whose ceiling holds for all trials, and the throughput; None before they are measured.

        Raises:
            StudyError: They are damaged.
        """
        with storage_errors(self.address):
            stored = self.optuna.user_attrs.get(_MEASURED)
        if stored is None:
            return None
        try:
            return Plan.from_json(stored["plan"]), read_record(stored["throughput"], Throughput)
        except (RecordError, PlanFileError, KeyError, TypeError) as error:
            raise StudyError(
                f"the study {self.name!r} in {self.address!r} is damaged: {error}",
                hint="choose another name by --study",
            ) from None

    def save_measurements(self, plan: Plan, throughput: Throughput) -> None:
        """Save what was measured once for all trials."""
        with storage_errors(self.address):
            self.optuna.set_user_attr(_MEASURED, {"plan": plan.to_json(), "throughput": to_plain(throughput)})


def _check_config(stored: object, requested: Mapping[str, Any], study: str) -> None:
    if not isinstance(stored, Mapping):
        raise UsageError(f"the study {study!r} exists and is not autoaccum's", hint="choose another name by --study")
    differing = [
        f"{name} {_format_value(stored.get(name))}, now {_format_value(requested.get(name))}"
        for name in dict.fromkeys((*requested, *stored))
        if stored.get(name) != requested.get(name)
    ]
    if differing:
        raise UsageError(
            f"the study {study!r} was made with other settings ({'; '.join(differing)})",
            hint="choose another name by --study, or use the same settings again",
        )


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "..".join(str(each) for each in dict.fromkeys(value.values()))
    return str(value)[:40]


def read_trial(trial: FrozenTrial) -> Row:
    """Convert one of Optuna's trials. Only a trial that ended by itself has the user attribute `state`."""
    attributes = trial.user_attrs
    ended = attributes.get("state") if trial.state.is_finished() else None
    of_optuna = "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()
    state = cast(RowState, ended if ended in get_args(FinalState) else of_optuna)
    return Row(
        number=trial.number,
        state=state,
        setting=_read_setting(trial),
        seed=int(attributes.get("seed", 0)),
        loss=trial.value if state == "complete" else None,
        losses=tuple((at, trial.intermediate_values[at]) for at in MILESTONES if at in trial.intermediate_values),
        samples=int(attributes.get("samples", 0)),
        seconds=attributes.get("seconds"),
        oom_retries=int(attributes.get("oom_retries", attributes.get("shortages", 0))),
        repeats=trial.system_attrs.get("failed_trial"),
        confirms=attributes.get("confirms"),
        own=bool(attributes.get("own")),
        reason=attributes.get("reason"),
        lost=trial.state.is_finished() and ended is None,
    )


def _read_setting(trial: FrozenTrial) -> Setting | None:
    rate, target, micro = (trial.params.get(RATE), *map(trial.user_attrs.get, (TARGET, MICRO)))
    if rate is None or target is None or micro is None:
        return None
    return Setting(learning_rate=rate, target_batch=target, micro_batch=micro)
