"""What can go wrong, as a person should read it: what was seen, the bound it broke, and the way out.

Every error autoaccum raises on purpose descends from `AutoaccumError`; the command line prints its text and leaves
with its `exit_code` (0 yes, 1 a clear no, 2 bad usage or workload, 3 could not be measured).
"""

from __future__ import annotations


def first_line(error: object) -> str:
    r"""The first line of what an error says; empty where it says nothing, as a bare `assert` does.

    >>> first_line(ValueError("seen\nwhere")), first_line(AssertionError())
    ('seen', '')
    """
    return str(error).partition("\n")[0]


class AutoaccumError(Exception):
    """Root of all errors raised on purpose.

    Args:
        message: What was seen and, where there is one, the bound it broke; no full stop at the end.
        hint: The way out; appended after a colon.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(AutoaccumError):
    """A flag or an argument that cannot be honoured."""

    exit_code = 2


class WorkloadError(AutoaccumError):
    """The workload (the user's file, model, batch, loss, weight or optimizer) is not usable as it stands.

    Attributes:
        user_traceback: The user's own frames when their code raised, for showing; None otherwise.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None, user_traceback: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.user_traceback = user_traceback


class PlanFileError(AutoaccumError):
    """A plan file that cannot be read, is not a plan, or comes from a newer autoaccum."""

    exit_code = 2


class LockFileError(AutoaccumError):
    """A lock file that cannot be parsed, does not match its digest or is from a newer autoaccum; it stays as it is."""

    exit_code = 2


class MissingLockError(AutoaccumError):
    """There is no lock to compare with."""

    exit_code = 3


class DoesNotFitError(AutoaccumError):
    """A clear no: not even the smallest micro-batch fits into the memory there is."""

    exit_code = 1


class NotMeasuredError(AutoaccumError):
    """The question could not be answered: a trial hung, was killed, or the device cannot be limited here."""

    exit_code = 3


class CheckpointError(AutoaccumError):
    """A checkpoint that cannot be written, or none that can be read; what is in the folder stays as it is."""

    exit_code = 3


class StudyError(AutoaccumError):
    """A study cannot be read or written: its storage is foreign, damaged, locked or out of reach."""

    exit_code = 3


class NonFiniteError(AutoaccumError):
    """The loss or the gradient of an update is not finite; it was not made.

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
    """A process that reads data died or hung, or the memory that is shared with it ran out."""

    exit_code = 3


class UpdateInterrupted(AutoaccumError):
    """An optimizer step failed half-way and no copy of the state from before it was kept: load a checkpoint."""

    exit_code = 3
