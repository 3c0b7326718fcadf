"""Experiments on one batch: whole and accumulated, from equal copies, under equal draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Workload
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.errors import WorkloadError
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import UpdateResult

pytestmark = pytest.mark.filterwarnings(f"ignore::{AccumulationWarning.__module__}.AccumulationWarning")
SIZES = (3, 3, 2)


class Net(nn.Module):
    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(drop), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.drop(torch.tanh(self.first(inputs))))
        return outputs.float()  # as transformers do


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def make(**fields: Any) -> Workload:
    chosen: dict[str, Any] = {"model": Net, "batch": batch, "criterion": nn.CrossEntropyLoss(), "optimizer": "SGD"}
    return Workload(**{**chosen, **fields})


def runs(workload: Workload, sizes: tuple[int, ...] = SIZES, **options: Any) -> PairedRuns:
    torch.manual_seed(0)
    return PairedRuns(Fixture(workload, **options), workload.build_batch(sum(sizes)), sizes)


def distance(one: UpdateResult, other: UpdateResult) -> float:
    """The largest difference of two gradients, relative to the largest entry of the first."""
    scale = max(float(gradient.abs().max()) for gradient in one.gradients.values())
    return max(float((one.gradients[name] - other.gradients[name]).abs().max()) for name in one.gradients) / scale


def test_the_full_run_is_plain_pytorch_in_float64() -> None:
    found = runs(make()).pair().full
    torch.manual_seed(0)
    reference = Net().double()
    inputs, targets = batch(8)
    hidden = torch.tanh(reference.first(inputs.double()))
    loss = F.cross_entropy(reference.last(hidden), targets)
    torch.autograd.backward(loss)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-14)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_accumulated_equals_full_under_the_same_random_numbers(drop: float) -> None:
    made = runs(make(model=lambda: Net(drop=drop)))
    pair = made.pair()
    assert distance(pair.full, pair.accumulated) < 1e-14
    assert pair.accumulated.loss == pytest.approx(pair.full.loss, rel=1e-14)
    assert made.mismatch is None


class TimeMajor(nn.Module):
    """Drops entries of (time * samples, width), the samples innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = F.dropout(inputs.t().reshape(-1, 1), 0.5)
        outputs: Tensor = self.linear(rows).unflatten(0, (inputs.shape[1], len(inputs))).mean(0)
        return outputs


class Packed(nn.Module):
    """Drops entries of packed sequences, whose rows go by time among those that are that long."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 3, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = 1 + (inputs[:, 1:] > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(inputs[..., None], lengths, batch_first=True, enforce_sorted=False)
        outputs: Tensor = self.head(self.rnn(packed)[1][0][-1])
        return outputs


class Dropping(nn.Module):
    """Leaves a layer out for all samples at once, which moves the draws behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            if float(torch.rand([])) > 0.5:
                inputs = inputs + F.dropout(layer(inputs), 0.3)
        outputs: Tensor = self.head(inputs)
        return outputs


@pytest.mark.parametrize("model", [TimeMajor, Packed, Dropping])
def test_random_numbers_in_any_order_raise_no_alarm(model: type[nn.Module]) -> None:
    made = runs(make(model=model))
    assert distance(made.pair().full, made.pair().accumulated) < 1e-13
    assert made.mismatch is not None


def test_a_loop_that_updates_by_itself_is_refused() -> None:
    def updating(model: nn.Module, micro_batches: list[Any]) -> None:
        for parameter in model.parameters():
            parameter.data.add_(1)

    with pytest.raises(WorkloadError, match="has changed the parameters: leave the gradient in .grad"):
        runs(make(accumulate=updating)).by_loop().pair()


def test_parts_without_weight_draw_for_the_full_batch_all_the_same() -> None:
    def masked(size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(size)
        targets[3:6] = -100
        return inputs, targets

    made = runs(make(model=lambda: Net(drop=0.5), batch=masked, criterion=nn.CrossEntropyLoss(ignore_index=-100)))
    assert made.mismatch is None
    assert distance(made.pair().full, made.pair().accumulated) < 1e-14


def test_a_loss_that_no_gradient_reaches_is_refused() -> None:
    def unrecorded(model: nn.Module, pair: Any) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(pair[0]), pair[1])

    with pytest.raises(WorkloadError, match="connected to a"):
        runs(make(criterion=None, loss=unrecorded)).pair()
