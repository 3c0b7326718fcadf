"""The parts of a study on a card: trainings in processes, a plan that trains.

Optuna is not needed: no study is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autoaccum.api import plan
from autoaccum.options import Options
from autoaccum.sources.loading import load_workload
from autoaccum.sources.workload import Workload
from autoaccum.training.fit_events import Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.trial_training import train_setting
from autoaccum.tuning.tuning_records import Outcome, Row, TuneRequest

TARGET, SAMPLES, WIDTH = 64, 640, 16
RATE = 0.05

WORKLOAD = """
import torch
from torch import nn

WIDTH, SAMPLES, DEPTH = {width}, {samples}, {depth}
inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs.roll(1, 1))
criterion = nn.MSELoss()
seen = set()

class Told(nn.Module):
    def forward(self, x):
        if len(x) not in seen:
            seen.add(len(x))
            print("micro-batch", len(x), flush=True)
        return x

def model():
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(Told(), *layers, nn.Linear(WIDTH, WIDTH))

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def batch(size):
    return dataset[torch.arange(size) % SAMPLES]
"""


@pytest.fixture(scope="module")
def reference(write_workload: Callable[[str], str]) -> str:
    return write_workload(WORKLOAD.format(width=WIDTH, samples=SAMPLES, depth=1))


def train_here(
    workload: Workload,
    place: torch.device,
    rate: float = RATE,
    micro_batch: int = 16,
    should_continue: Callable[[int, float], bool] = lambda percent, loss: True,
) -> Outcome:
    return train_setting(
        workload,
        learning_rate=rate,
        target_batch=TARGET,
        micro_batch=micro_batch,
        budget=SAMPLES,
        seed=0,
        evaluation_batch=32,
        device=str(place),
        should_continue=should_continue,
    )


def test_a_setting_trains_alike_in_whatever_micro_batches(place: torch.device, reference: str) -> None:
    workload = load_workload(reference)
    looked: list[tuple[int, float]] = []

    def should_continue(percent: int, loss: float) -> bool:
        looked.append((percent, loss))
        return True

    outcomes = [
        train_here(workload, place, micro_batch=size, should_continue=should_continue) for size in (16, 16, 5, TARGET)
    ]
    assert {outcome.state for outcome in outcomes} == {"complete"}
    assert {outcome.samples for outcome in outcomes} == {SAMPLES}
    assert [percent for percent, _ in looked] == [25, 50] * 4
    losses = [outcome.loss for outcome in outcomes]
    assert losses[0] is not None
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    if place.type == "cpu":
        assert losses[0] == losses[1]


@pytest.mark.gpu
def test_a_plan_of_the_card_is_trained_in_children_and_by_fit(write_workload: Callable[[str], str]) -> None:
    width, depth, target = 1024, 16, 16384
    reference = write_workload(WORKLOAD.format(width=width, samples=4 * target, depth=depth))
    made = plan(reference, target_batch=target, device="cuda", memory="1GiB")
    assert made.iter_size > 1, "the budget binds"
    request = TuneRequest(reference=reference, target_batch=target, options=Options(device="cuda"))
    asked: list[int] = []

    def ending(percent: int, loss: float) -> bool:
        asked.append(percent)
        return len(asked) < 5  # The first two go on to the end, the last is told to leave.

    processes = TrialProcesses(request)
    row = Row(number=0, state="running", learning_rate=RATE, target_batch=target, micro_batch=made.micro_batch)
    first = processes.train(row, made, 2 * target, ending)
    wild = processes.train(replace(row, learning_rate=1e30), made, 2 * target, lambda percent, loss: True)
    again = processes.train(row, made, 2 * target, ending)
    pruned = processes.train(row, made, 2 * target, ending)
    assert [outcome.state for outcome in (first, wild, again, pruned)] == ["complete", "diverged", "complete", "pruned"]
    assert first.loss is not None
    assert math.isfinite(first.loss)
    assert again.loss == pytest.approx(first.loss, rel=1e-3)
    assert first.oom_retries == 0

    rates: list[float | None] = []
    best = replace(made, learning_rate=RATE)
    result = train(
        FitRequest.of(reference, {"target_batch": target, "plan": best, "steps": 3, "device": "cuda"}),
        on_event=lambda event: rates.append(event.learning_rate) if isinstance(event, Updated) else None,
    )
    assert rates == [RATE] * 3
    assert (result.oom_retries, result.plan) == (0, best)
