"""The exit code of each error: 1 is a clear no, 2 a mistake of the user's, 3 that nothing could be measured."""

from __future__ import annotations

import inspect

from autoaccum import errors

CODES = {
    1: {"DoesNotFitError", "NonFiniteError"},
    2: {"LockFileError", "PlanFileError", "UsageError", "WorkloadError"},
    3: {
        *("CheckpointError", "DataWorkerError", "MissingLockError", "NotMeasuredError", "StudyError"),
        *("RankFailedError", "RankLostError", "UpdateInterrupted"),
    },
}


def test_scripts_can_rely_on_the_exit_codes() -> None:
    found: dict[int, set[str]] = {}
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.AutoaccumError) and kind is not errors.AutoaccumError:
            found.setdefault(kind.exit_code, set()).add(kind.__name__)
    assert found == CODES
