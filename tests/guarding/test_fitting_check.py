"""The message of a test whose schedule does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_locks import a_measurement

from autoaccum.errors import UsageError
from autoaccum.guarding import guard_run
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.units import GIB

LARGE = a_measurement(fits=False, largest=24, limit_bytes=GIB)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Checks `train.py`, which takes what is told beforehand."""
    (tmp_path / "train.py").touch()

    def check_fits(answer: Measurement | None, schedule: tuple[int, ...] | None = None, **asked: Any) -> list[str]:
        def measure(case: Case, checkout: Any, *, micro_batches: tuple[int, ...] | None) -> Measurement | None:
            assert (case.workload, checkout.folder, micro_batches) == ("train.py", tmp_path, schedule)
            return answer

        monkeypatch.setattr(guard_run, "measure", measure)
        return guard_run.check_fits(str(tmp_path / "train.py"), tmp_path, gpu="rtx3090", **asked).splitlines()

    return check_fits


def test_what_fits_is_nothing_to_say(check: Callable[..., list[str]]) -> None:
    assert check(a_measurement(), (32, 32), micro_batch=32) == []
    assert check(a_measurement(), target_batch=256) == []


def test_what_does_not_fit_is_explained(check: Callable[..., list[str]]) -> None:
    assert check(LARGE, (32, 32), micro_batch=32, memory="1GiB") == [
        "train.py --gpu rtx3090 --micro-batch 32 --memory 1GiB: micro-batch 32 does not fit: it needs at least"
        " 1.30 GiB, 1.00 GiB are available; the largest that fits is 24"
    ]


def test_what_cannot_be_requested_is_refused(check: Callable[..., list[str]]) -> None:
    with pytest.raises(UsageError, match="there is no argument 'gpus'"):
        check(None, gpus="t4")
    with pytest.raises(UsageError, match="there is no argument 'folder'") as told:
        check(None, folder="here")
    assert "limit" in (told.value.hint or "")
    assert "memory" not in (told.value.hint or "")
    with pytest.raises(UsageError, match="no target batch"):
        check(None)
