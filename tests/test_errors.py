"""The text and the exit code of each error: 1 is a clear no, 2 a mistake of the user's, 3 that nothing was measured."""

from __future__ import annotations

import inspect

from autoaccum import errors
from autoaccum.errors import AutoaccumError, DoesNotFitError

CODES = {
    1: {"DoesNotFitError", "NonFiniteError"},
    2: {"LockFileError", "PlanFileError", "UsageError", "WorkloadError"},
    3: {
        *("CheckpointError", "DataWorkerError", "MissingLockError", "NotMeasuredError", "StudyError"),
        *("RankFailedError", "RankLostError", "UpdateInterrupted"),
    },
}


CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


def test_scripts_can_rely_on_the_exit_codes() -> None:
    found: dict[int, set[str]] = {}
    for kind in CLASSES:
        assert issubclass(kind, AutoaccumError), "every error has one root"
        if kind is not AutoaccumError:
            found.setdefault(kind.exit_code, set()).add(kind.__name__)
    assert found == CODES
    assert AutoaccumError.exit_code == 3


def test_the_text_is_the_message_then_the_hint() -> None:
    error = DoesNotFitError("micro-batch 1 needs 21.3 GiB, 15.0 GiB are free", hint="try --precision bf16")
    assert str(error) == "micro-batch 1 needs 21.3 GiB, 15.0 GiB are free: try --precision bf16"
    assert (error.message, error.hint) == ("micro-batch 1 needs 21.3 GiB, 15.0 GiB are free", "try --precision bf16")
