"""Plans of updates whose parts need each other: whole schedules run, and the cost of each way is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from factories import FEATURES, Classifier, codes, labelled_rows
from torch import nn

import autoaccum
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import DoesNotFitError
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.plan_report import accumulator_line
from autoaccum.units import MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

LIMIT = MemorySize(bytes=256 * MIB)


class Balanced(nn.Module):
    """Adds a loss of its own, which needs the gates of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.experts = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = autoaccum.whole_batch(self.gates(x).softmax(1)).mean(0)
        return self.experts(x), 4 * (share * share).sum()


def balanced_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs, balance = model(batch[0])
    loss: torch.Tensor = nn.functional.cross_entropy(outputs, batch[1]) + balance
    return loss


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled_rows(size, torch.float32)


def similarity(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    alike = nn.functional.normalize(outputs) @ nn.functional.normalize(outputs).T
    return nn.functional.mse_loss(alike, (targets[:, None] == targets).to(alike))


EXACT = autoaccum.Workload(
    model=lambda: Classifier(norm=True), batch=batch, criterion=nn.CrossEntropyLoss(), batchnorm="exact"
)
COUPLED = autoaccum.Workload(model=Classifier, batch=batch, criterion=similarity, coupled=True)
BALANCED = autoaccum.Workload(model=Balanced, batch=batch, loss=balanced_loss)


@pytest.mark.parametrize(
    ("workload", "whole_batch"), [(EXACT, "lockstep"), (COUPLED, "recompute"), (BALANCED, "lockstep")]
)
def test_trials_run_all_parts_and_nothing_is_said_of_what_is_exact(
    workload: autoaccum.Workload, whole_batch: str
) -> None:
    plan = autoaccum.plan(workload, target_batch=9, max_micro_batch=4, memory=LIMIT)
    assert plan.micro_batches == (3, 3, 3)
    assert [trial.parts for trial in plan.trials] == [(3, 3, 3)] * len(plan.trials)
    assert plan.workload.whole_batch == whole_batch
    assert plan.spec.coupled == workload.coupled
    assert not plan.warnings
    assert plan.host_bytes is None  # On the CPU the peak has it.
    again = Plan.from_json(plan.to_json())
    assert (again, again.digest()) == (plan, plan.digest())


def test_trials_for_several_ranks_hold_the_outputs_of_all_in_two_passes() -> None:
    options: dict[str, Any] = {"target_batch": 17, "world_size": 2, "max_micro_batch": 3, "memory": LIMIT}
    both = dataclasses.replace(EXACT, criterion=similarity, coupled=True)
    coupled, exact, coupled_exact = (autoaccum.plan(workload, **options) for workload in (COUPLED, EXACT, both))
    assert coupled.micro_batches == (3, 3, 3)
    assert {trial.parts for trial in coupled.trials} == {(3, 3, 3, 3, 3, 2)}
    assert {trial.parts for trial in (*exact.trials, *coupled_exact.trials)} == {(3, 3, 3)}
    told = ["outputs_of_ranks" in codes(plan.notes) for plan in (coupled, exact, coupled_exact)]
    assert told == [False, False, True]


def test_an_accumulator_takes_the_plan_s_way() -> None:
    plan = autoaccum.plan(COUPLED, target_batch=8, max_micro_batch=2, memory=LIMIT)
    assert "coupled=True" in accumulator_line(plan)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    for loss in (COUPLED.objective, None):  # What `fit` gives it, and a user.
        criterion = None if loss is not None else similarity
        made = autoaccum.Accumulator(model, optimizer, loss, criterion=criterion, plan=plan)
        assert made.whole_batch == "recompute"
        assert made.step(batch(8)).micro_batches == (2, 2, 2, 2)


def test_exact_takes_parts_of_one_sample_unless_that_is_the_batch() -> None:
    assert inspect_workload(EXACT, rank_samples=2).least_size == 1
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        inspect_workload(EXACT, rank_samples=1)


@pytest.mark.parametrize(
    ("workload", "cure"),
    [
        (dataclasses.replace(EXACT, batchnorm="micro"), 'batchnorm="exact"'),
        (dataclasses.replace(COUPLED, coupled=False), "coupled=True"),
        (
            dataclasses.replace(
                EXACT, batchnorm="micro", model=lambda: nn.Sequential(Centred(), nn.Linear(FEATURES, 4))
            ),
            "autoaccum.whole_batch(x)",
        ),
    ],
)
def test_a_warning_names_the_cure(workload: autoaccum.Workload, cure: str) -> None:
    said = inspect_workload(workload, rank_samples=8).accumulation_warnings
    assert any(cure in str(sentence) for sentence in said), said


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.slow
def test_in_lock_step_the_cpu_holds_the_whole_batch_and_the_error_says_what_helps() -> None:
    def rows(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 8, 4_096), torch.ones(size, 8, 4_096)

    held = autoaccum.Workload(model=Convolved, batch=rows, criterion=nn.MSELoss(), batchnorm="exact")
    with pytest.raises(
        DoesNotFitError, match="in lock step the CPU keeps what backward needs of the whole batch"
    ) as raised:
        autoaccum.plan(held, target_batch=8, max_micro_batch=2, memory=MemorySize(bytes=7 * MIB))
    assert 'batchnorm="running"' in str(raised.value.hint)


class Convolved(nn.Sequential):
    def __init__(self) -> None:
        layers = [module for _ in range(4) for module in (nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Tanh())]
        super().__init__(*layers)
