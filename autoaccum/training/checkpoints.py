"""The folder of a run, which one process at a time writes to, and its checkpoints: whole, or not there."""

from __future__ import annotations

import errno
import os
import re
import time
import warnings
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
from autoaccum.training.fit_events import CheckpointFailed, CheckpointWritten, Notice
from autoaccum.training.training_state import Progress

FORMAT = "autoaccum checkpoint"
VERSION = 3
_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class NotPortableError(CheckpointError):
    """Something in a training keeps its state as an object that only code can load."""

    exit_code = 2


class DamagedFileError(CheckpointError):
    """A file does not hold what was written to it."""


def portable(content: Any, what: str = "a checkpoint") -> Any:
    """The same nest with its tensors on the CPU and NumPy's numbers as Python's: what anybody loads without code.

    Tensors that are on the CPU already are not copied; one that occurs twice still does.

    Raises:
        NotPortableError: Something in it could be loaded only by running code; says where.
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
                hint="keep tensors, numbers and strings there, and lists and dicts of them",
            )
        return node

    return walk(content, "")


def write_file(path: Path, content: Any) -> None:
    """Write a nest that is portable by `torch.save`, sync it, read it back, and only then give it its name.

    Until then nothing is changed: an earlier file of that name stays, and the temporary one beside it is removed.

    Raises:
        CheckpointError: It cannot be written, or does not read back.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        read_file(temporary, mapped=True)
        temporary.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:
        # torch's writer raises an error of its own after that of the file.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else first_line(error)
        raise CheckpointError(
            f"{path} cannot be written ({reason})", hint="make room, and see that its folder can be written to"
        ) from None
    except DamagedFileError as error:
        raise CheckpointError(f"{path} does not read back as it was written", hint="check the disk") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_file(path: Path, *, mapped: bool = False) -> Any:
    """What `write_file` wrote, its tensors in host memory; checksums are compared, and nothing in it is run.

    Raises:
        DamagedFileError: It does not hold what was written.
        CheckpointError: It cannot be read now.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            spoilt = archive.testzip()
        if spoilt is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # What torch suspects of a file, the checksums know.
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, MemoryError) as error:
        if getattr(error, "errno", errno.EINVAL) not in (None, errno.EINVAL) or isinstance(error, MemoryError):
            reason = error.strerror if isinstance(error, OSError) else "there is too little memory"
            raise CheckpointError(f"{path} cannot be read ({reason})", hint="see that it can") from None
        spoilt = "its end"
    except Exception:  # zipfile and torch raise errors of many kinds.
        spoilt = "its list of parts"
    raise DamagedFileError(f"{path} is damaged ({spoilt} is not as it was written)")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The record in a checkpoint.

    Raises:
        DamagedFileError: The file does not hold what was written.
        CheckpointError: It is of another format, or cannot be read now.
    """
    content = read_file(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFileError(f"{path} is damaged (it is no checkpoint of autoaccum)")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format {content.get('version')}, this autoaccum reads format {VERSION}",
            hint="resume with the version that wrote it, or train anew in another folder",
        )
    record: dict[str, Any] = content["record"]
    return record


class Checkpoints:
    """The checkpoints in a folder that no other process writes to.

    Args:
        folder: Where they are; what a process that was killed had begun to write is removed from it.
        keep: How many are kept.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self._keep = folder, keep
        for path in folder.glob(".checkpoint-*.pt.tmp"):
            path.unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Of every checkpoint, whole or not, the newest first."""
        found = {path: match for path in self.folder.glob("checkpoint-*.pt") if (match := _NAME.fullmatch(path.name))}
        return sorted((path for path in found if path.is_file()), key=lambda path: int(found[path][1]), reverse=True)

    def write(self, update: int, record: Mapping[str, Any]) -> Path:
        """Write the checkpoint after `update`; then the oldest go, beyond those that are kept.

        Raises:
            NotPortableError: Something in `record` could be loaded only by running code.
            CheckpointError: It cannot be written; those that are there stay.
        """
        path = self.folder / f"checkpoint-{update:08}.pt"
        write_file(path, {"format": FORMAT, "version": VERSION, "record": portable(dict(record))})
        paths = self.paths()
        for earlier in paths[paths.index(path) + self._keep :]:
            with suppress(OSError):  # It is tried again the next time.
                earlier.unlink()
        return path

    def newest(self, tell: Callable[[Any], Any]) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its record; None where there is no checkpoint.

        Newer ones that are damaged are told.

        Raises:
            CheckpointError: All there are are damaged; or one is of another format, or cannot be read now.
        """
        damaged: list[str] = []
        for path in self.paths():
            try:
                record = read_checkpoint(path)
            except DamagedFileError as error:
                damaged.append(str(error))
                continue
            for reason in damaged:
                tell(Notice(f"{reason} and was passed over: training goes on from the one before"))
            return path, record
        if not damaged:
            return None
        raise CheckpointError(
            f"no checkpoint in {self.folder} is whole: {'; '.join(damaged)}",
            hint="copy one back, or train anew in another folder",
        )


class CheckpointWriter:
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
        store: Checkpoints | None,
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
        self.newest, self._kept_at = path, self._place()

    def keep_first(self) -> None:
        """Before any update.

        Raises:
            CheckpointError: It could not be written, or something of the state could be loaded only by running code.
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

    def _write(self, store: Checkpoints) -> None:
        began, update = time.perf_counter(), self._progress.update
        self.newest = store.write(update, self._compose())
        self._kept_at = self._place()
        self._tell(CheckpointWritten(update, self.newest, time.perf_counter() - began))

    def _place(self) -> tuple[int, int, int]:
        return self._progress.update, self._progress.epoch, self._progress.evaluated_at


def _own_values(tensor: Tensor) -> Tensor:
    """On the CPU, of a storage that holds nothing else."""
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    is_part = values.layout is torch.strided and values.untyped_storage().nbytes() != values.nbytes
    return values.clone(memory_format=torch.contiguous_format) if is_part else values


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _sync_folder(folder: Path) -> None:
    """Make names given in `folder` last, on file systems that can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
