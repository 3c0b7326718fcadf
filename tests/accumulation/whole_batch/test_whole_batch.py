"""`whole_batch(x)`: the tensor of all samples, within an update in micro-batches and outside of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from whole_batches import Experts, Recorded, check_equal

from autoaccum import whole_batch
from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import UsageError, WorkloadError


def balanced(model: nn.Module, batch: Any) -> Tensor:
    outputs, balance = model(batch[0])
    return torch.as_tensor(functional.cross_entropy(outputs, batch[1]) + balance)


class Standardised(nn.Module):
    """A BatchNorm of one's own, called twice; it changes what it gets in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = layer(x)
            with torch.no_grad():
                largest = whole_batch(x.clone()).mul_(2).amax()
            everyone = whole_batch(x)
            x = (x - everyone.mean(0)) / (everyone.var(0) + 0.1).sqrt() + 0.1 * largest
        return x


def in_the_loss(model: nn.Module, batch: Any) -> Tensor:
    """A contrastive loss of each part's rows against all rows, and a number of the whole batch."""
    mine = functional.normalize(model(batch[0]))
    everyone, labels = whole_batch(mine), whole_batch(batch[1])
    same = (batch[1][:, None] == labels).to(mine.dtype)
    return torch.as_tensor((mine @ everyone.T - same).square().sum(1).mean() / labels.sum())


def batch_of(size: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6, dtype=torch.float64), torch.arange(size) % 3


CASES: list[tuple[type[nn.Module], Any]] = [
    (Experts, balanced),
    (Standardised, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])),
    (Standardised, in_the_loss),
]


@pytest.mark.parametrize(("kind", "loss"), CASES)
@pytest.mark.parametrize("micro_batch", [1, 2, 5, 9])
def test_the_gradient_is_the_full_batch_s(kind: type[nn.Module], loss: Any, micro_batch: int) -> None:
    model, batch = kind().double(), batch_of()
    recorded = Recorded(model, loss, micro_batch=micro_batch)
    for _ in range(2):
        result = recorded.step(batch)
        check_equal(recorded, model, loss, batch)
        assert result.loss == pytest.approx(float(loss(model, batch).detach()), abs=1e-12)
    assert result.retries == 0


def test_a_part_without_weight_is_part_of_the_whole() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs, balance = model(batch[0])
        kept = batch[1] >= 0
        return torch.as_tensor(
            functional.cross_entropy(outputs, batch[1], reduction="sum") / kept.sum().clamp(min=1) + balance
        )

    model, batch = Experts().double(), batch_of(6)
    batch[1][3:] = -100
    recorded = Recorded(model, loss, weight=lambda batch: (batch[1] >= 0).sum(), micro_batch=3)
    recorded.step(batch)
    check_equal(recorded, model, loss, batch)


def test_within_a_coupled_loss_it_is_what_is_there_already() -> None:
    def outputs(model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def coupled_loss(outputs: Tensor, batch: Any) -> Tensor:
        everyone = whole_batch(functional.normalize(outputs))
        return (everyone @ everyone.T).square().mean()

    model, batch = Standardised().double(), batch_of()
    recorded = Recorded(model, outputs=outputs, coupled_loss=coupled_loss, micro_batch=2)
    recorded.step(batch)
    check_equal(recorded, model, lambda model, batch: coupled_loss(outputs(model, batch), batch), batch)


def test_elsewhere_it_is_the_tensor_itself() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert whole_batch(x) is x
    model, batch = Experts().double(), batch_of()
    Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), balanced, micro_batch=2).step(batch)
    assert whole_batch(x) is x
    with torch.no_grad():
        assert model.eval()(batch[0])[1].shape == ()


@pytest.mark.parametrize("x", [3.0, torch.tensor(1.0), [torch.ones(2)]])
def test_it_needs_rows(x: Any) -> None:
    with pytest.raises(WorkloadError, match=r"whole_batch\(x\) needs a tensor whose first dimension is the sample"):
        whole_batch(x)


def test_rows_of_different_length_are_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(whole_batch(model(batch)[:, : 6 - len(batch)]).sum())

    model = nn.Linear(6, 6)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), loss, micro_batch=2)
    with pytest.raises(WorkloadError, match=r"different shapes or dtypes: \[2, 4\] of float32, \[1, 5\] of float32: "):
        accumulator.step(torch.randn(3, 6))


def test_recomputed_parts_and_running_statistics_are_refused() -> None:
    def recompute(model: nn.Module, batch: Any) -> Tensor:
        inner = checkpoint(lambda x: model(whole_batch(model(x))).square(), batch, use_reentrant=False)
        return torch.as_tensor(inner).sum()

    def plain(model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(whole_batch(model(batch)).sum())

    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(WorkloadError, match=r"whole_batch\(x\) runs within backward \(activation checkpointing\), "):
        Accumulator(model, optimizer, recompute, micro_batch=2).step(torch.randn(4, 6))
    with pytest.raises(UsageError, match='batchnorm is "running", and parts of the batch need each other: take batchn'):
        Accumulator(model, optimizer, plain, micro_batch=2, batchnorm="running").step(torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it.
def test_a_compiled_model_runs_uncompiled() -> None:
    model, batch = Experts().double(), batch_of()
    compiled: Any = torch.compile(model, backend="eager")
    recorded = Recorded(model, lambda model, batch: balanced(compiled, batch), micro_batch=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: recorded.gradients.update(_gradients(model)))
    Accumulator(model, optimizer, lambda _, batch: balanced(compiled, batch), micro_batch=2).step(batch)
    check_equal(recorded, model, balanced, batch)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("batchnorm", ["micro", "exact"])
def test_a_sum_in_which_a_term_of_all_samples_would_count_often_is_refused(batchnorm: Any) -> None:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters())
    accumulator = Accumulator(model, optimizer, balanced, reduction="sum", micro_batch=2, batchnorm=batchnorm)
    with pytest.raises(WorkloadError, match="alike would count once for each of them") as refused:
        accumulator.step((torch.randn(4, 6), torch.randint(3, (4,))))
    assert "coupled_loss" in (refused.value.hint or "")
    accumulator.step((torch.randn(2, 6), torch.randint(3, (2,))))  # One micro-batch is the whole batch.


class Noted(nn.Module):
    """Keeps a loss of its activations on itself, and gates for a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        self.penalty = hidden.square().mean()
        return self.last(self.norm(hidden))


def test_a_part_finds_what_it_has_set_on_a_module() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return torch.as_tensor(functional.cross_entropy(outputs, batch[1]) + model.penalty)

    model, batch = Noted().double(), batch_of()
    recorded = Recorded(model, loss, batchnorm="exact", micro_batch=2)
    recorded.step(batch)
    check_equal(recorded, model, loss, batch)


def test_a_gradient_within_the_loss_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, retain_graph=True)
        return torch.as_tensor(functional.cross_entropy(outputs, batch[1]) + slope.square().mean())

    recorded = Recorded(Noted().double(), loss, batchnorm="exact", micro_batch=2)
    with pytest.raises(
        WorkloadError, match="a gradient is computed within the loss, through BatchNorm, where it cannot"
    ):
        recorded.step(batch_of())


def test_it_records_no_gradient_where_none_is_recorded() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        assert not whole_batch(x).requires_grad
