"""A training warns of weights that are not what the loss divides by, or ends before its first wrong update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoaccum
from autoaccum.accumulation.step_result import WeightingWarning
from autoaccum.errors import WorkloadError

LENGTH = 8


class Uneven(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows of one to eight labels."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(1, 9, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return words, words.where(torch.arange(LENGTH) <= index % LENGTH, -100)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(**options: Any) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Embedding(9, 6), nn.Dropout(0.1), nn.Linear(6, 9)), list[float]()
    settings: dict[str, Any] = {"target_batch": 16, "micro_batch": 4, "steps": 3, "device": "cpu", "progress": False}
    callbacks = [lambda event: seen.append(event.loss) if hasattr(event, "loss") else None]
    autoaccum.fit(model, Uneven(), loss=loss, callbacks=callbacks, **settings, **options)
    return model, seen


def test_fit_warns_of_a_wrong_weight_once_and_trains_as_it_would_without() -> None:
    with pytest.warns(WeightingWarning, match=r"return \(batch\[1\] != -100\)\.sum\(\)$") as told:
        model, losses = train()
    assert [one.category for one in told] == [WeightingWarning]
    with pytest.warns(WeightingWarning, match="has ignored entries"):  # Labels are read, but nothing is compared.
        other, unchecked = train(check="off")
    assert losses == unchecked
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_fit_ends_before_a_wrong_update_where_the_check_is_strict() -> None:
    with pytest.raises(WorkloadError, match="the weighting does not match the loss"):
        train(check="strict")
