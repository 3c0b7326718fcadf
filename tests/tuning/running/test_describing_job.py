from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from tuned_workloads import Asker, Streamed, line_data, line_workload, order_of

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.running.describing_job import find_facts
from autoaccum.tuning.running.training_job import train_setting
from autoaccum.tuning.settings import Budget


def test_facts_are_those_of_what_is_built() -> None:
    workload = line_workload(
        batch=lambda size: line_data(size)[:],
        scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
        precision="bf16",
        digest="abc",
    )
    assert find_facts(workload, "cpu", 16) == Facts(
        name="line",
        digest="abc",
        model="Linear",
        parameters=4,
        optimizer="SGD",
        learning_rate=0.05,
        schedule="StepLR",
        precision="bf16",
        batchnorm="micro",
        has_batch=True,
        training_samples=72,
        held_out="8 of 80 samples of dataset, drawn by seed 0",
        device="cpu",
    )


def test_what_does_not_tell_is_not_told() -> None:
    facts = find_facts(line_workload(dataset=Streamed(), evaluation_dataset=Streamed(8)), "cpu", 16)
    assert (facts.training_samples, facts.held_out) == (None, "evaluation_dataset")
    assert (facts.schedule, facts.has_batch) == (None, False)


def test_batchnorms_that_normalise_by_the_batch_are_named() -> None:
    def model() -> torch.nn.Module:
        layers = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1)
        made = torch.nn.Sequential(*layers)
        made[3].eval()
        return made

    assert find_facts(line_workload(model=model), "cpu", 16).batchnorms == ("1",)


def test_what_is_frozen_does_not_train() -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.Linear(3, 1)
        made.bias.requires_grad_(False)
        return made

    assert find_facts(line_workload(model=model), "cpu", 16).parameters == 3


class Rateless(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        """Stand still."""


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": Rateless}, "has no lr"),
        ({"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)}, "is 0"),
        ({"scheduler": one_cycle}, "OneCycleLR sets learning rates of its own.*: have it begin with the optimizer's"),
        ({"dataset": None, "batch": line_data}, "line has no dataset to train on"),
        ({"dataset": line_data(16)}, "14 samples are trained on, fewer than the target batch of 16"),
    ],
    ids=["no-rate", "rate-0", "one-cycle", "no-dataset", "too-few"],
)
def test_what_cannot_be_tuned_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        find_facts(line_workload(**given), "cpu", 16)


def follows(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=5)


def test_one_cycle_that_follows_is_fine() -> None:
    assert find_facts(line_workload(scheduler=follows), "cpu", 16).schedule == "OneCycleLR"
    for budget in (Budget(72, "samples"), Budget(1000.0, "seconds")):
        assert find_facts(line_workload(scheduler=follows), "cpu", 16, budget=budget).schedule == "OneCycleLR"
    order = order_of(target=16, budget=Budget(72, "samples"))
    outcome = train_setting(line_workload(scheduler=follows), order, Asker())
    assert (outcome.state, outcome.updates) == ("complete", 5)


@pytest.mark.parametrize(
    ("asked", "updates"),
    [({"least_batch": 8}, 9), ({"budget": Budget(73, "samples")}, 6)],
    ids=["small-batches", "one-too-few"],
)
def test_a_schedule_that_is_over_before_a_trial_is_refused(asked: dict[str, Any], updates: int) -> None:
    with pytest.raises(
        WorkloadError, match=f"made for 5 updates, and a trial makes {updates}: .*total_steps={updates},"
    ):
        find_facts(line_workload(scheduler=follows), "cpu", 16, **asked)


@pytest.mark.without_gpu
def test_a_card_that_is_not_there_is_told() -> None:
    with pytest.raises(UsageError, match="--device cuda"):
        find_facts(line_workload(), "cuda", 16)
