"""Real trials in processes of their own: what is kept beside the step is in their peak, and may be what fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from planned import make_settings
from small_classifier import layers_file

from autoaccum.devices.base import Trial
from autoaccum.devices.cpu import CpuDevice
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

SIZE, CLASSES, WIDTH = 256, 8_192, 64
LOGITS = 4 * SIZE * CLASSES
PARAMETERS = 4 * (WIDTH * CLASSES + CLASSES)
SLACK = 4 * MIB
HEAD = f"{layers_file(WIDTH, CLASSES, classes=True)}def optimizer(params): return torch.optim.SGD(params, lr=0.1)\n"


@pytest.fixture(scope="module")
def reference(write_workload: Any) -> str:
    written: str = write_workload(HEAD)
    return written


@contextmanager
def device(reference: str, budget_bytes: int = 1024 * MIB, **asked: Any) -> Iterator[CpuDevice]:
    settings = make_settings(reference, 2 * SIZE, budget_bytes, **asked)
    with CpuDevice(settings) as made:
        yield made


def try_beside(reference: str, **asked: Any) -> Trial:
    with device(reference, **asked) as made:
        trial = made.trial((SIZE, SIZE))
    assert trial.outcome == "ok", trial.message
    return trial


def peak(trial: Trial) -> int:
    assert trial.peak_reserved_bytes is not None
    return trial.peak_reserved_bytes


@pytest.fixture(scope="module")
def plain_bytes(reference: str) -> int:
    return peak(try_beside(reference))


def test_the_logits_of_the_micro_batch_before_are_in_the_peak(reference: str, plain_bytes: int) -> None:
    grown = peak(try_beside(reference, hold_outputs=True)) - plain_bytes
    assert grown == pytest.approx(LOGITS, abs=SLACK)


def test_an_evaluation_is_in_the_peak_where_it_is_higher(reference: str, plain_bytes: int) -> None:
    assert peak(try_beside(reference, evaluation_batch=16)) == pytest.approx(plain_bytes, abs=SLACK)
    samples = 8 * SIZE
    large = peak(try_beside(reference, evaluation_batch=samples))
    # The logits of one pass, and those of the next with what the loss makes of them.
    assert large >= PARAMETERS + 2 * samples * CLASSES * 4
    assert large > plain_bytes + SLACK


def test_an_evaluation_that_does_not_fit_is_reported_as_such(reference: str, plain_bytes: int) -> None:
    with device(reference, plain_bytes + 16 * MIB, evaluation_batch=8 * SIZE) as made:
        trial = made.trial((1, 1))
        assert (trial.outcome, trial.phase) == ("oom", "evaluation")
        assert trial.message is not None
        assert "micro-batch 1, evaluation ran out of memory" in trial.message
