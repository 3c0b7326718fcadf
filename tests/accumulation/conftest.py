from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_of(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor) and node.layout is torch.strided:
        yield node
    elif isinstance(node, list | tuple):
        for child in node:
            yield from tensors_of(child)


class ShortageAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an out-of-memory error at the `number`-th storage that an operator creates, once."""

    def __init__(self, number: int, active: Callable[[], bool] = lambda: True, text: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = number
        self.fired = False
        self.active = active
        self.text = text

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.fired or not self.active():
            return out
        known = {id(tensor.untyped_storage()) for tensor in tensors_of((args, list((kwargs or {}).values())))}
        for tensor in tensors_of(out):
            if id(tensor.untyped_storage()) not in known:
                if self.left == 0:
                    self.fired = True
                    if self.text is None:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what a test refuses")
                    raise RuntimeError(self.text)
                self.left -= 1
        return out


class Restless(nn.Module):
    """Mutates one buffer, replaces another and draws from every generator; none of it matters to its outputs."""

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


@pytest.fixture(autouse=True)
def light_collections() -> Iterator[None]:
    # What pytest and torch have loaded is not garbage: looking through it would cost 80 ms per retry.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def shortage_at() -> type[ShortageAt]:
    return ShortageAt


@pytest.fixture
def restless() -> type[Restless]:
    return Restless


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
