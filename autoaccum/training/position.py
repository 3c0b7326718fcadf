"""How far a training is."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.accumulation.step_result import StepResult


@dataclass
class Progress:
    """Counted over all runs in one folder; what a checkpoint keeps of it.

    Attributes:
        update: Windows trained on or passed over.
        epoch: Whole epochs.
        samples: Samples of those windows.
        epoch_samples: Those of the epoch that is under way.
        made: Updates that were made; the others had no weight, were skipped, or overflowed in fp16.
        shortages: How often an update was repeated because memory ran out.
        skipped: Windows passed over because loss or gradient were not finite.
        loss: Of the last update.
        evaluation: What the last evaluation gave.
        evaluated_at: The update after which it was; 0 before any.
    """

    update: int = 0
    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    shortages: int = 0
    made: int = 0
    skipped: int = 0
    loss: float | None = None
    evaluation: dict[str, float] | None = None
    evaluated_at: int = 0

    def count(self, samples: int, result: StepResult) -> None:
        """An update was made of a window of `samples`, or the window was passed over."""
        self.update += 1
        self.samples += samples
        self.epoch_samples += samples
        self.shortages += result.retries
        self.made += result.updated
        self.loss = result.loss

    def end_epoch(self) -> None:
        """All of the data was seen once more."""
        self.epoch += 1
        self.epoch_samples = 0


@dataclass(frozen=True)
class Goal:
    """When a training is done.

    Attributes:
        epochs: After so many whole epochs; None: only updates count.
        steps: After so many updates; None: only epochs count. The first of both that is reached.
        updates_per_epoch: Where the data tells its length.
    """

    epochs: int | None
    steps: int | None
    updates_per_epoch: int | None

    def is_reached(self, progress: Progress) -> bool:
        """Whether nothing is left to do."""
        if self.steps is not None and progress.update >= self.steps:
            return True
        return self.epochs is not None and progress.epoch >= self.epochs

    @property
    def updates(self) -> int | None:
        """Updates there will be in all; None where that is not known.

        >>> Goal(3, None, 10).updates, Goal(3, 25, 10).updates, Goal(None, 7, None).updates, Goal(3, 7, None).updates
        (30, 25, 7, None)
        """
        if self.epochs is None:
            return self.steps
        if self.updates_per_epoch is None:
            return None
        updates = self.epochs * self.updates_per_epoch
        return updates if self.steps is None else min(updates, self.steps)
