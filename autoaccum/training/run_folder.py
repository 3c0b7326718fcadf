"""The folder of a run: its lock, its weights, `metrics.jsonl` and TensorBoard's files."""

from __future__ import annotations

import errno
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
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.training.checkpoints import Checkpoints, portable, write_file
from autoaccum.training.fit_events import Evaluated, Notice, Updated

_OTHER_FOLDER = "use another folder"
_LOCK = "autoaccum.lock"
_CEILING = "ceiling.json"
_RUN_FILES = ("metrics.jsonl", "plan.json", "model.pt", "tensorboard", "ema.pt")
_TENSORBOARD_FIELDS = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries")


class RunFolder:
    """A run's folder, locked: no other process can open it until this one closes it or ends, in whatever way.

    Args:
        path: The folder; created if missing.
        keep: The number of checkpoints to keep.
        reads_only: Whether this process only reads, as those of several ranks do except for rank 0.

    Attributes:
        path: The absolute path, which stays valid when the process changes its working directory.
        checkpoints: The checkpoints in the folder.

    Raises:
        UsageError: The folder cannot be created or written to, another process has it open, or it holds files named
            like a run's but no checkpoint. Those belong to someone else, and nothing is touched.
    """

    def __init__(self, path: str | Path, *, keep: int = 3, reads_only: bool = False) -> None:
        self.path = Path(path).absolute()
        folder = self.path / "checkpoints"
        self._lock: int | None = None
        self.checkpoints = Checkpoints(folder, keep)
        if reads_only:
            return
        try:
            others = [name for name in _RUN_FILES if os.path.lexists(self.path / name)]
            if others and not any(folder.glob("checkpoint-*.pt")):  # A run writes a checkpoint before anything else.
                raise UsageError(
                    f"{self.path} holds {', '.join(others)} and no checkpoint: training would overwrite them",
                    hint="use another folder, or move these files",
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path / _LOCK)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{self.path} is not a folder, or lies below a file", hint=_OTHER_FOLDER) from None
        except (OSError, ValueError) as error:  # A null byte in the name is a ValueError.
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{self.path} cannot be written to ({reason})", hint=_OTHER_FOLDER) from None
        self.checkpoints.clear()

    def write_weights(self, weights: Mapping[str, Any], name: str = "model.pt") -> Path:
        """Write weights, a plain `state_dict`, whole or not at all, and return the path.

        Raises:
            NotPortableError: A module's extra state could be loaded only by running code; the message names it.
            CheckpointError: The file cannot be written.
        """
        path = self.path / name
        write_file(path, portable(dict(weights), str(path)))
        return path

    def write_ceiling(self, micro_batch: int) -> None:
        """Note that micro-batches of more samples ran out of memory and ended the run, for the next start."""
        with suppress(OSError):
            (self.path / _CEILING).write_text(json.dumps({"micro_batch": micro_batch}), encoding="utf-8")

    def read_ceiling(self) -> int | None:
        """Return the largest micro-batch that an earlier run left to try; None if none did."""
        try:
            return int(json.loads((self.path / _CEILING).read_text(encoding="utf-8"))["micro_batch"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class MetricsLog:
    """Writes a line for each update and each evaluation, starting after the update that a run resumes from.

    A line that cannot be written, as on a full disk, is lost and training continues; later lines follow once there is
    space again.

    Args:
        update: Lines of later updates are removed, since those updates are made again.
        evaluated_at: The update of the last evaluation; later ones are made again too.
        notify: Called once, with a notice, when a line cannot be written.
    """

    def __init__(self, folder: Path, update: int, evaluated_at: int, notify: Callable[[Any], Any]) -> None:
        self._path, self._notify = folder / "metrics.jsonl", notify
        self._file: io.FileIO | None = None
        try:
            self._file = io.FileIO(self._path, "a+")
            self._file.seek(0)
            self._file.truncate(_valid_bytes(self._file.read(), update, min(update, evaluated_at)))
        except OSError as error:
            self._fail(error)
        self._board = _open_board(folder / "tensorboard", update)

    def on_event(self, event: Any) -> None:
        """Log an update or an evaluation."""
        if isinstance(event, Updated):
            optional = ("terms", "savers")
            values = {name: value for name, value in vars(event).items() if value is not None or name not in optional}
            scalars = {f"train/{name}": values[name] for name in _TENSORBOARD_FIELDS}
            scalars |= {f"terms/{name}": value for name, value in (event.terms or {}).items()}
        elif isinstance(event, Evaluated):
            values = {"update": event.update, "evaluation": event.values, "samples": event.samples}
            scalars = {f"evaluation/{name}": value for name, value in event.values.items()}
        else:
            return
        if self._add(values) and self._board is not None:  # Not on a full disk, which `_add` has noticed.
            with suppress(OSError):
                for name, value in scalars.items():
                    if value is not None:
                        self._board.add_scalar(name, value, event.update)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        for log in (self._file, self._board):
            with suppress(OSError):
                if log is not None:
                    log.close()

    def _add(self, values: Mapping[str, Any]) -> bool:
        """Append a whole line, or nothing if there is no space for it. Numbers that are not finite become null."""
        if self._file is None:
            return False
        end = self._file.seek(0, io.SEEK_END)
        line = json.dumps(_finite(values), allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        self._notify(Notice(f"{self._path} cannot be written ({error.strerror}): some lines are missing"))


def _lock(path: Path) -> int:
    """Lock a file until this process ends; forked workers do not hold the lock.

    The file stays in the folder, since another process may be about to lock it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise UsageError(f"{path.parent} is in use by {holder}", hint="wait for it, or use another folder") from None
    except OSError:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return handle


def _open_board(folder: Path, update: int) -> Any:
    """Return a writer whose values follow those of `update`; None if TensorBoard is missing or broken."""
    if importlib.util.find_spec("tensorboard") is not None:
        with suppress(Exception):
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(folder), purge_step=update + 1 if update else None)
    return None


def _valid_bytes(content: bytes, update: int, evaluated_at: int) -> int:
    valid = end = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        try:
            values = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("update"), int):
            if values["update"] > (evaluated_at if "evaluation" in values else update):
                break
            valid = end
    return valid


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
