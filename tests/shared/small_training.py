"""A small net and its batches, for tests of one step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CRITERION = nn.CrossEntropyLoss()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.tanh(self.first(x))))


def net(dtype: torch.dtype = torch.float64) -> Net:
    return Net().to(dtype)


def batch_of(size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5, dtype=dtype), torch.randint(0, 3, (size,))


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def assert_close(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
