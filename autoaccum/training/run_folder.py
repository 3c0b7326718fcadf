"""The folder of a run: its lock, its checkpoints, its weights, `metrics.jsonl` and TensorBoard's files.

Every file is written whole or not at all, and loads without running code.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import math
import os
import re
import socket
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.checks import describe_type
from autoaccum.errors import CheckpointError, UsageError, first_line
from autoaccum.messages import message
from autoaccum.training.fit_events import Evaluated, Notice, Updated
from autoaccum.training.stopping import TrainingRanks

FORMAT = "autoaccum checkpoint"
VERSION = 5
_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")
_OTHER_FOLDER = "use another folder"
_LOCK, _CEILING = "run.lock", "ceiling.json"
_RUN_FILES = ("metrics.jsonl", "plan.json", "model.pt", "tensorboard", "ema.pt")
_TENSORBOARD_FIELDS = ("loss", "grad_norm", "learning_rate", "samples_per_second", "peak_bytes", "retries")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class NotPortableError(CheckpointError):
    """A state holds an object that could be loaded only by running code."""

    exit_code = 2


class RunFolder:
    """A run's folder, locked: no other process can open it until this one closes it or ends, in whatever way.

    A folder in which no checkpoint was written is left as it was found. Of several ranks, all call the same methods,
    rank 0 looks and writes, and all return or raise what it does.

    Args:
        path: The folder; created if missing.
        max_checkpoints: How many checkpoints to keep; older ones are removed.
        ranks: The ranks of the training.

    Attributes:
        path: The absolute path, which stays valid when the process changes its working directory.

    Raises:
        UsageError: The folder cannot be created or written to, another process has it open, or it holds files named
            like a run's but no checkpoint. Those belong to someone else, and nothing is touched.
    """

    def __init__(self, path: str | Path, *, max_checkpoints: int = 3, ranks: TrainingRanks | None = None) -> None:
        self.path, self._ranks = Path(path).absolute(), ranks or TrainingRanks()
        self._folder, self._max_checkpoints = self.path / "checkpoints", max_checkpoints
        self._lock: int | None = None
        if not self._ranks.is_first:
            return
        try:
            # A run writes a checkpoint before anything else.
            others = [name for name in _RUN_FILES if os.path.lexists(self.path / name)]
            if others and not self.checkpoints():
                raise UsageError(
                    f"{self.path} holds {', '.join(others)} and no checkpoint: training would overwrite them",
                    hint="use another folder, or move these files",
                )
            self._new_folders = [path for path in (self._folder, self.path, *self.path.parents) if not path.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path / _LOCK)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{self.path} is not a folder, or lies below a file", hint=_OTHER_FOLDER) from None
        except (OSError, ValueError) as error:  # A null byte in the name is a ValueError.
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{self.path} cannot be written to ({reason})", hint=_OTHER_FOLDER) from None
        for unfinished in self._folder.glob(".checkpoint-*.pt.tmp"):
            unfinished.unlink(missing_ok=True)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is None:
            return
        if not self.checkpoints():
            with suppress(OSError):
                (self.path / _LOCK).unlink()
                for path in self._new_folders:
                    path.rmdir()
        os.close(self._lock)
        self._lock = None

    def checkpoints(self) -> list[Path]:
        """Return the paths of all checkpoints, newest first."""
        paths = [path for path in self._folder.glob("checkpoint-*.pt") if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2]), reverse=True)

    def find_checkpoint(self, resume: str) -> Path | None:
        """Return the checkpoint to resume from, subject to `resume`; None for a new run.

        Raises:
            UsageError: The folder holds a run that must not be resumed, or none although one is required.
        """
        newest = self._ranks.by_first(lambda: next(iter(self.checkpoints()), None))
        if resume == "never" and newest is not None:
            raise UsageError(f"{self.path} already holds a run, and resume is never", hint="use another folder")
        if resume == "must" and newest is None:
            raise UsageError(f"{self.path} holds no checkpoint to resume", hint="start the run without --resume must")
        return newest

    def write_checkpoint(self, update: int, record: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `update`, then remove the oldest ones beyond those to keep.

        Raises:
            NotPortableError: `record` holds an object that could be loaded only by running code.
            CheckpointError: The file cannot be written; earlier checkpoints stay.
        """
        path = self._folder / f"checkpoint-{update:08}.pt"

        def write() -> None:
            write_file(path, {"format": FORMAT, "version": VERSION, "record": portable(dict(record))})
            paths = self.checkpoints()
            for earlier in paths[paths.index(path) + self._max_checkpoints :]:
                with suppress(OSError):  # Tried again the next time.
                    earlier.unlink()

        self._ranks.by_first(write)
        return path

    def write_weights(self, weights: Mapping[str, Any], name: str = "model.pt") -> Path:
        """Write weights, a plain `state_dict`, and return the path; raise as `write_checkpoint`."""
        path = self.path / name
        self._ranks.by_first(lambda: write_file(path, portable(dict(weights), str(path))))
        return path

    def write_ceiling(self, limit: int, unit: str = "micro_batch") -> None:
        """Note that micro-batches of more samples, or tokens, ran out of memory and ended the run."""
        if self._ranks.is_first:  # The others may be gone.
            with suppress(OSError):
                (self.path / _CEILING).write_text(json.dumps({unit: limit}), encoding="utf-8")

    def read_ceiling(self, unit: str = "micro_batch") -> int | None:
        """Return the largest micro-batch, or `micro_tokens`, that an earlier run left to try; None if none did."""

        def read() -> int | None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return int(json.loads((self.path / _CEILING).read_text(encoding="utf-8"))[unit])
            return None

        return self._ranks.by_first(read)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the record in a checkpoint: tensors in host memory, checksums compared, no code run.

    Raises:
        CheckpointError: The file does not hold what was written, cannot be read, or has another format.
    """
    content = None
    # zipfile and torch raise errors of many kinds for a damaged file.
    with suppress(Exception), zipfile.ZipFile(path) as archive:
        if archive.testzip() is None:
            content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is damaged or cannot be read",
            hint="remove it: the same command then resumes from the one before, or starts anew",
        )
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format {content.get('version')}, this autoaccum reads format {VERSION}",
            hint="resume with the version that wrote it, or start a new run in another folder",
        )
    record: dict[str, Any] = content["record"]
    return record


def portable(content: Any, what: str = "a checkpoint") -> Any:
    """Copy a nested structure so that it loads without code: tensors on the CPU, NumPy scalars as Python numbers.

    Tensors on the CPU are not copied, unless they are a part of a larger one. A tensor that occurs twice stays shared.

    Raises:
        NotPortableError: An entry could be loaded only by running code; the message names it.
    """
    tensors: dict[int, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if type(node) in _TENSORS and not (node.is_meta or node.is_quantized or node.is_nested):
            return tensors.setdefault(id(node), _own_values(node))
        below = f"{path}." if path else ""
        if type(node) in (*_MAPPINGS, defaultdict):
            items = {walk(key, f"a key of {path}"): walk(value, f"{below}{key}") for key, value in node.items()}
            return type(node)(items) if type(node) in _MAPPINGS else items
        if type(node) in (list, tuple, set):
            return type(node)([walk(entry, f"{below}{index}") for index, entry in enumerate(node)])
        if isinstance(node, np.generic):
            return walk(node.item(), path)
        if type(node) not in _PLAIN or node == b"":  # Empty bytes are pickled as a call.
            raise NotPortableError(
                f"{what} cannot hold {path}: it is {describe_type(node)}, which would not load without running code",
                hint="use tensors, numbers and strings there, and lists and dicts of them",
            )
        return node

    return walk(content, "")


def _own_values(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, in a storage of its own."""
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    is_part = values.layout is torch.strided and values.untyped_storage().nbytes() != values.nbytes
    return values.clone(memory_format=torch.contiguous_format) if is_part else values


