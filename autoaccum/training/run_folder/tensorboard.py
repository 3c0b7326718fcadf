"""The figures of `metrics.jsonl` for TensorBoard, where it is installed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autoaccum.training.events import Evaluated, Updated
from autoaccum.training.run_folder.appended_file import AppendedFile

_FIGURES = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries", "noise_scale")


def open_board(folder: Path, update: int) -> Board | None:
    """A board whose figures follow those of `update`; None, silently, where TensorBoard is not installed.

    It is written here, and not through PyTorch's `SummaryWriter`: that one's thread ends with a traceback when the
    disk is full.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        # TensorBoard reads a run's files in the order of their names.
        file = AppendedFile(folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        board = Board(file, RecordWriter(file), Event, Summary)
        board.add(file_version="brain.Event:2")
        if update:
            board.add(step=update + 1, session_log=SessionLog(status=SessionLog.START))
    except Exception:  # Also one that is installed and does not work: the same figures are in metrics.jsonl.
        return None
    return board


class Board:
    """Figures by update: `train/...`, `terms/...` and `evaluation/...`.

    Those that cannot be written (a full disk) are left out, silently: so they are in `metrics.jsonl`, which tells it.
    """

    def __init__(self, file: AppendedFile, records: Any, event: Callable[..., Any], summary: Any) -> None:
        self._file = file
        self._records = records
        self._event = event
        self._summary = summary

    def write(self, updated: Updated) -> None:
        """Add the figures of an update that there are."""
        figures = {f"train/{name}": getattr(updated, name) for name in _FIGURES}
        self._add(updated.update, figures | dict(_under("terms", updated.terms or {})))

    def write_evaluation(self, evaluated: Evaluated) -> None:
        """Add what an evaluation gave."""
        self._add(evaluated.update, dict(_under("evaluation", evaluated.values)))

    def add(self, **content: Any) -> None:
        """Add an event.

        Raises:
            OSError: It could not be written.
        """
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, update: int, figures: Mapping[str, Any]) -> None:
        there = {name: float(value) for name, value in figures.items() if value is not None}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in there.items()]
        with suppress(OSError):
            self.add(step=update, summary=self._summary(value=values))


def _under(room: str, values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((f"{room}/{name}", value) for name, value in values.items())
