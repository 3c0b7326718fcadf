"""Predicting in processes of their own: simulating is process-wide, and a model may end its process."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from truths.models import make_torchvision_importable
from truths.scores import Case, Scored, UnknownModel
from truths.tables import TABLES

_CASES_EACH = 40
"""Then processes are replaced: what a simulation keeps would grow with every model."""


def score_case(case: Case) -> Scored:
    """Predict a row, and compare."""
    table = TABLES[case.table]
    try:
        predicted = tuple(table.predict(case, batch) for batch in case.batches)
    except UnknownModel:
        return Scored(case=case, unknown=True)
    except Exception as error:  # noqa: BLE001 - one row that fails must not end the run.
        return Scored(case=case, failure=f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        gc.freeze()  # Garbage is looked for between updates: not in what libraries made when they were imported.
    return Scored(case=case, predicted=predicted, verdict=table.judge(case, predicted))


def score_apart(cases: Sequence[Case], processes: int) -> Iterator[Scored]:
    """The scores as they come, from other processes; where one dies, its rows are tried once more, each alone."""
    together = _CASES_EACH * processes
    for start in range(0, len(cases), together):
        lost = []
        for case, scored in _score_apart(cases[start : start + together], processes):
            if scored is None:
                lost.append(case)
            else:
                yield scored
        for case in lost:
            ((_, scored),) = _score_apart([case], 1)
            yield scored or Scored(case=case, failure="the process that predicted it died")


def _score_apart(cases: Sequence[Case], processes: int) -> Iterator[tuple[Case, Scored | None]]:
    with ProcessPoolExecutor(min(processes, len(cases)), get_context("spawn"), _prepare) as pool:
        tasks = [pool.submit(score_case, case) for case in cases]
        for task in as_completed(tasks):
            yield cases[tasks.index(task)], None if task.exception() else task.result()


def _prepare() -> None:
    """Discard what a model prints: stdout is for the scores."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    make_torchvision_importable()
