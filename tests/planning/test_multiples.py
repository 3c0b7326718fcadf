"""Micro-batches that are multiples: found out, planned, emitted, stepped, verified, and trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import codes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.plan_record import Plan
from autoaccum.sources.workload import Workload
from autoaccum.training.fit_events import Notice

pytestmark = pytest.mark.usefixtures("warm_children")

FILE = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def batch(size):
    return torch.ones(size, 4), torch.zeros(size, 2)

def loss(model, batch):
    x, y = batch
    assert len(x) % 2 == 0, "Batch size should be even when using this"
    return nn.functional.mse_loss(model(x), y)
"""


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """As timm's Mixup wants it."""
    x, y = batch
    assert len(x) % 2 == 0, "Batch size should be even when using this"
    return F.mse_loss(model(x), y)


def fours(model: nn.Module, batch: Any) -> Tensor:
    """Compiled for one shape."""
    assert len(batch[0]) % 4 == 0
    return F.mse_loss(model(batch[0]), batch[1])


def pairs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2)


def workload(**changes: Any) -> Workload:
    return Workload(**{"model": lambda: nn.Linear(4, 2), "batch": pairs, "loss": mixed, **changes})


def test_is_found_out_where_2_runs_and_1_and_3_raise() -> None:
    found = autoaccum.plan(workload(), target_batch=12, max_micro_batch=5, device="cpu")
    assert (found.multiple_of, found.micro_batches, found.largest_fit) == (2, (4, 4, 4), 4)
    assert all(part % 2 == 0 for trial in found.trials for part in trial.parts)
    assert "multiple_found" in codes(found.notes)
    assert Plan.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["multiple_of"] == 2
    model = nn.Linear(4, 2)
    accumulator = autoaccum.Accumulator(model, torch.optim.AdamW(model.parameters()), mixed, plan=found)
    assert accumulator.step(pairs(10)).micro_batches == (4, 4, 2)
    of_ranks = autoaccum.plan(workload(multiple_of=2), target_batch=14, world_size=3, max_micro_batch=3, device="cpu")
    assert of_ranks.ranks == ((2, 2, 2), (2, 2, 0), (2, 2, 0))
    with pytest.raises(UsageError, match="the target batch is 7, and micro-batches are to be multiples of 2"):
        autoaccum.plan(workload(), target_batch=7, device="cpu")


def test_is_nothing_that_other_failures_tell() -> None:
    def at_most_two(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 2:
            raise ValueError("not so many")
        return F.mse_loss(model(batch[0]), batch[1])

    with pytest.raises(WorkloadError, match="not so many"):
        inspect_workload(workload(loss=at_most_two), rank_samples=8)
    normed = workload(model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), loss=nn.MSELoss())
    inspection = inspect_workload(normed, rank_samples=8)
    assert (inspection.multiple_of, inspection.least_size, inspection.notes) == (1, 2, ())


def test_is_asked_for() -> None:
    found = autoaccum.plan(workload(loss=fours, multiple_of=4), target_batch=20, max_micro_batch=11, device="cpu")
    assert (found.multiple_of, found.micro_batches) == (4, (8, 8, 4))
    again = autoaccum.plan(workload(loss=fours), target_batch=20, multiple_of=4, max_micro_batch=11, device="cpu")
    assert again.micro_batches == found.micro_batches
    with pytest.raises(UsageError, match="the target batch is 18"):
        autoaccum.plan(workload(), target_batch=18, multiple_of=4, device="cpu")
    with pytest.raises(WorkloadError, match="multiple_of is 0"):
        workload(multiple_of=0)


def test_is_found_out_on_a_simulated_card(tmp_path: Path) -> None:
    (tmp_path / "mixed.py").write_text(FILE)
    found = autoaccum.plan(str(tmp_path / "mixed.py"), target_batch=36, max_micro_batch=17, gpu="rtx3090")
    assert (found.multiple_of, found.micro_batches) == (2, (12, 12, 12))
    assert "not_extrapolated" not in codes(found.notes)  # Sizes follow from 2, 4 and 6.


def test_a_retry_is_of_multiples() -> None:
    sizes: list[int] = []

    def short(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return fours(model, batch)

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = autoaccum.Accumulator(model, optimizer, short, micro_batch=18, multiple_of=4)
    with pytest.warns(UserWarning, match="it and later ones run in micro-batches of at most"):
        assert accumulator.step(pairs(32)).micro_batches == (4,) * 8
    assert all(size % 4 == 0 for size in sizes)
    with pytest.raises(UsageError, match="a batch's size is 6, and micro-batches are to be multiples of 4"):
        accumulator.step(pairs(6))
    with pytest.raises(UsageError, match="micro_batch is 3, and micro-batches are to be multiples of 4"):
        accumulator.micro_batch = 3


def test_training_finds_it_out_and_leaves_out_what_makes_no_multiple() -> None:
    told: list[Any] = []
    data = TensorDataset(*pairs(9))
    found = autoaccum.fit(
        nn.Linear(4, 2), data, target_batch=8, loss=mixed, epochs=1, progress=False, callbacks=[told.append]
    )
    assert (found.updates, found.samples) == (1, 8)
    assert "samples_dropped" in [event.message.code for event in told if isinstance(event, Notice)]


def test_is_verified() -> None:
    with pytest.raises(WorkloadError, match="give --multiple-of N"):
        autoaccum.verify(workload())
    found = autoaccum.verify(workload(), multiple_of=2)
    assert found.equivalent
    assert [one.micro_batches for one in found.comparisons] == [(4, 4, 4, 4), (4, 2)]
    asked = autoaccum.verify(workload(loss=fours, multiple_of=4), micro_batch=6)
    assert [one.micro_batches for one in asked.comparisons] == [(4, 4, 4, 4), (4, 4)]
    with pytest.raises(UsageError, match="the target batch is 18"):
        autoaccum.verify(workload(), target_batch=18, multiple_of=4)
