"""A few samples to experiment with: of the dataset, by the workload's own collate where it has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from autoaccum import Workload
from autoaccum.errors import WorkloadError
from autoaccum.workload.samples import take_small_batch

TEXTS = [torch.arange(length) for length in (5, 2, 3, 4)]


def make(**fields: Any) -> Workload:
    return Workload(model=lambda: nn.Linear(2, 2), loss=lambda model, batch: batch.sum(), **fields)


def test_samples_come_from_the_dataset_by_its_own_collate() -> None:
    taken = take_small_batch(
        make(
            batch=lambda size: torch.zeros(size, 9, dtype=torch.int64),
            dataset=TEXTS,
            collate=lambda samples: pad_sequence(samples, batch_first=True, padding_value=-1),
        ),
        3,
    )
    assert taken.tolist() == [[0, 1, 2, 3, 4], [0, 1, -1, -1, -1], [0, 1, 2, -1, -1]]


def test_without_batch_the_dataset_alone_makes_one() -> None:
    taken = take_small_batch(make(dataset=[torch.full((2,), float(i)) for i in range(4)]), 2)
    assert isinstance(taken, Tensor)
    assert taken.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_samples_that_do_not_look_like_the_batch_are_left_alone() -> None:
    taken = take_small_batch(make(batch=lambda size: torch.zeros(size, 9), dataset=TEXTS), 3)
    assert taken.shape == (3, 9)


def test_a_short_dataset_without_batch_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"the dataset gives 4 samples, 9 are asked for: write def batch\(size\)"):
        take_small_batch(make(dataset=TEXTS), 9)


def test_samples_that_cannot_be_put_together_are_the_users() -> None:
    with pytest.raises(WorkloadError, match="putting samples of the dataset together raised"):
        take_small_batch(make(dataset=TEXTS), 3)
