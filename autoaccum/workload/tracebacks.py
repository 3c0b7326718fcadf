"""Whose fault an exception is: the user's own frames, without those of autoaccum, torch and Python."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from autoaccum.errors import AutoaccumError, WorkloadError

_OWN = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")
"""What torch.utils.data raises again for a worker: its traceback as text (torch/_utils.py, `ExceptionWrapper`)."""
_PYTHON = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}


def format_user_traceback(error: BaseException) -> str:
    """The traceback of `error` as Python prints it, with the user's frames and those of their libraries only.

    Where no frame is theirs (a model put together from torch's modules only), torch's own say which module it was.
    """
    report = _pruned(traceback.TracebackException.from_exception(error), is_user_file)
    if not report.stack:
        report = _pruned(traceback.TracebackException.from_exception(error), lambda file: not is_autoaccum_file(file))
    return "".join(report.format()).rstrip()


def user_line(error: BaseException, *, library: bool = False) -> str | None:
    """Where in the user's own code `error` came out: model.py:31 (`x = x[mask]`); None where no frame is theirs.

    With `library`, a library's line where that is the last, and whom it ran for.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    if not frames:
        return None
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    mine, last = (_shown(frame) for frame in ((own or frames)[-1], frames[-1]))
    if not library or mine == last:
        return mine
    return f"{last}, for {mine}"


def _shown(frame: traceback.FrameSummary) -> str:
    return f"{name_line(frame.filename, frame.lineno or 0)[0]} (`{frame.line}`)"


def name_line(filename: str, number: int) -> tuple[str, bool]:
    """A line as it is named, a library's by its path within that; and whether it is the user's own."""
    _, library, path = filename.rpartition("site-packages/")
    return f"{path if library else Path(filename).name}:{number}", is_user_file(filename) and not library


def raised_by_autoaccum(error: BaseException) -> bool:
    """Whether it was raised by a line of autoaccum, or within Python's own library by one."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((is_autoaccum_file(frame.filename) for frame in frames if not _is_python(frame.filename)), False)


def blame_workload(error: BaseException, doing: str, *, hint: str | None = None) -> WorkloadError:
    """The error that shows an exception of the user's own code as theirs.

    Args:
        error: What the user's code raised.
        doing: What was going on, as the start of a sentence: `batch(5)`, `importing model.py`.
        hint: The way out, where one is known.
    """
    if _IN_WORKER.match(str(error)):
        shown = str(error).rstrip()
        what = f"raised {shown.splitlines()[-1]} (in a worker that reads data)"
        return WorkloadError(f"{doing} {what}", hint=hint, user_traceback=shown)
    return WorkloadError(f"{doing} {_what(error)}", hint=hint, user_traceback=format_user_traceback(error))


@contextmanager
def user_code(doing: str, *, hint: str | None = None) -> Iterator[None]:
    """Show what the user's code raises as theirs; running out of memory comes through as it is."""
    try:
        with blame_exit(doing):
            yield
    except (AutoaccumError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise blame_workload(error, doing, hint=hint) from error


@contextmanager
def blame_exit(doing: str) -> Iterator[None]:
    """Show a `sys.exit()` of the user's as theirs; autoaccum's own, by which a signal ends it, comes through."""
    try:
        yield
    except SystemExit as error:
        if raised_by_autoaccum(error):
            raise
        raise blame_workload(error, doing) from error


def _what(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    text = str(error).strip().splitlines()
    return f"raised {type(error).__name__}: {text[0]}" if text else f"raised {type(error).__name__}"


def _pruned(
    report: traceback.TracebackException, keeps: Callable[[str], bool], depth: int = 0
) -> traceback.TracebackException:
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if keeps(frame.filename)])
    for chained in (report.__cause__, report.__context__):
        if chained is not None and depth < 10:
            _pruned(chained, keeps, depth + 1)
    return report


@cache
def is_autoaccum_file(filename: str) -> bool:
    """Whether it is one of autoaccum's."""
    return str(Path(filename).resolve()).startswith(_OWN + "/")


@cache
def is_user_file(filename: str) -> bool:
    """Whether it is the user's, or one of their libraries': not autoaccum's, torch's or Python's."""
    if filename.startswith("<frozen "):
        return False
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    if any(path.startswith(root + "/") for root in (_OWN, _TORCH)):
        return False
    return not _is_python(path)


def _is_python(filename: str) -> bool:
    if filename.startswith("<frozen "):
        return True
    return "site-packages" not in filename and any(root and filename.startswith(root + "/") for root in _PYTHON)
