from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.devices.trial_run import TrialRun
from autoaccum.errors import WorkloadError
from autoaccum.sources.workload import Workload

Seen = list[tuple[int, bool, int]]


@pytest.fixture
def seen() -> Seen:
    """For each forward: its number of samples, whether a gradient was resident, and the bytes that it is a view of."""
    return []


@pytest.fixture
def workload(seen: Seen) -> Workload:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, inputs: Tensor) -> Any:
            seen.append((len(inputs), self.linear.weight.grad is not None, inputs.untyped_storage().nbytes()))
            return self.linear(inputs)

    return Workload(
        model=Recorder,
        batch=lambda size: (torch.randn(size, 3), torch.randn(size, 1)),
        criterion=nn.MSELoss(),
        optimizer="adam",
    )


def test_accumulates_after_an_update_on_views_of_the_whole_share(workload: Workload, seen: Seen) -> None:
    TrialRun(workload, rank_samples=10).run((4, 3, 3))
    whole = 10 * 3 * 4
    assert seen == [(4, False, whole), (4, False, whole), (3, True, whole), (3, True, whole)]


@pytest.mark.parametrize(
    ("parts", "lead", "sizes"),
    [
        ((4, 4), 2, [(2, False), (2, False), (4, True)]),
        ((4, 4, 2), 1, [(1, False), (1, False), (4, True), (2, True)]),
        ((4, 3), 2, [(2, False), (4, False), (3, True)]),
        ((8,), 2, [(2, False), (8, False)]),
        ((2, 2), 3, [(2, False), (2, False), (2, True)]),
    ],
)
def test_a_lead_stands_for_what_only_makes_state_and_gradients(
    workload: Workload, seen: Seen, parts: tuple[int, ...], lead: int, sizes: list[tuple[int, bool]]
) -> None:
    TrialRun(workload, rank_samples=10).run(parts, lead=lead)
    assert [(size, has_gradient) for size, has_gradient, _ in seen] == sizes


def test_after_a_lead_the_others_have_the_samples_that_they_have_without(workload: Workload) -> None:
    """Samples may differ in size, and the longest come first."""
    seen: dict[int | None, list[list[float]]] = {None: [], 2: []}
    for lead, inputs in seen.items():

        def loss(model: nn.Module, batch: Any, inputs: list[list[float]] = inputs) -> Tensor:
            inputs.append(batch.flatten().tolist())
            outputs: Tensor = model(batch)
            return outputs.mean()

        numbered = Workload(
            model=lambda: nn.Linear(1, 1), batch=lambda size: torch.arange(size)[:, None] * 1.0, loss=loss
        )
        TrialRun(numbered, rank_samples=10).run((4, 4, 2), lead=lead)
    assert seen[2][2:] == seen[None][2:]
    assert seen[2][:2] == [[0, 1]] * 2


def test_every_trial_draws_the_same_numbers(workload: Workload) -> None:
    drawn = []
    for _ in range(2):
        TrialRun(workload, rank_samples=2).run((1, 1))
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no")


def fail(*_: Any) -> Any:
    raise ValueError("no")


def fail_later(model: nn.Module, batch: Any) -> Any:
    apply: Any = Failing.apply
    return apply(model(batch[0])).mean()


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        ("model", {"model": lambda: fail()}),
        ("optimizer", {"optimizer": lambda params: fail()}),
        ("batch", {"batch": lambda size: fail()}),
        ("forward", {"loss": lambda model, batch: fail()}),
        ("backward", {"loss": fail_later}),
    ],
)
def test_reports_the_phase_that_failed(phase: str, change: dict[str, Any]) -> None:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "batch": lambda size: (torch.randn(size, 3), torch.randn(size, 1)),
        "loss": lambda model, batch: model(batch[0]).mean(),
    }
    trial_run = TrialRun(Workload(**{**parts, **change}), rank_samples=4)
    assert trial_run.phase == "start"
    with pytest.raises(ValueError, match="no"):
        trial_run.run((2, 2))
    assert trial_run.phase == phase


def test_without_an_update_there_is_no_peak_to_report() -> None:
    workload = Workload(
        model=lambda: nn.Linear(3, 2),
        batch=lambda size: (torch.randn(size, 3), torch.full((size,), -100)),
        criterion=nn.CrossEntropyLoss(),
    )
    with pytest.raises(WorkloadError, match="no update was made"):
        TrialRun(workload, rank_samples=4).run((2, 2))
