"""Records on disk: never overwritten by accident, never half there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autoaccum.errors import PlanFileError, UsageError

_ON_STDOUT = "for the plan on stdout, use --json"


def check_output(path: str | Path, *, force: bool = False, way_out: str = _ON_STDOUT) -> None:
    """See now whether a file could be written later, after the trials; leaves nothing behind.

    Args:
        path: The file.
        force: Whether one that is there may be overwritten.
        way_out: What to do where `path` names no plain file.

    Raises:
        UsageError: There is a file and `force` is not given, `path` is not one for a plain file, or its folder is
            missing or cannot be written to.
    """
    if path in ("", "-"):
        raise UsageError(f"{path!r} is not the name of a file", hint=way_out)
    with _writing(Path(path)):
        _create(_target(Path(path), force, way_out)).unlink()


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write a new file of UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: Path, content: bytes, *, force: bool) -> None:
    """Write a new file, whole or not at all: to a file beside it, synced to disk, then given its name.

    Raises:
        UsageError: As in `check_output`.
    """
    with _writing(path):
        target = _target(path, force)
        temporary = _create(target)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _target(path, force)  # One may have come meanwhile.
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """The text of a plan file.

    Raises:
        PlanFileError: It is not there, cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanFileError(f"there is no file {path}", hint="make one with `autoaccum plan ... -o FILE`") from None
    except UnicodeDecodeError:
        raise PlanFileError(f"{path} is not a plan: it is not text", hint="give a file of `plan -o FILE`") from None
    except (OSError, ValueError) as error:  # A null byte in its name.
        raise PlanFileError(f"{str(path)!r} cannot be read ({error})", hint="give a plan file") from None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Within, what keeps a file from being written is a `UsageError`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be written ({reason})", hint="choose another place") from None


def _target(path: Path, force: bool, way_out: str = _ON_STDOUT) -> Path:
    """The file itself, behind any symbolic links, once it may be written."""
    mode = None
    # Before it is resolved: what /dev/stdout leads to has no name when it is a pipe.
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    target = path.resolve()
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder", hint="give the name of a file in it")
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a plain file", hint=way_out)
    if mode is not None and not force:
        raise UsageError(f"{path} is already there", hint="add --force to overwrite it, or choose another name")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent} for {target.name}", hint="create it first")
    return target


def _create(target: Path) -> Path:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.touch(exist_ok=False)
    return temporary
