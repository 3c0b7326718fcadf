"""Write files whole or not at all, and never over an existing file unless `force` is given; read plan files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autoaccum.errors import PlanFileError, UsageError

_ON_STDOUT = "for the plan on stdout, use --json"


def check_output(path: str | Path, *, force: bool = False, hint: str = _ON_STDOUT) -> None:
    """Check, before any trial runs, that the file can be written; nothing is left behind.

    Args:
        path: The file.
        force: Overwrite an existing file.
        hint: What the user should do if `path` is not a regular file.

    Raises:
        UsageError: The file exists and `force` is not given, `path` is not a regular file, or its folder is missing
            or not writable.
    """
    if path in ("", "-"):
        raise UsageError(f"{path!r} is not the name of a file", hint=hint)
    with _writing(Path(path)):
        _create(_target(Path(path), force, hint)).unlink()


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write `text` as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file whole or not at all, by a temporary one that is synced and renamed; an existing one keeps its mode.

    Errors are those of `check_output`.
    """
    with _writing(path):
        target = _target(path, force)
        temporary = _create(target)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _target(path, force)  # It may exist by now.
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """Return the text of a plan file; raise PlanFileError if there is none, it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanFileError(f"there is no file {path}", hint="make one with `autoaccum plan ... -o FILE`") from None
    except UnicodeDecodeError:
        raise PlanFileError(
            f"{path} is not a plan, since it is not text", hint="give a file made by `plan -o FILE`"
        ) from None
    except (OSError, ValueError) as error:  # A null byte in its name.
        raise PlanFileError(f"{str(path)!r} cannot be read ({error})", hint="give a plan file") from None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what keeps a file from being written into a `UsageError`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be written ({reason})", hint="choose another path") from None


def _target(path: Path, force: bool, hint: str = _ON_STDOUT) -> Path:
    """Return the path to write, with symbolic links resolved, after checking that it may be written."""
    mode = None
    # Before resolving it: /dev/stdout may lead to a pipe, which has no path.
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    target = path.resolve()
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder", hint="give the name of a file in it")
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file", hint=hint)
    if mode is not None and not force:
        raise UsageError(f"{path} exists already", hint="add --force to overwrite it, or choose another name")
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent} for {target.name}", hint="create it first")
    return target


def _create(target: Path) -> Path:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.touch(exist_ok=False)
    return temporary
