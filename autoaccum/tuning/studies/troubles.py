"""What goes wrong with a storage, as a person should read it; and Optuna's own messages, which nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import JSONDecodeError

import optuna
from sqlalchemy.exc import SQLAlchemyError

from autoaccum.errors import StudyError

_LONGEST_REASON = 200


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
def storage_trouble(shown: str, secrets: Sequence[str] = ()) -> Iterator[None]:
    """Within, what a storage raises becomes a `StudyError`; nothing but reading and writing it belongs in here.

    Args:
        shown: What the storage is called.
        secrets: What is left out of the reason.
    """
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, OSError, JSONDecodeError) as error:
        raise trouble(shown, error, secrets) from None


def trouble(shown: str, error: BaseException, secrets: Sequence[str] = ()) -> StudyError:
    """The error for a storage that could not be read or written."""
    reason = reason_of(error, secrets)
    if "database is locked" in reason:
        return locked(shown)
    return StudyError(
        f"the storage {shown} cannot be used ({reason})",
        hint="what it holds is as it was; the same command goes on when it can be reached and written",
    )


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
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for secret in secrets:
        reason = reason.replace(secret, "***")
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
