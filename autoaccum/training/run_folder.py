"""The folder of a run: its checkpoints, logs and weights, and one process at a time that writes them."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torch import nn

from autoaccum.accumulation.planned import unwrapped
from autoaccum.errors import UsageError
from autoaccum.training.checkpoints import Checkpoints, portable, write_file

_ANOTHER = "give another folder"
_LOCK = "autoaccum.lock"
_WRITTEN = ("metrics.jsonl", "plan.json", "model.pt", "tensorboard", "ema.pt")


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
        write_file(path, portable(dict(unwrapped(model).state_dict()), str(path)))
        return path

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            if not self.checkpoints.paths():  # Nothing began: what was refused leaves nothing behind.
                (self.path / _LOCK).unlink(missing_ok=True)
                with suppress(OSError):
                    for made in self._made:
                        made.rmdir()
            os.close(self._lock)
            self._lock = None


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
