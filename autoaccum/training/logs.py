"""What a run folder keeps of a training as it goes on: `metrics.jsonl`, and TensorBoard's files."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from autoaccum.training.fit_events import Evaluated, Noted, Updated

_SHOWN = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries")


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
        self._file: io.FileIO | None = None
        try:
            self._file = io.FileIO(self._path, "a+")
            self._file.seek(0)
            self._file.truncate(_kept_bytes(self._file.read(), update, min(update, evaluated_at)))
        except OSError as error:
            self._fail(error)
        self._board = _open_board(folder / "tensorboard", update)

    def hear(self, event: Any) -> None:
        """Write down what is of interest in an event."""
        if isinstance(event, Updated):
            figures = {name: value for name, value in vars(event).items() if value is not None or name != "terms"}
            shown = {f"train/{name}": figures[name] for name in _SHOWN}
            shown |= {f"terms/{name}": value for name, value in (event.terms or {}).items()}
        elif isinstance(event, Evaluated):
            figures = {"update": event.update, "evaluation": event.values, "samples": event.samples}
            shown = {f"evaluation/{name}": value for name, value in event.values.items()}
        else:
            return
        if self._add(figures) and self._board is not None:
            with suppress(OSError):  # metrics.jsonl tells of a full disk, and spares TensorBoard's thread the attempt.
                for name, value in shown.items():
                    if value is not None:
                        self._board.add_scalar(name, value, event.update)

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for log in (self._file, self._board):
            with suppress(OSError):
                if log is not None:
                    log.close()

    def _add(self, figures: Mapping[str, Any]) -> bool:
        """Append a whole line, or nothing where there is no room for it; what is not a finite number is null."""
        if self._file is None:
            return False
        end = self._file.seek(0, io.SEEK_END)
        rest = memoryview(json.dumps(_finite(figures), allow_nan=False).encode() + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = error.strerror or error
            self._tell(Noted(f"{self._path} cannot be written ({reason}): lines of it are missing"))


def _open_board(folder: Path, update: int) -> Any:
    """A writer of figures that follow those of `update`; None where TensorBoard is not installed, or not working."""
    if importlib.util.find_spec("tensorboard") is not None:
        with suppress(Exception):
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(folder), purge_step=update + 1 if update else None)
    return None


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
