"""The experiment as a plan makes it: whatever goes wrong within it is a reason, and ends nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import coupled_models as small
import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.company.allotment import TOO_LONG, Allotment, TooLong
from autoaccum.accumulation.company.check import check_live, check_workload
from autoaccum.accumulation.company.findings import Coupling
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import resolve_objective


class KeepingItsLoss(nn.MSELoss):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(1, requires_grad=True)
        self.last = weight * 2


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)
        self.lock = threading.Lock()


class LockedLoss(nn.MSELoss):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class NeverCopied(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("do not copy me")


class NeverWidened(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)

    def double(self) -> Any:
        raise ValueError("no double")


class Leaving(nn.Linear):
    def __init__(self) -> None:
        super().__init__(small.WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        raise SystemExit("no such batch")


FAILING: dict[str, tuple[Callable[[], nn.Module], nn.Module, str]] = {
    "a criterion keeps its loss": (small.mlp, KeepingItsLoss(), "RuntimeError: Only Tensors created explicitly"),
    "a criterion holds a lock": (small.mlp, LockedLoss(), "TypeError: cannot pickle '_thread.lock' object"),
    "a model class holds a lock": (Locked, nn.MSELoss(), "TypeError: cannot pickle '_thread.lock' object"),
    "a copy is refused": (lambda: NeverCopied(), nn.MSELoss(), "the model cannot be copied"),
    "the user's code leaves": (Leaving, nn.MSELoss(), "SystemExit: no such batch"),
}


def check(model: Callable[[], nn.Module], criterion: nn.Module) -> Coupling:
    return check_workload(Workload(model=model, batch=small.rows, criterion=criterion), small.mlp())


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_within_is_the_reason(name: str) -> None:
    model, criterion, reason = FAILING[name]
    found = check(model, criterion)
    assert not found.found
    assert found.reason is not None
    assert found.reason.startswith(reason)
    live = check_live(model(), resolve_objective(criterion=criterion), small.rows(4), "micro")
    assert live.reason == found.reason or live.reason == "the model cannot be copied"


class NormalisedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.as_tensor((self.norm(outputs) - targets).square().mean())


def test_a_criterion_s_batchnorm_mixes_rows_unless_it_is_frozen() -> None:
    for mode in ("micro", "frozen"):
        criterion = NormalisedLoss()
        found = check_live(small.mlp(), resolve_objective(criterion=criterion), small.rows(4), mode)
        assert found.found is (mode == "micro")
        assert criterion.norm.training


def test_a_model_that_cannot_be_widened_runs_as_it_is() -> None:
    assert check(NeverWidened, nn.MSELoss()) == Coupling(loss=False)


def test_what_takes_too_long_is_ended() -> None:
    class Waiting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(small.WIDTH, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            time.sleep(1.05)
            return super().forward(inputs)

    assert check(Waiting, nn.MSELoss()) == Coupling(reason=TOO_LONG)


def test_an_allotment_has_no_time_for_a_run_that_would_not_end() -> None:
    allotted = Allotment(0.05)
    allotted.begin_run()
    while allotted.used < 0.03:
        pass
    with pytest.raises(TooLong):
        allotted.begin_run()
