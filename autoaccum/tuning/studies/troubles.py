"""What goes wrong with a storage, as a person should read it; and Optuna's own messages, which nobody asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import JSONDecodeError

import optuna
from sqlalchemy.exc import SQLAlchemyError

from autoaccum.errors import StudyError

_LONGEST_REASON = 200
GONE = "the file is gone"
_SIGNS_OF_LOSS = (GONE, "no such table", os.strerror(errno.ENOENT))


@contextmanager
def quiet() -> Iterator[None]:
    """Within, Optuna logs errors only."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def storage_trouble(shown: str, secrets: Sequence[str] = (), *, opening: bool = False) -> Iterator[None]:
    """Within, what a storage raises becomes a `StudyError`; nothing but reading and writing it belongs in here.

    Args:
        shown: What the storage is called.
        secrets: What is left out of the reason.
        opening: Whether nothing was read or written in it before.
    """
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, OSError, JSONDecodeError) as error:
        raise _trouble(shown, reason_of(error, secrets), opening) from None


def _trouble(shown: str, reason: str, opening: bool) -> StudyError:
    if "database is locked" in reason:
        return locked(shown)
    if opening:
        return StudyError(
            f"the storage {shown} cannot be used ({reason})",
            hint="see that it can be reached and written, or take another by --storage",
        )
    if any(sign in reason for sign in _SIGNS_OF_LOSS):
        return deleted(shown, "the study", reason)
    return StudyError(
        f"the storage {shown} cannot be used ({reason})",
        hint="what it holds is as it was; the same command goes on when it can be reached and written",
    )


def deleted(shown: str, what: str, reason: object) -> StudyError:
    """The error for a storage that has lost what it held."""
    return StudyError(
        f"{shown} no longer holds {what} ({reason})", hint="was it deleted? The same command begins it anew"
    )


def is_of_storage(error: BaseException) -> bool:
    """Whether it was raised by Optuna's storages, as a `KeyError` is for a record that is not there."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__")).startswith("optuna.storages.")


def locked(shown: str) -> StudyError:
    """The error for a database that another process does not let go of."""
    return StudyError(
        f"{shown} is locked by another process", hint="end that process, or take another file by --storage"
    )


def reason_of(error: BaseException, secrets: Sequence[str] = ()) -> str:
    """The first line of what lies at the bottom of it, without secrets."""
    while isinstance(error.__cause__, BaseException):
        error = error.__cause__
    error = getattr(error, "orig", None) or error
    if isinstance(error, OSError) and error.strerror:  # The rest of it names files, which may be ours, not a person's.
        return error.strerror
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for secret in secrets:
        reason = reason.replace(secret, "***")
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
