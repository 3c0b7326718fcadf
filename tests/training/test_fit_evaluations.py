"""Evaluations at chosen numbers of samples, at most once after an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autoaccum.errors import UsageError
from autoaccum.training.fit_events import Evaluated, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train

DATA = TensorDataset(torch.ones(20, 3), torch.ones(20, 2))


class Enough(Exception):
    """Any exception of the user's code."""


def run(due: Callable[[int], bool], *callbacks: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Return the samples after each update, and `evaluated` after each evaluation."""
    order: list[Any] = []

    def listen(event: Any) -> None:
        if isinstance(event, (Updated, Evaluated)):
            order.append(event.samples if isinstance(event, Updated) else "evaluated")

    settings: dict[str, Any] = {"eval_data": DATA, "loss": nn.MSELoss(), "steps": 6, "target_batch": 8}
    settings |= {"data": DATA, "micro_batch": 8, "callbacks": callbacks} | options
    train(FitRequest(model_or_workload=nn.Linear(3, 2), eval_due=due, **settings), on_event=listen)
    return order


def test_it_is_called_after_every_update_and_replaces_evaluations_after_epochs() -> None:
    calls: list[int] = []

    def due(samples: int) -> bool:
        calls.append(samples)
        return samples in (16, 28)

    assert run(due) == [8, 16, "evaluated", 20, 28, "evaluated", 36, 40, "evaluated"]
    assert calls == [8, 16, 20, 28, 36, 40]


def test_a_resumed_run_runs_the_evaluation_it_missed(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, Updated) and event.update == 2:
            raise Enough

    def due(samples: int) -> bool:
        return samples == 16

    with pytest.raises(Enough):
        run(due, stop, run_dir=tmp_path)
    assert run(due, run_dir=tmp_path, steps=3) == ["evaluated", 20, "evaluated"]
    assert run(due, run_dir=tmp_path, steps=3) == []


def test_it_contradicts_a_number_of_updates_and_needs_data() -> None:
    with pytest.raises(UsageError, match="eval_every is 2, and eval_due is given too: give one of them"):
        run(lambda samples: True, eval_every=2)
    with pytest.raises(UsageError, match="eval_due is given, but no evaluation data"):
        run(lambda samples: True, eval_data=None)
