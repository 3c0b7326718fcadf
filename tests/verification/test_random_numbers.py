"""Random numbers in both updates: replayed, or replaced where they cannot be; and those of Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_verified as small
import torch
from factories import codes
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Workload, verify
from autoaccum.errors import NotMeasuredError
from autoaccum.verification.verification_result import Verification

PYTHON = random.Random(1)
NUMPY = np.random.default_rng(3)


def linear() -> nn.Module:
    return nn.Linear(small.FEATURES, small.CLASSES)


def found(model: Any = linear, loss: Any = small.class_loss, **more: Any) -> Verification:
    made = Workload(model=model, batch=small.pairs, loss=loss, **more)
    return verify(made, target_batch=6, micro_batch=2)


def numpy_noise(x: Tensor) -> Tensor:
    return torch.from_numpy(NUMPY.standard_normal(tuple(x.shape)))


DRAWN: dict[str, Callable[[Tensor], Any]] = {
    "python, once": lambda x: x * random.random(),
    "numpy, once": lambda x: x + torch.from_numpy(np.random.randn(x.shape[1])),
    "python, each": lambda x: x * torch.tensor([random.random() for _ in x])[:, None],
    "numpy, each": lambda x: x + torch.from_numpy(np.random.randn(*x.shape)),
    "own python, once": lambda x: x * PYTHON.random(),
    "own python, each": lambda x: x * torch.tensor([PYTHON.gauss(0, 1) for _ in x])[:, None],
    "own numpy, once": lambda x: x + NUMPY.standard_normal(),
    "own numpy, each": lambda x: x + numpy_noise(x),
}


@pytest.mark.parametrize("name", DRAWN)
def test_those_of_the_host_that_mix_nothing_are_equivalent(name: str) -> None:
    def loss(model: nn.Module, pair: Any) -> Tensor:
        return F.cross_entropy(model(DRAWN[name](pair[0])), pair[1])

    before = NUMPY.bit_generator.state["state"]["state"], PYTHON.getstate()
    verification = found(loss=loss)
    assert verification.equivalent
    assert verification.notes == ()
    assert (NUMPY.bit_generator.state["state"]["state"], PYTHON.getstate()) == before


class Naming(small.Mlp):
    """Draws from a generator of its module, for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + numpy_noise(x))


class Keeping(small.Mlp):
    """Keeps a generator itself, and draws once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.generator.random())


@pytest.mark.parametrize("model", [Naming, Keeping])
def test_generators_that_a_model_names_or_keeps_begin_alike(model: type[nn.Module]) -> None:
    assert found(model).equivalent


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
        found(loss=loss)


def test_a_mixup_is_a_coupled_loss() -> None:
    """Mix each sample with its opposite by one share that NumPy draws for the batch, as timm does."""

    def loss(model: nn.Module, pair: Any) -> Tensor:
        share, targets = np.random.beta(0.4, 0.4), F.one_hot(pair[1], 3).to(pair[0].dtype)
        inputs, targets = (rows * share + rows.flip(0) * (1 - share) for rows in (pair[0], targets))
        return torch.sum(-targets * F.log_softmax(model(inputs), dim=-1), dim=-1).mean()

    (cause,) = found(loss=loss).causes
    assert cause.kind == "coupled loss"


class TimeMajor(nn.Module):
    """Drops entries of (time * samples, width), the samples innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, small.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = F.dropout(inputs.t().reshape(-1, 1), 0.5)
        return torch.as_tensor(self.linear(rows).unflatten(0, (inputs.shape[1], len(inputs))).mean(0))


class Packed(nn.Module):
    """Drops entries of packed sequences, whose rows go by time among those that are that long."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 3, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(3, small.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = 1 + (inputs[:, 1:] > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(inputs[..., None], lengths, batch_first=True, enforce_sorted=False)
        return torch.as_tensor(self.head(self.rnn(packed)[1][0][-1]))


class Dropping(nn.Module):
    """Leaves a layer out for all samples at once, which moves the draws behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(linear() for _ in range(4)), nn.Linear(small.CLASSES, small.CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs[:, : small.CLASSES]
        for layer in self.layers:
            if float(torch.rand([])) > 0.5:
                outputs = outputs + F.dropout(layer(inputs), 0.3)
        return torch.as_tensor(self.head(outputs))


@pytest.mark.parametrize("model", [TimeMajor, Packed, Dropping])
def test_those_in_any_order_are_replaced_and_raise_no_alarm(model: type[nn.Module]) -> None:
    verification = found(model)
    assert verification.equivalent
    assert verification.neutral_random
    assert "random_neutral" in codes(verification.notes)


def test_parts_without_weight_draw_for_the_full_batch_all_the_same() -> None:
    def masked(size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = small.pairs(size)
        return inputs, targets.index_fill(0, torch.arange(2, size // 2 + 1), -100)

    verification = verify(
        Workload(model=small.dropped, batch=masked, criterion=nn.CrossEntropyLoss(ignore_index=-100)),
        target_batch=8,
        micro_batch=2,
    )
    assert verification.equivalent
    assert verification.notes == ()
