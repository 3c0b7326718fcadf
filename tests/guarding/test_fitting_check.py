"""The message of a test whose schedule does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_locks import a_case, a_lock, a_measurement

from autoaccum.devices.child.import_paths import Checkout
from autoaccum.devices.explanation import Holding
from autoaccum.errors import AutoaccumError, DoesNotFitError, UsageError, WorkloadError
from autoaccum.guarding import fit_check
from autoaccum.guarding.cases import Case
from autoaccum.guarding.fit_check import check_fits
from autoaccum.guarding.guard_result import Measurement
from autoaccum.guarding.lock import write_lock
from autoaccum.units import GIB

MORE = Holding(category="activations", module="blocks.0.extra", kind="Linear", dtype="float32", bytes=GIB)
LARGE = a_measurement(*a_measurement().holdings, MORE, fits=False, largest=24, limit_bytes=GIB)
LARGE_30 = dataclasses.replace(LARGE, micro_batches=(30,))
Answers = Mapping[tuple[int, ...] | None, Measurement | AutoaccumError]


class Check:
    """Checks of `train.py`, whose measurements are told beforehand by their schedule."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.answers = folder, dict[tuple[int, ...] | None, Measurement | AutoaccumError]()
        (folder / "train.py").touch()

    def measure(self, case: Case, checkout: Checkout, *, micro_batches: tuple[int, ...] | None) -> Measurement:
        assert (case.workload, checkout.folder) == ("train.py", self.folder)
        answer = self.answers[micro_batches]
        if isinstance(answer, AutoaccumError):
            raise answer
        return answer

    def of(self, answers: Answers, **asked: Any) -> list[str]:
        self.answers = dict(answers)
        return check_fits(str(self.folder / "train.py"), self.folder, gpu="rtx3090", **asked).splitlines()


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    made = Check(tmp_path)
    monkeypatch.setattr(fit_check, "measure", made.measure)
    return made


def test_what_fits_is_nothing_to_say(check: Check) -> None:
    assert check.of({(32, 32): a_measurement()}, micro_batch=32) == []
    assert check.of({None: a_measurement()}, target_batch=256) == []


def test_what_does_not_fit_is_explained(check: Check) -> None:
    told = check.of({(32, 32): LARGE}, micro_batch=32, memory="1GiB")
    assert told == [
        "train.py on rtx3090 does not fit: micro-batch 32 (8 x 32, bf16) needs at least 2.3 GiB (2.3 GiB "
        "without a limit); the limit is 1GiB, the largest that fits is 24",
        "where the memory goes, in backward at aten.mm of head:",
        "    2.2 GiB  activations",
        "    100 MiB  parameters",
        "   32.0 MiB  workspace",
        "   10.0 MiB  unused",
        "the modules that hold most:",
        "    1.2 GiB  activations of blocks.*.mlp.*",
        "    1.0 GiB  activations of blocks.*.extra",
        "    100 MiB  parameters of head",
    ]


def test_what_grew_since_the_lock_is_reported(check: Check) -> None:
    write_lock(check.folder / "autoaccum.lock", a_lock(a_case(precision="bf16"), a_case(gpu="t4"), a_case()))
    told = check.of({(32, 32): LARGE, (32,) * 8: LARGE}, micro_batch=32)
    assert told[-1].startswith("since autoaccum.lock: +1.00 GiB (+")
    assert "blocks" in told[-1]
    same = check.of({(32, 32): LARGE, (32,) * 8: a_measurement()}, micro_batch=32)
    assert same[-1] == "since autoaccum.lock: nothing grew"
    other = a_measurement(versions={"torch": "2.11.0", "autoaccum": "0.1.0"})
    other_torch = check.of({(32, 32): LARGE, (32,) * 8: other}, micro_batch=32)
    assert other_torch[-1] == "since autoaccum.lock: the lock was written with torch 2.13.0, here it is 2.11.0"
    failed = check.of({(32, 32): LARGE, (32,) * 8: WorkloadError("it raised")}, micro_batch=32)
    assert failed[-1] == "what grew since autoaccum.lock is not known: it raised"
    assert "autoaccum.lock" not in check.of({(32, 32): LARGE}, micro_batch=32, precision="fp16")[-1]


def test_where_not_even_one_sample_fits_that_is_explained(check: Check) -> None:
    error = DoesNotFitError("micro-batch 1 does not fit")
    one = a_measurement(fits=False, largest=0, micro_batches=(1,) * 4)
    told = check.of({None: error, (1,) * 4: one}, target_batch=4)
    assert told[0].endswith("22.0 GiB are available, not even 1 fits")
    assert "where the memory goes, in backward at aten.mm of head:" in told
    with pytest.raises(DoesNotFitError, match="micro-batch 1 does not fit"):
        check.of({None: error, (1,) * 4: WorkloadError("BatchNorm")}, target_batch=4)


def test_what_cannot_be_requested_is_refused(check: Check) -> None:
    with pytest.raises(UsageError, match="there is no argument 'gpus'"):
        check.of({}, gpus="t4")
    with pytest.raises(UsageError, match="there is no argument 'folder'") as told:
        check.of({}, folder="here")
    assert "limit" in (told.value.hint or "")
    assert "memory" not in (told.value.hint or "")
    with pytest.raises(UsageError, match="no target batch"):
        check.of({})
