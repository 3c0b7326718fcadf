"""What changes a project's source and not its memory passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded_edits import edited
from guarded_gpt import BASE
from guarded_measuring import CASE, as_locked, measure_here
from guarded_refactorings import REFACTORINGS, Refactoring

from autoaccum.guarding.comparing import compare
from autoaccum.guarding.records import Measurement, Tolerance


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """The sample project as it is, as a lock keeps it."""
    return as_locked(measure_here(BASE, tmp_path_factory.mktemp("project")).measurement)


@pytest.mark.parametrize("refactoring", REFACTORINGS, ids=lambda refactoring: refactoring.name)
def test_each_passes(refactoring: Refactoring, locked: Measurement, tmp_path: Path) -> None:
    source, files = BASE, {}
    if refactoring.moved is not None:
        name, first, end = refactoring.moved
        head, (start, stop) = source[: source.index(first)], (source.index(first), source.index(end))
        source, files = head + source[stop:], {name: head + source[start:stop]}
    now = measure_here(edited(refactoring.edits, source), tmp_path, files)
    judgement = compare(CASE, locked, now, Tolerance())
    assert judgement.outcome in ("unchanged", "within", refactoring.outcome), judgement.explanation
    assert judgement.exit_code == 0
    assert now.measurement.held_bytes == locked.held_bytes
    assert all(
        growth.category == "unused" for growth in judgement.growths if abs(growth.bytes) > locked.peak_bytes / 1000
    )
