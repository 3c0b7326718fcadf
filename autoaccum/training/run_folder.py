"""The folder of a run: its lock, its weights, and its logs."""

from __future__ import annotations

import fcntl
import importlib.util
import io
import json
import math
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from autoaccum.accumulation.plan_check import unwrap_model
from autoaccum.errors import UsageError
from autoaccum.training.checkpoints import Checkpoints, portable, write_file
from autoaccum.training.fit_events import Evaluated, Notice, Updated

_ANOTHER = "give another folder"
_LOCK = "autoaccum.lock"
_WRITTEN = ("metrics.jsonl", "plan.json", "model.pt", "tensorboard", "ema.pt")
_SHOWN = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries")


class RunFolder:
    """A folder that is open: no other process can open it until this one closes it or ends, however it ends.

    Args:
        path: The folder; it is made where it is missing.
        keep: How many checkpoints are kept.

    Attributes:
        path: The folder; absolute, so that it stays where it is whatever the process changes its own to.
        checkpoints: Those in it.

    Raises:
        UsageError: It cannot be made or written to, another process has it open, or it holds files of the names of
            ours and no checkpoint: they are someone else's, and nothing is touched.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        self.path = Path(path).absolute()
        folder = self.path / "checkpoints"
        try:
            others = [name for name in _WRITTEN if os.path.lexists(self.path / name)]
            if others and not any(folder.glob("checkpoint-*.pt")):  # A run writes a checkpoint first of all.
                raise UsageError(
                    f"{self.path} holds {', '.join(others)} and no checkpoint of a run: training would write over them",
                    hint="give another folder, or move them away",
                )
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _lock(self.path / _LOCK)
            folder.mkdir(exist_ok=True)  # A process that was refused may have removed it before it left the lock.
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{self.path} is no folder, or lies below a file", hint=_ANOTHER) from None
        except (OSError, ValueError) as error:  # A null byte in the name is a ValueError.
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{self.path} cannot be written to ({reason})", hint=_ANOTHER) from None
        self.checkpoints = Checkpoints(folder, keep)

    @property
    def plan_path(self) -> Path:
        """The plan it is trained by."""
        return self.path / "plan.json"

    def write_weights(self, model: nn.Module, name: str = "model.pt") -> Path:
        """Write the weights as a plain `state_dict`, whole or not at all; gives where.

        Raises:
            NotPortableError: A module's own extra state could be loaded only by running code; says where.
            CheckpointError: It cannot be written.
        """
        path = self.path / name
        write_file(path, portable(dict(unwrap_model(model).state_dict()), str(path)))
        return path

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            if not self.checkpoints.paths():  # Nothing began: what was refused leaves nothing behind.
                with suppress(OSError):
                    for made in self._made[:1]:  # `checkpoints`, while the lock is held: who locks next makes it again.
                        made.rmdir()
                    (self.path / _LOCK).unlink(missing_ok=True)
                    for made in self._made[1:]:
                        made.rmdir()
            os.close(self._lock)
            self._lock = None


class MetricsLog:
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

    def __enter__(self) -> MetricsLog:
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
            self._tell(Notice(f"{self._path} cannot be written ({reason}): lines of it are missing"))


def _lock(path: Path) -> int:
    """A lock that the system takes away when this process ends; workers that it forks do not hold it.

    The file stays with a run, since another process may be about to lock it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise UsageError(
            f"{path.parent} is in use by {holder}", hint="wait until it ends, or give another folder"
        ) from None
    except OSError:
        os.close(handle)
        raise
    if os.fstat(handle).st_nlink == 0:  # A process that was refused has just removed it.
        os.close(handle)
        return _lock(path)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return handle


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
