from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import make_settings
from small_classifier import layers_file
from torch import Tensor, nn

from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.inspection import DrawRecorder, inspect_workload
from autoaccum.errors import WorkloadError
from autoaccum.sources.workload import Workload


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2)


def make(model: Any = linear, **changes: Any) -> Workload:
    return Workload(model=model, **{"batch": batch, "criterion": nn.MSELoss(), **changes})


def with_loss(loss: Callable[[nn.Module, Any], Any]) -> Workload:
    return make(criterion=None, loss=loss)


def test_reports_what_will_be_trained() -> None:
    inspection = inspect_workload(make(name="small", optimizer="sgd"), rank_samples=8)
    facts = inspection.workload
    assert (facts.name, facts.model, facts.optimizer, facts.loss, facts.reduction) == (
        *("small", "Linear", "SGD"),
        *("criterion", "mean"),
    )
    assert (facts.parameters, facts.parameter_bytes) == (10, 40)
    assert "MSELoss" in facts.weight
    assert inspect_workload(with_loss(lambda m, b: m(b[0]).mean()), rank_samples=8).workload.loss == "loss"
    assert inspection.warnings == ()
    assert inspection.environment["torch"] == torch.__version__
    assert inspection.environment["threads"] == torch.get_num_threads()


def test_passes_on_what_the_check_of_the_weighting_says() -> None:
    def tokens(size: int) -> tuple[Tensor, Tensor]:
        targets = torch.randint(0, 2, (size, 6))
        for row in range(size):
            targets[row, 1 + row % 5 :] = -100
        return torch.randn(size, 6, 4), targets

    def token_mean(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    warnings = inspect_workload(make(batch=tokens, criterion=None, loss=token_mean), rank_samples=8).warnings
    assert warnings


def test_names_what_accumulation_changes_and_passes_other_warnings_on() -> None:
    class Loud(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            warnings.warn("the model's own", DeprecationWarning, stacklevel=1)
            return super().forward(input)

    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(Loud(4, 2)))
    with pytest.warns(DeprecationWarning, match="the model's own"):
        (warning,) = inspect_workload(make(lambda: model), rank_samples=8).accumulation_warnings
    assert warning.code == "buffers_written"


def test_reports_the_least_size() -> None:
    plain = inspect_workload(make(), rank_samples=8)
    assert (plain.least_size, plain.update_samples) == (1, 2)
    normed = make(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    assert inspect_workload(normed, rank_samples=8).least_size == 2


@pytest.mark.usefixtures("warm_children")
def test_reports_the_memory_of_an_update(write_workload: Any) -> None:
    """In a child: the heap of this process may have room for all of it already."""
    with CpuDevice(make_settings(write_workload(layers_file(1000, 1000)), 8)) as device:
        found = device.inspect()
    assert found.update_bytes is not None
    assert found.update_bytes > 4 * (found.workload.parameter_bytes or 0), (
        "parameters, gradients and Adam's two moments at least"
    )


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (with_loss(lambda model, batch: model(batch[0])), r"not a scalar but of shape \(2, 2\)"),
        (with_loss(lambda model, batch: batch[0].mean()), "not connected to any trainable parameter"),
        (with_loss(lambda model, batch: model(batch[0]).mean() * float("nan")), r"the loss of batch\(2\) is nan"),
        (with_loss(lambda model, batch: model(batch[0]).mean() / 0), r"the loss of batch\(2\) is -?inf"),
        (with_loss(lambda model, batch: model(batch[0]).mean().item()), "is a float, not a tensor"),
        (make(nn.ReLU), "none of the 0 parameters of ReLU is trainable"),
        (make(batch=lambda size: batch(3)), r"batch\(2\) returned 3 samples"),
        (make(optimizer=lambda params: [torch.optim.SGD(params, lr=0.1)]), "optimizer"),
    ],
)
def test_refuses_what_cannot_be_trained(workload: Workload, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        inspect_workload(workload, rank_samples=8)


class Drawing(nn.Linear):
    """A layer that draws random numbers, and may decide by them what it keeps for backward."""

    def __init__(self, decide: Callable[[Tensor], bool]) -> None:
        super().__init__(4, 2)
        self.decide = decide

    def forward(self, input: Tensor) -> Tensor:
        masked = nn.functional.dropout(input, 0.5)
        output = super().forward(masked)
        return output.exp().log() if self.decide(masked) else output


@pytest.mark.parametrize(
    ("decide", "is_read", "varies"),
    [
        (lambda masked: False, False, False),
        (lambda masked: bool(torch.ones(2).all()), False, False),
        (lambda masked: bool(masked.sum() > 0), True, True),
        (lambda masked: masked.nonzero().shape[0] % 2 > 0, True, True),
        (lambda masked: random.random() < 0.5, False, True),
        (lambda masked: bool(masked.isnan().any()), True, False),
    ],
    ids=[
        *("dropout", "reads what is not drawn", "reads what is drawn", "counts what is drawn", "draws on the host"),
        "reads what is drawn and does the same",
    ],
)
def test_the_memory_of_a_forward_varies_only_where_draws_decide_what_runs(
    decide: Callable[[Tensor], bool], is_read: bool, varies: bool
) -> None:
    def batch_of_a_random_length(size: int) -> tuple[Tensor, Tensor]:
        length = random.randint(1, 100)
        return torch.randn(size, length, 4), torch.randn(size, length, 2)

    with DrawRecorder() as recorder:
        Drawing(decide)(torch.ones(2, 4))
    assert recorder.decides == is_read
    workload = make(lambda: Drawing(decide), batch=batch_of_a_random_length)
    notes = inspect_workload(workload, rank_samples=8).notes
    assert ("random_memory" in [note.code for note in notes]) == varies


def test_tells_what_every_size_holds_and_not_the_copy_of_the_first_update() -> None:
    wide = make(lambda: nn.Linear(1000, 1000), batch=lambda size: (torch.ones(size, 1000), torch.ones(size, 1000)))
    found = inspect_workload(wide, rank_samples=8)
    counts_of_steps = 2 * 4
    assert found.resident_bytes == 4 * 4 * 1_001_000 + counts_of_steps, "a gradient and two moments of each parameter"
