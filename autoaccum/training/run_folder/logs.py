"""What a run folder keeps of a training as it goes on: figures of each update, and of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from autoaccum.training.events import Evaluated, Noted, Updated
from autoaccum.training.run_folder.metrics import MetricsLog
from autoaccum.training.run_folder.run_folder import RunFolder
from autoaccum.training.run_folder.tensorboard import open_board


class Logs:
    """`metrics.jsonl`, and TensorBoard's files where it is installed; begins behind the update that it goes on from.

    Args:
        folder: Where they are.
        update: What was logged of later updates is dropped: they are made again.
        evaluated_at: The update of the last evaluation that was made; later ones are made again, too.
        tell: Told, once, when something cannot be written; training goes on.
    """

    def __init__(self, folder: RunFolder, update: int, evaluated_at: int, tell: Callable[[Any], Any]) -> None:
        self._metrics = MetricsLog(folder.metrics_path, lambda reason: tell(Noted(reason)))
        self._metrics.resume(update, evaluated_at)
        self._board = open_board(folder.tensorboard_dir, update)

    def hear(self, event: Any) -> None:
        """Write down what is of interest in an event."""
        for log in (self._metrics, self._board):
            if log is None:
                continue
            if isinstance(event, Updated):
                log.write(event)
            elif isinstance(event, Evaluated):
                log.write_evaluation(event)

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for log in (self._metrics, self._board):
            if log is not None:
                log.close()
