"""Show errors of the user's code as theirs: tracebacks without the frames of autoaccum, PyTorch and Python."""

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

_OWN = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_FILES = "/autoaccum/devices/command/script_files.py"
"""Stands for Python's own functions in the process of a command, and raises what they would."""
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")
"""The text of an error that PyTorch re-raises for a DataLoader worker (torch/_utils.py, `ExceptionWrapper`)."""
_PYTHON = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}


def format_user_traceback(error: BaseException) -> str:
    """Return the traceback of `error` with only the frames of the user and of the user's libraries.

    If there are none (a model built only from PyTorch's modules), PyTorch's frames are kept: they name the module.
    """
    report = _pruned(traceback.TracebackException.from_exception(error), is_user_file)
    if not report.stack:
        report = _pruned(traceback.TracebackException.from_exception(error), lambda file: not is_autoaccum_file(file))
    return "".join(report.format()).rstrip()


def user_line(error: BaseException) -> str | None:
    """Return the last line of the user's code in a traceback: model.py:31 (`x = x[mask]`); None if there is none.

    The last line of a library is named too, if the error was raised there.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    if not frames:
        return None
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    user, last = (
        f"{name_line(frame.filename, frame.lineno or 0)[0]} (`{frame.line}`)"
        for frame in ((own or frames)[-1], frames[-1])
    )
    return user if user == last else f"{last}, called from {user}"


def name_line(filename: str, number: int) -> tuple[str, bool]:
    """Return the name of a line, for a library with its path within it, and whether the line is the user's own."""
    _, library, path = filename.rpartition("site-packages/")
    return f"{path if library else Path(filename).name}:{number}", is_user_file(filename) and not library


def raised_by_autoaccum(error: BaseException) -> bool:
    """Return whether `error` was raised by autoaccum, or by Python's standard library called from autoaccum."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((is_autoaccum_file(frame.filename) for frame in frames if not _is_python(frame.filename)), False)


def blame_workload(error: BaseException, doing: str, *, hint: str | None = None) -> WorkloadError:
    """Return an error that shows an exception of the user's code as theirs.

    `doing` is the start of the message, `batch(5)` or `importing model.py`; `hint` says what to do, if known.
    """
    if _IN_WORKER.match(str(error)):
        shown = str(error).rstrip()
        what = f"raised {shown.splitlines()[-1]} (in a DataLoader worker)"
        return WorkloadError(f"{doing} {what}", hint=hint, user_traceback=shown)
    return WorkloadError(f"{doing} {_describe(error)}", hint=hint, user_traceback=format_user_traceback(error))


@contextmanager
def user_code(
    doing: str, *, hint: str | None = None, passes: Callable[[Exception], bool] = lambda error: False
) -> Iterator[None]:
    """Run the user's code and show its errors as theirs; out-of-memory errors are passed on, and what `passes`."""
    try:
        with blame_exit(doing):
            yield
    except (AutoaccumError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if passes(error):
            raise
        raise blame_workload(error, doing, hint=hint) from error


@contextmanager
def blame_exit(doing: str) -> Iterator[None]:
    """Show a `sys.exit()` of the user's code as theirs; autoaccum's own, after a signal, is passed on."""
    try:
        yield
    except SystemExit as error:
        if raised_by_autoaccum(error):
            raise
        raise blame_workload(error, doing) from error


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    text = str(error).strip().splitlines()
    return f"raised {type(error).__name__}: {text[0]}" if text else f"raised {type(error).__name__}"


def _pruned(
    report: traceback.TracebackException, keep: Callable[[str], bool], depth: int = 0
) -> traceback.TracebackException:
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if keep(frame.filename)])
    for chained in (report.__cause__, report.__context__):
        if chained is not None and depth < 10:
            _pruned(chained, keep, depth + 1)
    return report


@cache
def is_autoaccum_file(filename: str) -> bool:
    """Return whether the file belongs to autoaccum."""
    return str(Path(filename).resolve()).startswith(_OWN + "/")


@cache
def is_user_file(filename: str) -> bool:
    """Return whether the file belongs to the user or to their libraries, not to autoaccum, PyTorch or Python."""
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    return not any(path.startswith(root + "/") for root in (_OWN, _TORCH)) and not _is_python(path)


def _is_python(filename: str) -> bool:
    if filename.startswith("<frozen ") or filename.endswith(_FILES):
        return True
    return "site-packages" not in filename and any(root and filename.startswith(root + "/") for root in _PYTHON)
