"""Trials in real processes; each takes the seconds that importing PyTorch takes, so few are started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tuned_workloads import Asker

from autoaccum.devices.host_memory import HostMemory
from autoaccum.errors import WorkloadError
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running import child_runner
from autoaccum.tuning.running.child_runner import ChildRunner
from autoaccum.tuning.settings import BatchSpan, Budget, Setting
from autoaccum.units import GIB
from autoaccum.workload.loading import load_workload

Write = Callable[[str], str]

TROUBLESOME = """
import numpy, random, torch
from torch import nn
calls = 0
print("a line of the workload's own")
inputs = torch.randn(80, 3)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
true_loss = nn.functional.mse_loss

def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

def loss(model, batch):
    # Whatever a training leaves behind: state of the module, patches of torch, threads, generators, modes.
    global calls
    calls += 1
    nn.functional.mse_loss = lambda x, y: 0.5 * true_loss(x, y)
    torch.set_num_threads(2 if calls % 2 else 1)
    torch.set_default_dtype(torch.float32)
    random.seed(calls); numpy.random.seed(calls)
    return true_loss(model(batch[0]), batch[1]) * (1 + 0.01 * calls)

def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)
"""

LINE = """
import os, signal, time, torch
from torch import nn
dataset = torch.utils.data.TensorDataset(torch.randn(80, 3), torch.randn(80, 1))
def model(): return nn.Linear(3, 1)
def optimizer(params): return torch.optim.SGD(params, lr=0.05)
def loss(model, batch):
    {trouble}
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""

FIRST = Setting(learning_rate=0.2, target_batch=16, micro_batch=8)
SECOND = Setting(learning_rate=0.01, target_batch=16, micro_batch=8)


def children() -> list[int]:
    """Processes of this one's own that train."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"autoaccum.tuning.running.child" in words and str(os.getpid()).encode() in words:
            found.append(int(command.parent.name))
    return found


def runner_of(
    path: str, *, lines: list[str] | None = None, spare: bool = False, digest: str | None = None, **asked: Any
) -> ChildRunner:
    request = TuneRequest(reference=path, target_batch=BatchSpan(16, 16), device="cpu", **asked)
    on_output = (lambda line: None) if lines is None else lines.append
    return ChildRunner(request, Budget(64, "samples"), 8, on_output=on_output, digest=digest, keeps_spare=spare)


def on(percent: int, loss: float) -> bool:
    return True


def results(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.state, outcome.loss, outcome.samples, outcome.updates


def test_a_trial_does_not_depend_on_those_before_it(write_workload: Write) -> None:
    path, lines = write_workload(TROUBLESOME), list[str]()
    asked_after, asked_alone = Asker(), Asker()
    with runner_of(path, lines=lines, spare=True, digest=load_workload(path).digest) as runner:
        text = Path(path).read_text()
        Path(path).write_text(text + "\n# edited\n")
        with pytest.raises(WorkloadError, match="was changed while it is tuned"):
            runner.run(FIRST, 0, on)  # Not even the first one is of another file.
        Path(path).write_text(text)
        before = runner.run(FIRST, 0, on)
        after = runner.run(SECOND, 0, asked_after)
    assert children() == []
    with runner_of(path) as runner:
        alone = runner.run(SECOND, 0, asked_alone)
    assert after.state == "complete"
    assert asked_after.percents == [25, 50]
    assert asked_after.told == asked_alone.told
    assert results(after) == results(alone) != results(before)
    assert set(lines) == {"a line of the workload's own"}


def test_what_is_pruned_or_given_up_leaves_no_process(write_workload: Write) -> None:
    runner = runner_of(write_workload(LINE.format(trouble="pass")))
    pruned = runner.run(FIRST, 0, lambda percent, loss: False)
    assert (pruned.state, pruned.samples, pruned.updates) == ("pruned", 16, 1)
    assert children() == []

    def interrupted(percent: int, loss: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(FIRST, 0, interrupted)
    assert children() == []


def test_a_process_that_is_killed_is_a_failure(write_workload: Write) -> None:
    path = write_workload(LINE.format(trouble="os.kill(os.getpid(), signal.SIGKILL)"))
    outcome = runner_of(path).run(FIRST, 0, on)
    assert (outcome.state, outcome.reason) == ("failed", "its process was ended by SIGKILL")


def test_no_spare_is_kept_where_a_training_may_need_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("model.py")
    for free_bytes, peak_bytes, has_room in (
        (6 * GIB, None, True),
        (4 * GIB, None, False),  # Nothing is known yet of what a training takes.
        (4 * GIB, 1 * GIB, True),
        (4 * GIB, 4 * GIB, False),
    ):
        memory = HostMemory(8 * GIB, free_bytes, "the machine")
        monkeypatch.setattr(child_runner, "read_host_memory", lambda memory=memory: memory)
        runner._peak_bytes = peak_bytes
        assert runner._has_room() == has_room


def test_a_trial_that_takes_too_long_is_a_failure(write_workload: Write) -> None:
    path = write_workload(LINE.format(trouble="time.sleep(600)"))
    outcome = runner_of(path, trial_limit=0.5).run(FIRST, 0, on)
    assert outcome.state == "failed"
    assert outcome.reason == "it took longer than a trial may (0.5 s), and was ended"
    assert children() == []
