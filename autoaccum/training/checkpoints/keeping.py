"""When a training is written down, and what becomes of it where that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoaccum.errors import CheckpointError, UsageError
from autoaccum.training.checkpoints.checkpoints import CheckpointStore
from autoaccum.training.events import CheckpointFailed, CheckpointWritten
from autoaccum.training.progress import Progress


class Keeper:
    """Writes checkpoints: one before the first update, one every so many updates, one in the end.

    The first must succeed: a folder that cannot be written, or a state that cannot be kept, is better known before
    hours of training. One that fails later is told of, the earlier ones are as they were, and training goes on.

    Args:
        store: Where to; None: nowhere.
        every: Updates from one to the next.
        progress: How far training is.
        compose: Puts together what a checkpoint holds.
        tell: Told of each, written or failed.

    Attributes:
        newest: The newest checkpoint that is whole.
        failure: Why the last attempt failed; None when it did not.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        *,
        every: int,
        progress: Progress,
        compose: Callable[[], dict[str, Any]],
        tell: Callable[[Any], Any],
    ) -> None:
        self.newest: Path | None = None
        self.failure: str | None = None
        self._store, self._every, self._progress = store, every, progress
        self._compose, self._tell = compose, tell
        self._kept_at: tuple[int, int, int] | None = None

    def go_on_from(self, path: Path) -> None:
        """A checkpoint has been put back: nothing has happened since."""
        self.newest = path
        self._kept_at = self._place()

    def keep_first(self) -> None:
        """Before any update.

        Raises:
            CheckpointError: It could not be written.
            NotPortableError: Something of the state could be loaded only by running code.
        """
        if self._store is not None and self._kept_at is None:
            self._write(self._store)

    def keep_if_due(self) -> None:
        """After an update."""
        if self._progress.update % self._every == 0:
            self.keep()

    def keep(self) -> None:
        """Now, unless nothing has happened since the last one."""
        if self._store is None or self._kept_at == self._place():
            return
        try:
            self._write(self._store)
            self.failure = None
        except (CheckpointError, UsageError) as error:
            self.failure = str(error)
            self._tell(CheckpointFailed(self._progress.update, self.failure))

    def _write(self, store: CheckpointStore) -> None:
        began, update = time.perf_counter(), self._progress.update
        self.newest = store.write(update, self._compose())
        self._kept_at = self._place()
        self._tell(CheckpointWritten(update, self.newest, time.perf_counter() - began))

    def _place(self) -> tuple[int, int, int]:
        return self._progress.update, self._progress.epoch, self._progress.evaluated_at
