"""What a run folder keeps of a training as it goes on: `metrics.jsonl`, and TensorBoard's files."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from autoaccum.training.events import Evaluated, Noted, Updated

_WHERE_THERE = ("noise_scale", "terms")
_SHOWN = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries", "noise_scale")


class Logs:
    """Writes a line for each update and each evaluation; begins behind the update that a run goes on from.

    What cannot be written (a full disk) is lost, and training goes on: later lines follow when there is room again.

    Args:
        folder: Of the run.
        update: What was logged of later updates is dropped: they are made again.
        evaluated_at: The update of the last evaluation that was made; later ones are made again, too.
        tell: Told, once, when a line could not be written.
    """

    def __init__(self, folder: Path, update: int, evaluated_at: int, tell: Callable[[Any], Any]) -> None:
        self._path, self._tell = folder / "metrics.jsonl", tell
        self._has_failed = False
        self._file: _Appended | None = None
        try:
            self._file = _Appended(self._path)
            self._file.cut_off(update, min(update, evaluated_at))
        except OSError as error:
            self._fail(error)
        self._board = _Board.open(folder / "tensorboard", update)

    def hear(self, event: Any) -> None:
        """Write down what is of interest in an event."""
        if isinstance(event, Updated):
            figures = vars(event).items()
            self._add({name: value for name, value in figures if value is not None or name not in _WHERE_THERE})
            shown = {f"train/{name}": getattr(event, name) for name in _SHOWN}
            self._show(event.update, shown | {f"terms/{name}": value for name, value in (event.terms or {}).items()})
        elif isinstance(event, Evaluated):
            self._add({"update": event.update, "evaluation": event.values, "samples": event.samples})
            self._show(event.update, {f"evaluation/{name}": value for name, value in event.values.items()})

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for log in (self._file, self._board):
            if log is not None:
                log.close()

    def _add(self, figures: Mapping[str, Any]) -> None:
        """Append a line; what is not a finite number is null."""
        line = json.dumps(_finite(figures), allow_nan=False).encode() + b"\n"
        try:
            if self._file is not None:
                self._file.write(line)
        except OSError as error:
            self._fail(error)

    def _show(self, update: int, figures: Mapping[str, float | None]) -> None:
        if self._board is not None:
            with suppress(OSError):  # The same figures are in metrics.jsonl, which tells of a full disk.
                self._board.add(update, figures)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = error.strerror or error
            self._tell(Noted(f"{self._path} cannot be written ({reason}): lines of it are missing"))


class _Appended:
    """A file that grows by whole pieces; a piece for which there is no room is not there, and raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)

    def write(self, piece: bytes) -> None:
        end = self._file.seek(0, io.SEEK_END)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def cut_off(self, update: int, evaluated_at: int) -> None:
        """Cut off lines that are made again, and a last one that is torn."""
        self._file.seek(0)
        self._file.truncate(_kept_bytes(self._file.read(), update, evaluated_at))

    def close(self) -> None:
        self._file.close()


class _Board:
    """Figures by update, for TensorBoard.

    They are written here: PyTorch's own writer has a thread that a full disk ends with a traceback.
    """

    def __init__(self, file: _Appended) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summary, self._file = event_pb2, summary_pb2.Summary, file
        self._records: Any = RecordWriter(file)

    @classmethod
    def open(cls, folder: Path, update: int) -> _Board | None:
        """A board whose figures follow those of `update`; None where TensorBoard is not installed, or not working."""
        if importlib.util.find_spec("tensorboard") is None:
            return None
        # TensorBoard reads a run's files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with suppress(Exception):
            folder.mkdir(exist_ok=True)
            board = cls(_Appended(folder / name))
            with suppress(OSError):
                board._write(file_version="brain.Event:2")
                session = board._events.SessionLog
                if update:
                    board._write(step=update + 1, session_log=session(status=session.START))
            return board
        return None

    def add(self, update: int, figures: Mapping[str, float | None]) -> None:
        there = {name: float(value) for name, value in figures.items() if value is not None}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in there.items()]
        self._write(step=update, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())


def _kept_bytes(content: bytes, update: int, evaluated_at: int) -> int:
    kept = end = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        try:
            figures = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(figures, dict) and isinstance(figures.get("update"), int):
            if figures["update"] > (evaluated_at if "evaluation" in figures else update):
                break
            kept = end
    return kept


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
