"""Checkpoint files: values that load without running code, written whole or not at all, and when they are due."""

from __future__ import annotations

import errno
import os
import re
import time
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
from autoaccum.training.fit_events import CheckpointWritten, Notice
from autoaccum.training.stopping import TrainingRanks
from autoaccum.training.training_state import Progress

FORMAT = "autoaccum checkpoint"
VERSION = 4
_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class NotPortableError(CheckpointError):
    """A state holds an object that could be loaded only by running code."""

    exit_code = 2


class DamagedFileError(CheckpointError):
    """A file does not hold what was written to it."""


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
        if type(node) in (*_MAPPINGS, defaultdict):
            items = {walk(key, f"a key of {path}"): walk(value, _below(path, key)) for key, value in node.items()}
            return type(node)(items) if type(node) in _MAPPINGS else items
        if type(node) in (list, tuple, set):
            return type(node)([walk(entry, _below(path, index)) for index, entry in enumerate(node)])
        if isinstance(node, np.generic):
            return walk(node.item(), path)
        if type(node) not in _PLAIN or node == b"":  # Empty bytes are pickled as a call.
            raise NotPortableError(
                f"{what} cannot hold {path}: it is {describe_type(node)}, which would not load without running code",
                hint="use tensors, numbers and strings there, and lists and dicts of them",
            )
        return node

    return walk(content, "")


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
        _sync_folder(path.parent)
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the record in a checkpoint: tensors in host memory, checksums compared, no code run.

    Raises:
        DamagedFileError: The file does not hold what was written.
        CheckpointError: It has another format, or cannot be read now.
    """
    content = None
    try:
        with zipfile.ZipFile(path) as archive:
            is_whole = archive.testzip() is None
        if is_whole:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError) as error:
        if isinstance(error, MemoryError) or error.errno not in (None, errno.EINVAL):
            raise CheckpointError(f"{path} cannot be read ({error})", hint="check its permissions") from None
    except Exception:  # zipfile and torch raise errors of many kinds for a damaged file.
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFileError(f"{path} is damaged")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format {content.get('version')}, this autoaccum reads format {VERSION}",
            hint="resume with the version that wrote it, or start a new run in another folder",
        )
    record: dict[str, Any] = content["record"]
    return record


class Checkpoints:
    """The newest `keep` checkpoints in a folder that no other process writes to."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep

    def clear(self) -> None:
        """Remove unfinished files."""
        for path in self.folder.glob(".checkpoint-*.pt.tmp"):
            path.unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Return the paths of all checkpoints, damaged ones too, newest first."""
        found = {path: match for path in self.folder.glob("checkpoint-*.pt") if (match := _NAME.fullmatch(path.name))}
        return sorted((path for path in found if path.is_file()), key=lambda path: int(found[path][1]), reverse=True)

    def write(self, update: int, record: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `update`, then remove the oldest ones beyond those to keep.

        Raises:
            NotPortableError: `record` holds an object that could be loaded only by running code.
            CheckpointError: The file cannot be written; earlier checkpoints stay.
        """
        path = self.folder / f"checkpoint-{update:08}.pt"
        write_file(path, {"format": FORMAT, "version": VERSION, "record": portable(dict(record))})
        paths = self.paths()
        for earlier in paths[paths.index(path) + self._keep :]:
            with suppress(OSError):  # Tried again the next time.
                earlier.unlink()
        return path

    def newest(self, notify: Callable[[Any], Any]) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest undamaged checkpoint and its record, or None if there is no checkpoint.

        A notice is sent for each newer one that is damaged.

        Raises:
            CheckpointError: All of them are damaged, or one has another format or cannot be read now.
        """
        paths = self.paths()
        for path in paths:
            try:
                return path, read_checkpoint(path)
            except DamagedFileError as error:
                notify(Notice(f"{error} and was skipped: training resumes from the one before"))
        if not paths:
            return None
        raise CheckpointError(
            f"all checkpoints in {self.folder} are damaged",
            hint="restore one from a backup, or start a new run in another folder",
        )


class CheckpointWriter:
    """Writes a checkpoint before the first update, after every `every` updates, and at the end.

    The first one must succeed: a folder or a state that cannot be written is better known before hours of training. A
    later failure is reported, earlier checkpoints stay, and training continues. All ranks call its methods, rank 0
    writes, and all know how that went.

    Args:
        store: The checkpoints to add to; None writes nothing.
        every: Updates between two checkpoints.
        make_record: Builds the content of a checkpoint.
        notify: Called with `CheckpointWritten`, or a warning.
        ranks: The ranks.

    Attributes:
        newest: The newest undamaged checkpoint.
        failure: The reason why the last attempt failed; None if it succeeded.
    """

    def __init__(
        self,
        store: Checkpoints | None,
        every: int,
        progress: Progress,
        make_record: Callable[[], dict[str, Any]],
        notify: Callable[[Any], Any],
        ranks: TrainingRanks,
    ) -> None:
        self.newest: Path | None = None
        self.failure: str | None = None
        self._store, self._every, self._progress, self._ranks = store, every, progress, ranks
        self._make_record, self._notify = make_record, notify
        self._written_at: tuple[int, int, int] | None = None

    def resume_from(self, path: Path) -> None:
        """Note that training resumes from this checkpoint, so that it is not written again."""
        self.newest, self._written_at = path, self._position()

    def write_first(self) -> None:
        """Write the checkpoint before the first update.

        Raises:
            CheckpointError: It cannot be written, or the state could be loaded only by running code.
        """
        if self._store is not None and self._written_at is None:
            self._write(self._store)

    def write_if_due(self) -> None:
        """Write one after an update, if this update is a multiple of `every`."""
        if self._progress.update % self._every == 0:
            self.write()

    def write(self) -> None:
        """Write one now, unless nothing has changed since the last."""
        if self._store is None or self._written_at == self._position():
            return
        try:
            self._write(self._store)
            self.failure = None
        except (CheckpointError, UsageError) as error:
            self.failure = str(error)
            self._notify(Notice(f"no checkpoint was written after update {self._progress.update}: {error}"))

    def _write(self, store: Checkpoints) -> None:
        began, update, record = time.perf_counter(), self._progress.update, self._make_record()
        written = self._ranks.by_first(lambda: store.write(update, record))
        if written is not None:
            self.newest, self._written_at = written, self._position()
            self._notify(CheckpointWritten(update, written, time.perf_counter() - began))

    def _position(self) -> tuple[int, int, int]:
        return self._progress.update, self._progress.epoch, self._progress.evaluated_at


def _own_values(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, in a storage of its own."""
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    is_part = values.layout is torch.strided and values.untyped_storage().nbytes() != values.nbytes
    return values.clone(memory_format=torch.contiguous_format) if is_part else values


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, on file systems that support it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
