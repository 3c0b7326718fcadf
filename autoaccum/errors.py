"""The errors of autoaccum. A message says what happened, which limit was broken, and what to do.

Every error that autoaccum raises on purpose derives from `AutoaccumError`. A command prints its text and ends with its
`exit_code`: 0 is yes, 1 a clear no, 2 wrong usage or an unusable workload, 3 that it could not be measured.
"""

from __future__ import annotations

import re


def first_line(error: object) -> str:
    r"""Return the first line of an error's text; empty if it has no text, as for a bare `assert`.

    >>> first_line(ValueError("seen\nwhere")), first_line(AssertionError())
    ('seen', '')
    """
    return str(error).partition("\n")[0]


def describe_error(error: BaseException) -> str:
    """Return an error's class and the first line of its text.

    >>> describe_error(ValueError("seen")), describe_error(AssertionError())
    ('ValueError: seen', 'AssertionError')
    """
    return f"{type(error).__name__}: {first_line(str(error).strip())}".removesuffix(": ")


class AutoaccumError(Exception):
    """Base class of all errors raised on purpose.

    Args:
        message: What happened and, if there is one, the limit it broke; without a full stop.
        hint: What to do about it; appended to the message after a colon.

    Attributes:
        code: The name of the class in small letters and without `Error`, such as `does_not_fit`, for programs.
        exit_code: The exit code of a command that it ends.
    """

    code = "autoaccum"
    exit_code = 3

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(AutoaccumError):
    """A flag or an argument has a value that cannot be used."""

    exit_code = 2


class WorkloadError(AutoaccumError):
    """The workload (the user's file, model, batch, loss, weight or optimizer) cannot be used as it is.

    Attributes:
        user_traceback: The traceback of the user's own code, to be shown, if that code raised; None otherwise.
        most_samples: The largest micro-batch to try instead, where a command has too little data for this one.
    """

    exit_code = 2
    most_samples: int | None = None

    def __init__(self, message: str, *, hint: str | None = None, user_traceback: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.user_traceback = user_traceback


class PlanFileError(AutoaccumError):
    """A plan file cannot be read, is not a plan, or comes from a newer autoaccum."""

    exit_code = 2


class LockFileError(AutoaccumError):
    """A lock file cannot be parsed, does not match its digest, or comes from a newer autoaccum; it is not changed."""

    exit_code = 2


class MissingLockError(AutoaccumError):
    """There is no lock file to compare with."""


class DoesNotFitError(AutoaccumError):
    """Not even the smallest micro-batch fits into the available memory."""

    exit_code = 1


class NotMeasuredError(AutoaccumError):
    """Nothing could be measured: a trial hung or was killed, or the memory of the device cannot be limited here.

    Attributes:
        most_samples: As of `WorkloadError`, where the command ended too early.
    """

    most_samples: int | None = None


class CheckpointError(AutoaccumError):
    """A checkpoint cannot be written, or none can be read; the files in the folder are not changed."""


class StudyError(AutoaccumError):
    """A study cannot be read or written: its storage is not Optuna's, damaged, locked or out of reach."""


class NonFiniteError(AutoaccumError):
    """The loss or the gradient of an update is not finite; the parameters were not updated.

    Attributes:
        loss: The loss of the effective batch.
        grad_norm: The 2-norm of its gradient; None where it was not measured.
    """

    exit_code = 1

    def __init__(self, message: str, *, loss: float, grad_norm: float | None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.loss = loss
        self.grad_norm = grad_norm


class DataWorkerError(AutoaccumError):
    """A DataLoader worker died or hung, or its shared memory ran out."""


class UpdateInterrupted(AutoaccumError):
    """An optimizer step failed half-way, and there is no copy of the state before it: load a checkpoint.

    Attributes:
        next_micro_batch: The micro-batch to go on with, where memory ran out on a rank that shares a sharded model.
    """

    next_micro_batch: int | None = None


class RankLostError(AutoaccumError):
    """Another rank of this run has ended, or does not answer in time."""


class RankFailedError(AutoaccumError):
    """Another rank of this run failed with an error of its own; nothing was changed here."""
