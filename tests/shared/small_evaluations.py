"""A small model, its data, and evaluations of it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from autoaccum.sources.objective import resolve_objective
from autoaccum.training.evaluation import Evaluation

SAMPLES, CLASSES = 23, 3
CRITERION = nn.CrossEntropyLoss()


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def dataset(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(*samples(count))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


def evaluation(data: Any = None, *, evaluate: Any = None, micro_batch: int = 5, **options: Any) -> Evaluation:
    objective = resolve_objective(options.pop("loss", CRITERION), **options.pop("objective", {}))
    return Evaluation(
        objective, evaluate, "fp32", dataset() if data is None else data, micro_batch=micro_batch, **options
    )


def values(made: Evaluation, model: nn.Module) -> dict[str, float]:
    outcome = made.run(model, 7)
    assert outcome.update == 7
    return dict(outcome.values)


def whole(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> float:
    at_rest = copy.deepcopy(model).eval()
    with torch.no_grad():
        return float(run(at_rest))


class Numbers(Dataset[Any]):
    """Map-style, without torch's Dataset classes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = samples()
        return x[index], y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)


class Batches:
    """An iterable of batches of unequal size."""

    def __iter__(self) -> Iterator[Any]:
        sizes = [9, 1, 13]
        return zip(*(torch.split(tensor, sizes) for tensor in samples()), strict=True)
