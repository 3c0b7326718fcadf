"""Studies whose trials train in this process, as the children of `autoaccum tune` do in theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from factories import make_plan
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autoaccum import Workload
from autoaccum.devices.base import Trial
from autoaccum.messages import Message
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Speed, Throughput
from autoaccum.tuning.study import Search, Study, open_storage, study_config
from autoaccum.tuning.trial_processes import Train
from autoaccum.tuning.trial_training import train_setting
from autoaccum.tuning.tuning_records import (
    LearningRateRange,
    Outcome,
    Row,
    SearchSpace,
    TuneRequest,
    Tuning,
    WorkloadFacts,
)

SAMPLES, FEATURES, OWN_RATE = 80, 3, 0.05
FACTS = WorkloadFacts(
    name="line",
    digest="0123456789abcdef",
    optimizer="SGD",
    learning_rate=OWN_RATE,
    schedule=None,
    has_batch=False,
    training_samples=72,
    held_out="8 of 80 samples of dataset, drawn by seed 0",
    device="cpu",
    reference="line.py",
)
RATES = LearningRateRange(OWN_RATE / 100, OWN_RATE * 100)
SPACE = SearchSpace(learning_rates=RATES, target_batches=(16,), micro_batches=(16,))


def line_data(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator))


def line_workload(**given: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(FEATURES, 1),
        "criterion": nn.MSELoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=OWN_RATE),
        "dataset": line_data(),
        "name": "line",
    }
    return Workload(**{**parts, **given})


class Greedy(nn.Module):
    """Requests impossible memory for more than `most` samples at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, 1)
        self._most = most

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) > self._most:
            torch.empty(2**48)
        return torch.as_tensor(self.line(inputs))


@dataclass
class Trainer:
    """Replaces child processes: trains in this process.

    Attributes:
        request: The request of the study.
        workload: The workload to train.
        before: Called with the rate before each training; its exception ends that training.
    """

    request: TuneRequest
    workload: Workload
    before: Callable[[float], object] = lambda rate: None

    def train(self, training: Train, should_continue: Any) -> Outcome:
        self.before(training.learning_rate)
        return train_setting(self.workload, training, "cpu", should_continue)


def request_of(**fields: Any) -> TuneRequest:
    options = Options(**{name: fields.pop(name) for name in ("device", "time_limit") if name in fields})
    known: dict[str, Any] = {
        "reference": "line.py",
        "target_batch": 16,
        "trials": 6,
        "options": options,
    }
    return TuneRequest(**known | fields)


@contextmanager
def study_in(file: Path, request: TuneRequest, facts: WorkloadFacts = FACTS) -> Iterator[Study]:
    """A study in a file, created or resumed."""
    with open_storage(str(file)) as storage:
        yield Study(storage, "line", study_config(request, facts, 64, RATES))


def search_in(
    file: Path,
    request: TuneRequest,
    *,
    workload: Workload | None = None,
    before: Callable[[float], object] = lambda rate: None,
    rates: LearningRateRange = RATES,
    own_rate: float = OWN_RATE,
    micro_batches: tuple[int, ...] = (),
    plan: Plan | None = None,
    budget: int = 64,
    notify: Callable[[Any], object] = lambda event: None,
) -> tuple[Any, Message | None]:
    """Return the rows of a study after a search, and why that ended early."""
    trainer: Any = Trainer(request, workload or line_workload(), before)
    plan = plan or plan_of()
    space = SearchSpace(
        learning_rates=rates, target_batches=request.target_batches, micro_batches=micro_batches or (plan.micro_batch,)
    )
    with study_in(file, request) as study:
        search = Search(
            study=study,
            space=space,
            default_rate=own_rate,
            budget=budget,
            plan=plan,
            processes=trainer,
            notify=notify,
        )
        ended = search.run()
        return study.rows(), ended


def tuning_of(rows: tuple[Row, ...], **changes: Any) -> Tuning:
    """Return the result of a study from its trials, with made-up throughput and plan."""
    complete = sorted((row for row in rows if row.state == "complete"), key=lambda row: row.loss or 0.0)
    best = complete[0] if complete else None
    timed: tuple[tuple[int, dict[str, Any]], ...] = (
        (8, {"samples_per_second": 1478.0, "low": 1400.0, "high": 1500.0, "updates": 12}),
        (16, {"samples_per_second": 1500.0, "low": 1450.0, "high": 1550.0, "updates": 9}),
    )
    speeds = tuple(Speed(micro_batch=size, iter_size=16 // size, **known) for size, known in timed)
    slower = Speed(micro_batch=4, iter_size=4)
    known: dict[str, Any] = {
        "study": "line",
        "storage": "tune.db",
        "workload": FACTS,
        "space": SPACE,
        "budget": 64,
        "throughput": Throughput(target_batch=16, device="cpu", speeds=(slower, *speeds)),
        "rows": rows,
        "best": best,
        "own": next((row for row in complete if row.learning_rate == OWN_RATE), None),
        "plan": None if best is None else plan_of(best.learning_rate),
    }
    return Tuning(**known | changes)


def plan_of(learning_rate: float | None = None, parts: tuple[int, ...] = (16,)) -> Plan:
    """Return a plan of updates in these parts, as if it had been measured."""
    trials = (Trial(parts=(parts[0], parts[-1]), outcome="ok"),)
    given: dict[str, Any] = {
        "capped": True,
        "trials": trials,
        "learning_rate": learning_rate,
        "workload": {"name": "line"},
    }
    return make_plan(sum(parts), parts[0], **given)
