"""Real children that describe and train a workload; their failures become outcomes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from small_studies import request_of

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.messages import message
from autoaccum.tuning.trial_processes import Train, TrialProcesses
from autoaccum.tuning.tuning_records import Outcome

WORKLOAD = """
import os, signal
import torch
from torch import nn

inputs = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
criterion = nn.CrossEntropyLoss()

class Line(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 8:
            torch.empty(2**48)
        return super().forward(x)

def model():
    return Line(8, 2)

class Odd(torch.optim.SGD):
    def step(self, closure=None):
        rate = self.param_groups[0]["lr"]
        if rate == 7.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)

def optimizer(params):
    return Odd(params, lr=0.01)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("workload") / "line.py"
    file.write_text(WORKLOAD)
    return str(file)


@pytest.fixture(scope="module")
def processes(reference: str, warm_children: None) -> TrialProcesses:
    processes = TrialProcesses(request_of(reference=reference, device="cpu"))
    facts = processes.describe()
    assert (facts.name, facts.reference, facts.learning_rate, facts.training_samples) == ("line", reference, 0.01, 72)
    return dataclasses.replace(processes, digest=facts.digest)


def train(processes: TrialProcesses, rate: float) -> Outcome:
    training = Train(learning_rate=rate, target_batch=16, micro_batch=8, evaluation_batch=8, budget=64, seed=0)
    return processes.train(training, lambda percent, loss: percent < 50 or rate < 1)


def test_a_training_is_that_of_its_setting_whatever_ran_before(processes: TrialProcesses) -> None:
    one, again, pruned = train(processes, 0.5), train(processes, 0.5), train(processes, 2.0)
    assert (one.state, one.samples) == ("complete", 64)
    assert one.loss == again.loss
    assert (pruned.state, pruned.samples) == ("pruned", 32)


@pytest.mark.slow
def test_a_process_that_is_killed_is_a_failed_trial(processes: TrialProcesses) -> None:
    killed = train(processes, 7.0)
    reason = message("error", error="error", text="training: its process was ended by SIGKILL")
    assert (killed.state, killed.reason) == ("failed", reason)


def test_a_workload_that_changes_meanwhile_is_reported(processes: TrialProcesses, reference: str) -> None:
    Path(reference).write_text(f"{WORKLOAD}\n# changed\n")
    try:
        with pytest.raises(WorkloadError, match="has changed during tuning"):
            train(processes, 0.5)
    finally:
        Path(reference).write_text(WORKLOAD)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError):
        TrialProcesses(request_of(device="tpu"))
