"""The time limit of `verify`: the answer comes first, and the search for its causes ends at the limit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import small_verified as small
from command_line import environment
from torch import Tensor, nn

from autoaccum.api import verify
from autoaccum.devices.budget import Deadline, TimeIsOver
from autoaccum.sources.workload import Workload
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import Ablation
from autoaccum.verification.verification_result import Compared, Diagnosing


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(small.Mlp(), nn.BatchNorm1d(small.CLASSES))


def _workload(loss: Any = small.class_loss) -> Workload:
    return Workload(model=Normed, batch=small.pairs, loss=loss)


def test_at_the_limit_the_cause_is_unknown_and_the_answer_stays() -> None:
    events: list[Any] = []
    found = verify(_workload(), time_limit=1e-6, on_event=events.append)
    assert not found.equivalent
    assert [len(one.differences) for one in found.comparisons] == [3, 3]
    (cause,) = found.causes
    assert (cause.kind, cause.found.code, cause.proved) == ("unknown", "search_stopped", False)
    assert cause.found.facts["limit_seconds"] == 1e-6
    assert [type(event) for event in events[1:]] == [Compared, Compared, Diagnosing, Diagnosing]
    known = verify(_workload(), time_limit=100.0)
    assert [(one.kind, one.proved) for one in known.causes] == [("batchnorm", True)]


def test_a_run_ends_within_its_forward() -> None:
    """One update may take minutes: every call of a module looks at the time."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        for _ in range(1000):
            calls += 1
            outputs = model(batch[0])
            time.sleep(0.01)
        return nn.functional.cross_entropy(outputs, batch[1])

    fixture = Fixture(_workload(loss))
    runs = PairedRuns(fixture, small.pairs(4), (2, 2))
    fixture.deadline = Deadline(0.1)
    with pytest.raises(TimeIsOver):
        runs.pair()
    assert 0 < calls < 100
    with pytest.raises(TimeIsOver):  # Nor does another experiment begin.
        runs.pair(Ablation(neutral_rng=True))
    fixture.deadline = Deadline(None)
    assert not nn.modules.module._global_forward_pre_hooks


MODEL = """
import time
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

def batch(size):
    return torch.randn(size, 4), torch.arange(size) % 3

def loss(model, batch):
    time.sleep(0.1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.slow
def test_the_command_prints_the_answer_before_it_searches(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = [sys.executable, "-m", "autoaccum", "verify", "model.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        running = process.poll() is None
        rest = process.stdout.read()
    assert running
    assert line.startswith("not equivalent: the gradients are off by ")
    assert rest.startswith("\ncause        batchnorm: ")
    assert "not equivalent" not in rest
    assert process.returncode == 1
