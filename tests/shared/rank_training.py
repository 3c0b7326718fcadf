"""A training of a small net, alone or as one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_fit import fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES = 51


class Rows(TensorDataset):
    """Rows of five numbers in four classes; calls a function with each index that is read."""

    def __init__(self, read: Callable[[int], Any] = id) -> None:
        draw = torch.Generator().manual_seed(3)
        labels = torch.randint(0, 4, (SAMPLES,), generator=draw)
        super().__init__(torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64), labels)
        self.read = read

    def __getitem__(self, index: int) -> Any:
        self.read(index)
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


class Failing(nn.Module):
    """A criterion that raises on rank 1 when it is called for the `at`-th time there."""

    def __init__(self, at: int, error: Exception | None = None) -> None:
        super().__init__()
        self.at, self.calls, self.error = at, 0, error or ValueError("a bug of the user's")

    def forward(self, outputs: Any, targets: Any) -> Any:
        is_second = dist.is_initialized() and dist.get_rank() == 1
        self.calls += is_second
        if is_second and self.calls == self.at:
            raise self.error
        return nn.functional.cross_entropy(outputs, targets)


def net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *(middle or (nn.Tanh(),)), nn.Linear(8, 4))


def train(
    data: Any = None, model: Callable[[], nn.Module] = net, prepare: Callable[[Any], object] = id, **options: Any
) -> tuple[Any, dict[str, Tensor], list[Any]]:
    """Train, with an optimizer that is prepared; return the result, the weights and the events."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    trained = model().double()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.02, foreach=False)
    prepare(optimizer)
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, **options}
    result, events = fit(trained, Rows() if data is None else data, **options)
    return result, trained.state_dict(), events
