"""Draws of Python's and NumPy's generators, global ones and the workload's own: once per forward, for each sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum.api import verify
from autoaccum.errors import NotMeasuredError
from autoaccum.verification.verification_result import Verification

PYTHON = random.Random(1)
NUMPY = np.random.default_rng(3)


def _batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.arange(size) % 3


def _verified(model: nn.Module, loss: Any = None) -> Verification:
    parts = {"loss": loss} if loss is not None else {"criterion": nn.CrossEntropyLoss()}
    return verify(model=model, batch=_batch, target_batch=6, micro_batch=2, **parts)


def _once() -> float:
    return random.random()


DRAWN: dict[str, Callable[[Tensor], Any]] = {
    "python, once": lambda x: x * _once(),
    "numpy, once": lambda x: x + torch.from_numpy(np.random.randn(4)),
    "python, each": lambda x: x * torch.tensor([random.random() for _ in x])[:, None],
    "numpy, each": lambda x: x + torch.from_numpy(np.random.randn(*x.shape)),
    "own python, once": lambda x: x * PYTHON.random(),
    "own python, each": lambda x: x * torch.tensor([PYTHON.gauss(0, 1) for _ in x])[:, None],
    "own numpy, once": lambda x: x + NUMPY.standard_normal(),
    "own numpy, each": lambda x: x + torch.from_numpy(NUMPY.standard_normal(tuple(x.shape))),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_that_mix_nothing_are_equivalent(name: str) -> None:
    def loss(model: nn.Module, pair: Any) -> Tensor:
        return F.cross_entropy(model(DRAWN[name](pair[0])), pair[1])

    before = NUMPY.bit_generator.state["state"]["state"], PYTHON.getstate()
    found = _verified(nn.Linear(4, 3), loss)
    assert found.equivalent
    assert found.notes == ()
    assert (NUMPY.bit_generator.state["state"]["state"], PYTHON.getstate()) == before


class Naming(nn.Module):
    """Draws from a generator of its module, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Any:
        return self.linear(inputs + torch.from_numpy(NUMPY.standard_normal(tuple(inputs.shape))))


class Keeping(Naming):
    """Keeps one itself, and draws once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(1)

    def forward(self, inputs: Tensor) -> Any:
        return self.linear(inputs * self.generator.random())


@pytest.mark.parametrize("model", [Naming, Keeping])
def test_generators_that_a_model_names_or_keeps_begin_alike(model: type[nn.Module]) -> None:
    assert _verified(model()).equivalent


ORDERS: dict[str, Callable[[int], Any]] = {
    "numpy": lambda count: np.random.permutation(count),
    "python": lambda count: random.sample(range(count), count),
    "own numpy": lambda count: NUMPY.permutation(count),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_is_drawn_without_torch_is_refused(name: str) -> None:
    def loss(model: nn.Module, pair: Any) -> Tensor:
        order = torch.as_tensor(ORDERS[name](len(pair[0])))
        return F.cross_entropy(model(pair[0] + 0.3 * pair[0][order]), pair[1])

    expected = "other random numbers from Python's or NumPy's generators .*: draw with torch"
    with pytest.raises(NotMeasuredError, match=expected):
        _verified(nn.Linear(4, 3), loss)


def test_a_mixup_is_a_coupled_loss() -> None:
    """Mix each sample with its opposite by one share that NumPy draws for the batch, as timm does."""

    def loss(model: nn.Module, pair: Any) -> Tensor:
        share, targets = np.random.beta(0.4, 0.4), F.one_hot(pair[1], 3).to(pair[0].dtype)
        inputs, targets = (one * share + one.flip(0) * (1 - share) for one in (pair[0], targets))
        return torch.sum(-targets * F.log_softmax(model(inputs), dim=-1), dim=-1).mean()

    (cause,) = _verified(nn.Linear(4, 3), loss).causes
    assert cause.kind == "coupled loss"
