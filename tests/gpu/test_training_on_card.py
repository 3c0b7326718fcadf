"""A whole training on a card, and what a study runs there: exact, resumed, with less memory in mid-run, by its plan.

Optuna is not needed: no study is opened here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.api import plan
from autoaccum.options import Options
from autoaccum.training.fit_events import FitResult, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train
from autoaccum.tuning.trial_processes import Train, TrialProcesses
from autoaccum.tuning.tuning_records import TuneRequest

WIDTH, SAMPLES, TARGET = 64, 480, 96


def build(place: torch.device | str, width: int = WIDTH, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width)
    return nn.Sequential(*layers).to(place, torch.float64)


def make_data(width: int = WIDTH) -> TensorDataset:
    x = torch.randn(SAMPLES, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.roll(1, 1))


def fit(model: nn.Module, data: Any, heard: Callable[[Any], Any] = id, **options: Any) -> FitResult:
    settings: dict[str, Any] = {"loss": nn.MSELoss(), "micro_batch": 20, "target_batch": TARGET, "steps": 30}
    settings |= {"device": str(next(model.parameters()).device)} | options
    return train(FitRequest.of(model, {"data": data, "callbacks": [heard], **settings}))


def check_same_weights(one: nn.Module, other: nn.Module, bound: float = 1e-9) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)


def test_thirty_updates_are_those_of_full_batches(place: torch.device) -> None:
    model, data, heard = build(place), make_data(), list[Any]()
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters())
    fit(model, DataLoader(data, batch_size=32), heard.append, optimizer="AdamW")
    for update in range(30):
        start = update * TARGET % SAMPLES
        x, y = (tensor[start : start + TARGET].to(place) for tensor in data.tensors)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(other(x), y))
        optimizer.step()
    check_same_weights(model, other)
    assert all((event.peak_bytes or 0) > 0 for event in heard if isinstance(event, Updated))


def test_a_stopped_run_goes_on_with_its_generators(place: torch.device, tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, Updated) and event.update == 11:
            raise InterruptedError

    data = make_data()
    torch.manual_seed(0)
    whole = fit(build(place, dropout=0.3), data, run_dir=tmp_path / "whole")
    with pytest.raises(InterruptedError):
        fit(build(place, dropout=0.3), data, stop, run_dir=tmp_path / "parts")
    torch.manual_seed(5)
    resumed = fit(build(place, dropout=0.3), data, run_dir=tmp_path / "parts")
    assert resumed.resumed_from is not None
    check_same_weights(whole.model, resumed.model, 0 if place.type == "cpu" else 1e-9)


@pytest.mark.gpu
def test_a_limit_lowered_in_mid_run_changes_no_result() -> None:
    width, heard = 2048, list[Any]()
    data = make_data(width)
    plain, limited = build("cuda:0", width), build("cuda:0", width)
    fit(plain, data, micro_batch=TARGET, steps=60)
    torch.cuda.empty_cache()

    def limit(event: Any) -> None:
        heard.append(event)
        if isinstance(event, Updated) and event.update in (3, 8):
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            held = torch.cuda.memory_reserved(0) / total
            torch.cuda.set_per_process_memory_fraction(held + 2**22 / total if event.update == 3 else 1.0, 0)

    try:
        result = fit(limited, data, limit, micro_batch=TARGET, steps=60)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert result.oom_retries == sum(event.retries for event in heard if isinstance(event, Updated)) > 0
    check_same_weights(plain, limited)


@pytest.mark.gpu
def test_it_plans_on_the_card_first_and_leaves_no_trace() -> None:
    data = make_data(1024)
    planned = fit(build("cuda:0", 1024), data, micro_batch=None, memory="512MiB", steps=6)
    assert planned.plan is not None
    assert planned.plan.kind == "measured"
    given = fit(build("cuda:0", 1024), data, micro_batch=planned.plan.micro_batch, steps=6)
    check_same_weights(planned.model, given.model)


STUDIED = """
import torch
from torch import nn

inputs = torch.randn(65536, 1024, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs.roll(1, 1))
criterion = nn.MSELoss()

def model():
    layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(1024, 1024))

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def batch(size):
    return dataset[torch.arange(size) % len(dataset)]
"""


@pytest.mark.gpu
def test_a_plan_of_the_card_is_trained_in_children_and_by_fit(write_workload: Callable[[str], str]) -> None:
    target, rate, asked = 16384, 0.05, list[int]()
    reference = write_workload(STUDIED)
    made = plan(reference, target_batch=target, device="cuda", memory="1GiB")
    assert made.iter_size > 1, "the budget binds"

    def ending(percent: int, loss: float) -> bool:
        asked.append(percent)
        return len(asked) < 5  # The first two go on to the end, the last is told to leave.

    processes = TrialProcesses(TuneRequest(reference=reference, target_batch=target, options=Options(device="cuda")))
    sizes = {"target_batch": target, "micro_batch": made.micro_batch, "evaluation_batch": made.largest_fit}
    training = Train(learning_rate=rate, **sizes, budget=2 * target, seed=0)
    first = processes.train(training, ending)
    wild = processes.train(replace(training, learning_rate=1e30), lambda percent, loss: True)
    again = processes.train(training, ending)
    pruned = processes.train(training, ending)
    assert [outcome.state for outcome in (first, wild, again, pruned)] == ["complete", "diverged", "complete", "pruned"]
    assert first.loss is not None
    assert again.loss == pytest.approx(first.loss, rel=1e-3)
    assert first.oom_retries == 0

    rates: list[float | None] = []
    best = replace(made, learning_rate=rate)
    result = train(
        FitRequest.of(reference, {"target_batch": target, "plan": best, "steps": 3, "device": "cuda"}),
        on_event=lambda event: rates.append(event.learning_rate) if isinstance(event, Updated) else None,
    )
    assert rates == [rate] * 3
    assert (result.oom_retries, result.plan) == (0, best)
