from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from memory_errors import OutOfMemoryAt
from torch import Tensor, nn


class Stateful(nn.Module):
    """Mutates one buffer, replaces another and draws from every generator; its outputs do not depend on that."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        noise = torch.rand(1).item() + random.random() + np.random.rand()
        noise += torch.rand(1, generator=self.generator).item()
        outputs: Tensor = self.second(torch.tanh(self.first(x)))
        return outputs + 0.0 * noise


@pytest.fixture
def out_of_memory_at() -> type[OutOfMemoryAt]:
    return OutOfMemoryAt


@pytest.fixture
def stateful() -> type[Stateful]:
    return Stateful


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
