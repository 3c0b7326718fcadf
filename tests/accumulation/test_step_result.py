"""A step calls its observer, and refuses an update that is not finite without a trace."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.errors import NonFiniteError


class Observed(StepObserver):
    def __init__(self, stop_at: int | None = None) -> None:
        self.phases: list[StepPhase] = []
        self.retries: list[tuple[StepPhase, int, int]] = []
        self._stop_at = stop_at

    def phase(self, phase: StepPhase) -> None:
        self.phases.append(phase)
        if self._stop_at is not None and len(self.phases) > self._stop_at:
            raise InterruptedError("enough")

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        self.retries.append((phase, micro_batch, next_micro_batch))


class Short(nn.Linear):
    """Runs out of memory with more than `most` samples."""

    most = 3

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def batch(samples: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, samples * 3).reshape(samples, 3) * scale, torch.ones(samples, 2)


def accumulator(model: nn.Module, observer: StepObserver, **options: object) -> Accumulator:
    settings: dict[str, object] = {"micro_batch": 4, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Accumulator(model, optimizer, nn.MSELoss(), observer=observer, **settings)  # type: ignore[arg-type]


def test_phases_are_observed_in_order() -> None:
    observer = Observed()
    accumulator(nn.Linear(3, 2), observer).step(batch(10))
    assert observer.phases == ["batch", *["batch", "forward", "backward"] * 3, "clip", "update"]


def test_out_of_memory_is_observed_without_a_warning() -> None:
    observer = Observed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = accumulator(Short(3, 2), observer, micro_batch=8).step(batch(8))
    assert result.retries == len(observer.retries) > 0
    assert all(phase == "forward" for phase, _, _ in observer.retries)
    assert all(then < tried for _, tried, then in observer.retries)
    assert all(tried <= then for (_, _, then), (_, tried, _) in pairwise(observer.retries))


@pytest.mark.filterwarnings("ignore::autoaccum.AccumulationWarning")
def test_an_error_of_the_observer_at_any_phase_undoes_the_step() -> None:
    count = 12
    for stop_at in range(count):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = state_digest(model, optimizer)
        step = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=4, observer=Observed(stop_at)).step
        with pytest.raises(InterruptedError):
            step(batch(10))
        assert state_digest(model, optimizer) == before


@pytest.mark.parametrize(("scale", "clip_norm", "seen"), [(math.inf, None, "loss"), (1e25, 1.0, "norm")])
def test_an_update_that_is_not_finite_is_refused_before_it_is_made(
    scale: float, clip_norm: float | None, seen: str
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)) if scale == math.inf else nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=20, clip_norm=clip_norm, check_finite=True).step
    step(batch(8))
    before = state_digest(model, optimizer)
    with pytest.raises(NonFiniteError, match=f"{seen}.*the update was not made.*lower the learning rate") as caught:
        step(batch(8, scale))
    assert state_digest(model, optimizer) == before
    assert not math.isfinite(caught.value.loss) or not math.isfinite(caught.value.grad_norm or 0.0)
    assert step(batch(8)).updated


def test_a_scaler_s_overflow_is_not_refused() -> None:
    model = nn.Linear(3, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    result = accumulator(model, Observed(), scaler=scaler, clip_norm=1.0, check_finite=True).step(batch(8, 1e9))
    assert not result.updated
