"""A study: Optuna's, with the terms it was made on, and what was measured once for all of its trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import optuna
from optuna.trial import FrozenTrial

from autoaccum.errors import StudyError, UsageError
from autoaccum.planning.records import Plan
from autoaccum.planning.shapes import ShapeError
from autoaccum.tuning.records import Row, Throughput
from autoaccum.tuning.studies.attributes import MEASURED, TERMS, is_finished
from autoaccum.tuning.studies.halving import describe_pruner, make_pruner
from autoaccum.tuning.studies.line import Line
from autoaccum.tuning.studies.measured import read_plan, read_throughput, write_measured
from autoaccum.tuning.studies.rows import rows_of
from autoaccum.tuning.studies.samplers import describe_sampler, make_sampler
from autoaccum.tuning.studies.storage import Storage
from autoaccum.tuning.studies.terms import Terms, check_terms
from autoaccum.tuning.studies.troubles import deleted, is_of_storage, quiet, storage_trouble

_T = TypeVar("_T")

_PATIENCE_SECONDS = 3.0
"""How long another worker may take to write down the terms of a study that it has just made."""
_POLL_SECONDS = 0.1
_SETTLING_SECONDS = 1.0
"""How long two workers may be apart who both saw that nothing was written: a few transactions."""


class Study:
    """A study in a storage; made by `open_study`.

    Args:
        storage: Where it is kept.
        name: Its name.
        terms: What its trials have in common.

    Attributes:
        is_maker: Whether it was this worker that made it; of several that start at once, one.
    """

    def __init__(self, storage: Storage, name: str, terms: Terms) -> None:
        self.is_maker = False
        self.storage = storage
        self.name = name
        self.terms = terms
        self.sampler_words = describe_sampler(terms.sampler, terms.seed)
        self.pruner_words = describe_pruner(terms.pruner)

    @property
    def confirmed_name(self) -> str:
        """Of the study in which the best settings are run with other seeds."""
        return f"{self.name}, confirmed"

    @property
    def finished(self) -> int:
        """Trials of the search that are finished."""
        return sum(map(is_finished, self.trials(self.name)))

    def rows(self) -> tuple[Row, ...]:
        """The trials of the search, then the confirmations."""
        searched, confirmed = self.trials(self.name), self.trials(self.confirmed_name)
        return rows_of(searched, self.terms.seed) + rows_of(confirmed, self.terms.seed)

    def trials(self, name: str) -> list[FrozenTrial]:
        """The trials of a study; none where it is not there."""
        with self.reaching():
            names = optuna.get_all_study_names(self.storage.backend)
            return self._load(name).get_trials(deepcopy=False) if name in names else []

    def search_line(self) -> tuple[optuna.Study, Line]:
        """Optuna's study to draw trials in, and the line of those that wait."""
        with self.reaching():
            study = self._load(self.name)
        study.sampler = make_sampler(self.terms.sampler, self.terms.seed)
        study.pruner = make_pruner(self.terms.pruner)
        return study, Line(study, self.storage.backend, self.storage.heartbeat)

    def confirmation_line(self) -> tuple[optuna.Study, Line]:
        """The study of confirmations, made where there is none yet, and the line of those that wait."""
        with self.reaching():
            study = optuna.create_study(
                storage=self.storage.backend,
                study_name=self.confirmed_name,
                sampler=make_sampler("random", self.terms.seed),
                pruner=make_pruner("none"),
                load_if_exists=True,
            )
            if not study.user_attrs and not study.get_trials(deepcopy=False):
                study.set_user_attr(TERMS, {"schema": self.terms.schema, "confirms": self.name})
            kept = study.user_attrs.get(TERMS)
        if not isinstance(kept, Mapping) or kept.get("confirms") != self.name:
            raise UsageError(
                f"the study {self.confirmed_name!r} is there already, and not of autoaccum",
                hint="take another name by --study",
            )
        return study, Line(study, self.storage.backend, self.storage.heartbeat)

    def recall_plan(self) -> Plan | None:
        """The plan whose ceiling holds for all trials; None before one is made.

        Raises:
            StudyError: It is damaged.
        """
        return self._read(read_plan)

    def recall_throughput(self) -> Throughput | None:
        """Samples per second over micro-batches; None before they are measured.

        Raises:
            StudyError: They are damaged.
        """
        return self._read(read_throughput)

    def settle(self, plan: Plan, throughput: Throughput) -> tuple[Plan, Throughput]:
        """Keep a plan and what was measured by it, unless some are kept already; those that are kept.

        Several workers may come here at the same moment, each with its own. Who made the study is one of them only,
        which every storage sees to: that one writes, and the others wait for it. Where it is gone, another one writes,
        and looks again after a moment, so that of several who do so, all go by what was written last.

        Raises:
            StudyError: What is kept is damaged, or the storage cannot be read or written.
        """
        deadline = time.monotonic() + (0.0 if self.is_maker else _PATIENCE_SECONDS)
        while self._recall() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if self._recall() is None:
            with self.reaching():
                self._load(self.name).set_user_attr(MEASURED, write_measured(plan, throughput))
            time.sleep(0.0 if self.is_maker else _SETTLING_SECONDS)
        return self.recall_plan() or plan, self.recall_throughput() or throughput

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Within, what the storage raises becomes a `StudyError`, and Optuna logs nothing."""
        with quiet(), storage_trouble(self.storage.shown, self.storage.secrets):
            try:
                yield
            except KeyError as error:
                if not is_of_storage(error):
                    raise
                raise deleted(self.storage.shown, f"all of the study {self.name!r}", error.args[0]) from None

    def _load(self, name: str) -> optuna.Study:
        return optuna.load_study(study_name=name, storage=self.storage.backend)

    def _recall(self) -> object:
        with self.reaching():
            names = optuna.get_all_study_names(self.storage.backend)
            return self._load(self.name).user_attrs.get(MEASURED) if self.name in names else None

    def _read(self, read: Callable[[object], _T]) -> _T | None:
        kept = self._recall()
        try:
            return None if kept is None else read(kept)
        except ShapeError as error:
            raise StudyError(
                f"the study {self.name!r} in {self.storage.shown} is damaged: {error}",
                hint="take another name by --study",
            ) from None


def find_study(storage: Storage, name: str, terms: Terms) -> Study:
    """The study of that name, which may not be there yet: nothing is made before all that trials need is known.

    Raises:
        UsageError, StudyError: As `open_study`.
    """
    study = Study(storage, name, terms)
    with study.reaching():
        there = name in optuna.get_all_study_names(storage.backend)
    return open_study(storage, name, terms) if there else study


def open_study(storage: Storage, name: str, terms: Terms) -> Study:
    """Make a study, or go on with one that was made on the same terms.

    Args:
        storage: Where.
        name: Its name.
        terms: What its trials have in common.

    Raises:
        UsageError: There is one of that name, made on other terms or by somebody else; it stays as it is.
        StudyError: The storage cannot be read or written.
    """
    study = Study(storage, name, terms)
    with study.reaching():
        try:
            made = optuna.create_study(storage=storage.backend, study_name=name)
            study.is_maker = True
        except optuna.exceptions.DuplicatedStudyError:
            made = optuna.load_study(study_name=name, storage=storage.backend)
            if not _is_empty(made):
                check_terms(made.user_attrs.get(TERMS) if _minimises(made) else None, terms, name)
                return study
        made.set_user_attr(TERMS, terms.to_record())
        check_terms(made.user_attrs.get(TERMS), terms, name)
    return study


def _is_empty(study: optuna.Study) -> bool:
    """Whether there is nothing in it, nor comes: who has just made it is given a moment to write down the terms.

    One that stays empty was made by a worker that did not live to write them, and can be taken over.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _minimises(study) and not study.user_attrs and not study.get_trials(deepcopy=False):
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _minimises(study: optuna.Study) -> bool:
    return study.directions == [optuna.study.StudyDirection.MINIMIZE]
