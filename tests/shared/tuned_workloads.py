"""Small workloads for tests of tuning: a line to be fitted, with and without what makes trouble."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from autoaccum import Workload
from autoaccum.tuning.running.orders import TrainOrder
from autoaccum.tuning.settings import Budget, Setting

SAMPLES = 80
FEATURES = 3


def line_data(count: int = SAMPLES, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def line_workload(**given: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(FEATURES, 1),
        "criterion": nn.MSELoss(),
        "optimizer": sgd,
        "dataset": line_data(),
        "name": "line",
    }
    return Workload(**{**parts, **given})


def order_of(
    *, rate: float = 0.05, target: int = 16, micro: int = 8, seed: int = 0, budget: Budget | None = None
) -> TrainOrder:
    return TrainOrder(
        setting=Setting(learning_rate=rate, target_batch=target, micro_batch=micro),
        seed=seed,
        budget=budget or Budget(64, "samples"),
        evaluation_batch=8,
        device="cpu",
    )


class Asker:
    """Has every training go on, and notes what it is told: percents of the budget, and losses there."""

    def __init__(self) -> None:
        self.told = list[tuple[int, float]]()

    def __call__(self, percent: int, loss: float) -> bool:
        self.told.append((percent, loss))
        return True

    @property
    def percents(self) -> list[int]:
        return [percent for percent, _ in self.told]


class Counted(Dataset[Any]):
    """Samples by index that are no tensors of one."""

    def __init__(self, count: int) -> None:
        self._data = line_data(count)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, target = self._data[index]
        return {"x": inputs, "y": target}


class Streamed(IterableDataset[Any]):
    """Samples that can only be gone through, as often as one likes."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._data = line_data(count)

    def __iter__(self) -> Any:
        return iter([self._data[index] for index in range(len(self._data))])


class Greedy(nn.Module):
    """Wants more memory than there is for more than `most` samples at once; 0: for any."""

    def __init__(self, most: int = 0) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)
        self._most = most

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) > self._most:
            torch.empty(2**48)
        return torch.as_tensor(self.line(inputs))
