"""When a training is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autoaccum.training.evaluation.evaluation import Evaluation
from autoaccum.training.events import Evaluated, EvaluationFailed
from autoaccum.training.progress import Progress


class Evaluator:
    """Evaluates every so many updates, or when it is told to, or after each epoch, and in the end.

    There is at most one evaluation after an update.

    Args:
        evaluation: What an evaluation is; None where nothing is evaluated.
        model: The model.
        progress: How far training is.
        every: Updates from one to the next; None: after each epoch, unless `due` is given.
        tell: Told of each, done or failed.
        due: Whether one comes next, asked with the samples trained on so far.
        averaged: The model whose weights are the averages, evaluated too (`ema_loss` beside `loss`); None: there is
            none.
    """

    def __init__(
        self,
        evaluation: Evaluation | None,
        model: nn.Module,
        progress: Progress,
        every: int | None,
        tell: Callable[[Any], Any],
        due: Callable[[int], bool] | None = None,
        averaged: nn.Module | None = None,
    ) -> None:
        self._evaluation, self._model, self._progress = evaluation, model, progress
        self._every, self._tell, self._due, self._averaged = every, tell, due, averaged

    def run_if_due(self) -> None:
        """After an update."""
        if self._due is not None:
            is_due = self._due(self._progress.samples)
        else:
            is_due = self._every is not None and self._progress.update % self._every == 0
        if is_due:
            self.run()

    def run_after_epoch(self) -> None:
        """After an epoch."""
        if self._every is None and self._due is None:
            self.run()

    def run_missed(self) -> None:
        """When a run goes on: what stopped it may have come between an update, or an epoch, and its evaluation."""
        if self._every is not None or self._due is not None:
            if self._progress.update not in (0, self._progress.evaluated_at):
                self.run_if_due()
        elif self._progress.epoch > 0 and self._progress.epoch_samples == 0:
            self.run()

    def run(self) -> None:
        """Now, unless that was done after this very update."""
        progress = self._progress
        if self._evaluation is None or progress.update in (0, progress.evaluated_at):
            return
        done = self._evaluation.run(self._model, progress.update)
        if isinstance(done, Evaluated) and self._averaged is not None:
            done = _joined(done, self._evaluation.run(self._averaged, progress.update))
        progress.evaluated_at = progress.update
        if isinstance(done, Evaluated):
            progress.evaluation = dict(done.values)
        self._tell(done)

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {} if self._evaluation is None else {"micro_batch": self._evaluation.micro_batch}

    def restore(self, state: dict[str, int]) -> None:
        """Go on with the micro-batch that fitted."""
        if self._evaluation is not None and "micro_batch" in state:
            self._evaluation.micro_batch = min(self._evaluation.micro_batch, state["micro_batch"])


def _joined(done: Evaluated, averaged: Evaluated | EvaluationFailed) -> Evaluated | EvaluationFailed:
    if isinstance(averaged, EvaluationFailed):
        return averaged
    values = {**done.values, **{f"ema_{name}": value for name, value in averaged.values.items()}}
    return Evaluated(done.update, values, done.samples, done.seconds + averaged.seconds)
