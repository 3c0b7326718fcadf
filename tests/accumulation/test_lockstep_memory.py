"""An update in lock step keeps nothing once it is over: what waited for backward is freed with the graph."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum import Accumulator
from autoaccum.accumulation.whole_batch import exact_batchnorm


def test_exact_batchnorm_frees_what_it_kept_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Any]] = []

    class Watched(exact_batchnorm._Part):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(exact_batchnorm, "_Part", Watched)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulator = Accumulator(model, optimizer, criterion=nn.MSELoss(), micro_batch=2, batchnorm="exact")
    gc.disable()  # Freed at once, not by a later collection.
    try:
        accumulator.step((torch.randn(8, 4), torch.randn(8, 6)))
        assert len(kept) == 8
        assert not any(part() is not None for part in kept)
    finally:
        gc.enable()
