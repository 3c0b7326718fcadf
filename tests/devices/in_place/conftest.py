from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.devices.in_place import InPlaceDevice, LiveObjects
from autoaccum.options import Options
from autoaccum.units import MIB, MemorySize
from autoaccum.workload.objective import resolve_objective

MakeDevice = Callable[..., InPlaceDevice]


@pytest.fixture(autouse=True)
def light_collections() -> Iterator[None]:
    # What pytest and torch have loaded is not garbage: looking through it would cost 80 ms per trial.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def live_device() -> MakeDevice:
    """Makes an InPlaceDevice of a model, a batch and what else is given."""

    def make(
        model: nn.Module,
        batch: Any,
        loss: Any = None,
        *,
        share: int = 8,
        budget_bytes: int = 256 * MIB,
        evaluate: Any = None,
        **others: Any,
    ) -> InPlaceDevice:
        objective = resolve_objective(nn.CrossEntropyLoss() if loss is None else loss)
        live = LiveObjects(
            model=model, batch=batch, objective=objective, options=Options(**others), evaluate=evaluate, name="net"
        )
        return InPlaceDevice(live, share=share, memory=MemorySize(bytes=budget_bytes))

    return make


@pytest.fixture
def pairs() -> Callable[[int], Any]:
    """`batch(size)` of inputs of 6 features and one of 3 classes."""

    def batch(size: int) -> Any:
        return torch.randn(size, 6), torch.randint(0, 3, (size,))

    return batch
