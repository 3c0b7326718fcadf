"""The folder of a run: its checkpoints, logs and weights, and one process at a time that writes them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType

from torch import nn

from autoaccum.accumulation.planned import unwrapped
from autoaccum.errors import UsageError
from autoaccum.training.checkpoints.checkpoints import CheckpointStore, has_checkpoint
from autoaccum.training.checkpoints.contents import digest, portable
from autoaccum.training.checkpoints.verified_files import remove_leftovers, write_verified

_ANOTHER = "give another folder"
_LOCK = "autoaccum.lock"
_WRITTEN = ("metrics.jsonl", "plan.json", "model.pt", "tensorboard", "ema.pt")
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class RunFolder:
    """A folder that is open: no other process can open it until this one closes it or ends.

    Attributes:
        path: The folder; absolute, so that it stays where it is whatever the process changes its own to.
        checkpoints: Those in it.
        metrics_path: One line of JSON for each update.
        plan_path: The plan it is trained by.
        model_path: The weights in the end.
        ema_path: Their average, where one is kept.
        tensorboard_dir: For TensorBoard's files.
        note: A sentence where its file system (some NFS) has no locks, so that nothing keeps a second run away.
    """

    def __init__(self, path: Path, lock: _Lock, keep: int) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(path / "checkpoints", keep)
        self.metrics_path = path / _WRITTEN[0]
        self.plan_path = path / _WRITTEN[1]
        self.model_path = path / _WRITTEN[2]
        self.tensorboard_dir = path / _WRITTEN[3]
        self.ema_path = path / _WRITTEN[4]
        self.note = None if lock.holds else f"the file system of {path} has no locks: start no second run in it"
        self._lock = lock

    @classmethod
    def open(cls, path: str | Path, *, keep: int = 3) -> RunFolder:
        """Make the folder where it is missing, and lock it.

        Args:
            path: The folder.
            keep: How many checkpoints are kept.

        Raises:
            UsageError: It cannot be made or written to, another process has it open, or it holds files of the names
                of ours and no checkpoint: they are someone else's, and nothing is touched.
        """
        if not str(path):
            raise UsageError("the run folder has no name", hint='name one, such as "runs/first", or "." for this one')
        folder = Path(path).absolute()
        try:
            _refuse_others(folder)
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = _Lock(folder / _LOCK)
        except (OSError, ValueError) as error:  # A null byte in the name is a ValueError.
            raise _unusable(folder, error) from None
        try:
            if has_checkpoint(folder / "checkpoints"):
                remove_leftovers(folder)
            return cls(folder, lock, keep)
        except OSError as error:
            lock.release()
            raise _unusable(folder, error) from None
        except BaseException:
            lock.release()
            raise

    def write_model(self, model: nn.Module, path: Path | None = None) -> Path:
        """Write the weights as a plain `state_dict`, whole and read back, or not at all; gives where: `model_path`.

        Raises:
            NotPortableError: A module's own extra state could be loaded only by running code; says where.
            CheckpointError: It cannot be written.
        """
        path = path or self.model_path
        content = portable(dict(unwrapped(model).state_dict()), str(path))
        found = digest(content)
        write_verified(path, content, lambda read: digest(read) == found)
        return path

    def close(self) -> None:
        """Let others open it."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Lock:
    """A lock on a file, which the system takes away when this process ends, however it ends.

    Workers that are forked would hold it as long as they live, also when this process was killed: each lets go first.
    """

    def __init__(self, path: Path) -> None:
        self._handle: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.holds = False
        try:
            self.holds = self._take(path)
            if self.holds:
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise
        mine = weakref.WeakMethod(self._let_go)
        os.register_at_fork(after_in_child=lambda: (let_go := mine()) and let_go())

    def release(self) -> None:
        """Unlock; the file itself stays, since another process may be about to lock it."""
        if self._handle is not None and self.holds:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # Also where a worker was forked only now.
        self._let_go()

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _take(self, path: Path) -> bool:
        assert self._handle is not None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._handle, 200, 0).decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"{path.parent} is in use by {holder}", hint="wait until it ends, or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True


def _refuse_others(folder: Path) -> None:
    """A run of ours writes a checkpoint first of all: without one, files of these names are not of a run."""
    others = [name for name in _WRITTEN if os.path.lexists(folder / name)]
    if others and not has_checkpoint(folder / "checkpoints"):  # In this order: a run may be about to begin there.
        raise UsageError(
            f"{folder} holds {', '.join(others)} and no checkpoint of a run: training would write over what is there",
            hint="give another folder, or move them away",
        )


def _unusable(folder: Path, error: Exception) -> UsageError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UsageError(f"{folder} is no folder, or lies below a file", hint=_ANOTHER)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UsageError(f"{folder} cannot be written to ({reason})", hint=_ANOTHER)