def write_file(path: Path, content: Any) -> None:
    """Write a portable structure with `torch.save`, sync it, and then rename it to `path`.

    An earlier file of that name stays until the rename, and the temporary file is removed on any error.

    Raises:
        CheckpointError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # Not every file system syncs its folders.
            os.fsync(folder)
        os.close(folder)
    except (OSError, RuntimeError, MemoryError) as error:
        # torch's writer raises its own error after the file's.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else first_line(error)
        raise CheckpointError(
            f"{path} cannot be written ({reason})", hint="free disk space, and check the folder's permissions"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """Lock a file until this process ends; forked workers do not hold the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or os.fstat(handle).st_ino != path.stat().st_ino:  # Whoever held it has just removed it.
            raise BlockingIOError
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


class MetricsLog:
    """Writes a line for each update and each evaluation, starting after the update that a run resumes from.

    A line that cannot be written, as on a full disk, is lost and training continues; later lines follow once there is
    space again.

    Args:
        update: Lines of later updates are removed, since those updates are made again.
        evaluated_at: The update of the last evaluation; later ones are made again too.
        notify: Called with a notice when a line cannot be written.
    """

    def __init__(self, folder: Path, update: int, evaluated_at: int, notify: Callable[[Any], Any]) -> None:
        self._path, self._notify = folder / "metrics.jsonl", notify
        try:
            with self._path.open("a+b", buffering=0) as file:
                file.seek(0)
                file.truncate(_valid_bytes(file.read(), update, min(update, evaluated_at)))
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
        try:
            self._append(json.dumps(_finite(values), allow_nan=False).encode() + b"\n")
        except OSError as error:
            self._fail(error)
        else:
            with suppress(OSError):
                for name, value in scalars.items():
                    if value is not None and self._board is not None:
                        self._board.add_scalar(name, value, event.update)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            if self._board is not None:
                self._board.close()

    def _append(self, line: bytes) -> None:
        """Append a whole line; raise OSError and append nothing if there is no space for it."""
        with self._path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fail(self, error: OSError) -> None:
        self._notify(Notice(message("metrics_not_written", path=str(self._path), error=error.strerror)))


def _open_board(folder: Path, update: int) -> Any:
    """Return a writer whose values follow those of `update`; None if TensorBoard is missing or broken."""
    if importlib.util.find_spec("tensorboard") is not None:
        with suppress(Exception):
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(folder), purge_step=update + 1 if update else None)
    return None


def _valid_bytes(content: bytes, update: int, evaluated_at: int) -> int:
    """Return the bytes of the lines up to an update; a torn line is none."""
    end = 0
    for line in content.splitlines(keepends=True):
        with suppress(ValueError, KeyError):
            values = json.loads(line)
            if line.endswith(b"\n") and values["update"] <= (evaluated_at if "evaluation" in values else update):
                end += len(line)
                continue
        break
    return end


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
