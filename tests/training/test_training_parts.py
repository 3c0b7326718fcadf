"""The small parts of a training: its goal, who hears of it, when it is kept and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from autoaccum.accumulation.observers import StepResult
from autoaccum.errors import CheckpointError
from autoaccum.training.checkpoints import Checkpoints, Keeper
from autoaccum.training.evaluation import Evaluation, Evaluator
from autoaccum.training.events import CheckpointFailed, CheckpointWritten, Evaluated, Noted, Teller
from autoaccum.training.progress import Goal, Progress

RESULT = StepResult(0.5, 8, (4, 4), 1.0, 2, updated=True, terms={"loss": 0.5})


def test_progress_counts_windows_and_epochs() -> None:
    progress = Progress()
    progress.count(8, RESULT)
    progress.count(5, RESULT)
    assert (progress.update, progress.samples, progress.epoch_samples, progress.shortages) == (2, 13, 13, 4)
    progress.end_epoch()
    assert (progress.epoch, progress.samples, progress.epoch_samples) == (1, 13, 0)


@pytest.mark.parametrize(
    ("epochs", "steps", "update", "epoch", "reached"),
    [(2, None, 99, 1, False), (2, None, 0, 2, True), (None, 5, 4, 9, False), (None, 5, 5, 0, True), (3, 5, 5, 1, True)],
)
def test_the_goal_is_the_first_of_both(
    epochs: int | None, steps: int | None, update: int, epoch: int, reached: bool
) -> None:
    assert Goal(epochs, steps, None).is_reached(Progress(update=update, epoch=epoch)) is reached


def test_what_went_wrong_is_remembered_once() -> None:
    teller = Teller([], [])
    for event in (Noted("odd"), Noted("odd"), Noted("fine", warns=False), CheckpointFailed(3, "full"), 3):
        teller.tell(event)
    assert teller.warnings == ["odd", "no checkpoint was written after update 3: full"]


def keeper(folder: Path, progress: Progress, told: list[Any], **options: Any) -> Keeper:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"every": 2, "compose": lambda: {"update": progress.update}} | options
    return Keeper(Checkpoints(folder), progress=progress, tell=told.append, **settings)


def test_it_is_kept_at_the_beginning_every_so_often_and_where_it_ends(tmp_path: Path) -> None:
    told: list[Any] = []
    progress = Progress()
    keep = keeper(tmp_path, progress, told)
    keep.keep_first()
    keep.keep_first()
    for _ in range(5):
        progress.count(8, RESULT)
        keep.keep_if_due()
    keep.keep()
    keep.keep()
    assert [event.update for event in told if isinstance(event, CheckpointWritten)] == [0, 2, 4, 5]
    progress.end_epoch()
    keep.keep()
    assert told[-1].update == 5, "the same update, but a place further on"
    assert keep.newest == told[-1].path


def test_a_failure_is_told_and_mended_by_the_next(tmp_path: Path) -> None:
    told: list[Any] = []
    progress = Progress(update=2)
    broken = [True]

    def compose() -> dict[str, Any]:
        if broken[0]:
            raise CheckpointError("the disk is full", hint="make room")
        return {}

    keep = keeper(tmp_path, progress, told, compose=compose)
    keep.keep()
    assert told == [CheckpointFailed(2, "the disk is full: make room")]
    assert keep.failure is not None
    broken.clear()
    broken.append(False)
    keep.keep()
    assert keep.failure is None
    with pytest.raises(CheckpointError):
        keeper(tmp_path / "new", Progress(), told, compose=lambda: _raise(CheckpointError("full"))).keep_first()


def _raise(error: Exception) -> dict[str, Any]:
    raise error


def test_without_a_folder_nothing_is_kept() -> None:
    told: list[Any] = []
    keep = Keeper(None, every=1, progress=Progress(update=1), compose=dict, tell=told.append)
    keep.keep_first()
    keep.keep_if_due()
    assert (told, keep.newest) == ([], None)


class Counting:
    """An evaluation that takes nothing."""

    micro_batch = 7

    def run(self, model: nn.Module, update: int) -> Evaluated:
        return Evaluated(update, {"loss": float(update)}, 3, 0.0)


@pytest.mark.parametrize(("every", "expected"), [(None, [2, 4, 5]), (3, [3, 5]), (1, [1, 2, 3, 4, 5])])
def test_it_is_evaluated_when_it_is_due_and_in_the_end(every: int | None, expected: list[int]) -> None:
    told: list[Any] = []
    progress = Progress()
    evaluator = Evaluator(cast("Evaluation", Counting()), nn.Linear(1, 1), progress, every, told.append)
    for update in range(1, 6):
        progress.count(8, RESULT)
        evaluator.run_if_due()
        if update in (2, 4):
            progress.end_epoch()
            evaluator.run_after_epoch()
    evaluator.run()
    assert [event.update for event in told] == expected
    assert progress.evaluation == {"loss": 5.0}
    evaluator.restore({"micro_batch": 3})
    assert evaluator.state() == {"micro_batch": 3}
