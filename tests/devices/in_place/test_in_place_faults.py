"""Out of memory at each allocation of a trial, injected and real: live objects are as they were all the same."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_errors import OutOfMemoryAt
from state_digests import state_digest
from torch import Tensor, nn
from warm_children import WarmPython

from autoaccum.accumulation.accumulator import StepResult
from autoaccum.devices import trial_run
from autoaccum.devices.trial_run import TrialRun

STRIDE = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.net(x)
        return outputs


def test_out_of_memory_at_any_allocation_is_undone(
    live_device: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Model()
    made = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    made.step()
    modes: list[OutOfMemoryAt] = []

    class Short(TrialRun):
        def run(self, parts: Sequence[int], *, joined: bool = False) -> StepResult:
            with modes[-1]:
                return super().run(parts, joined=joined)

    device = live_device(model, pairs, optimizer=made)
    assert device.limit_bytes
    monkeypatch.setattr(trial_run, "TrialRun", Short)
    before, phases = state_digest(model, made), set()
    for number in itertools.count(0, STRIDE):
        modes.append(OutOfMemoryAt(number))
        trial = device.trial((2, 2))
        assert state_digest(model, made) == before
        assert model.calls == 0
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        if not modes[-1].fired:
            assert trial.outcome == "ok"
            break
        assert (trial.outcome, trial.certain) == ("oom", True), trial.message
        phases.add(trial.phase)
    assert number > 60
    assert phases >= {"batch", "forward", "backward", "update"}


SCRIPT = """
import json, sys
import torch
from torch import nn
from autoaccum.accumulation.accumulator import StepResult
from autoaccum.accumulation.state_hash import state_entries
from autoaccum.devices.in_place import InPlaceDevice, LiveObjects
from autoaccum.options import Options
from autoaccum.units import MIB, MemorySize
from autoaccum.workload.objective import resolve_objective
import resource

torch.manual_seed(0)

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 3)
    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x))))

class Greedy(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["params"][0].data.zero_()
        torch.ones(4096 * MIB)

def greedy_batch(size):
    return torch.ones(4096 * MIB)

def pairs(size):
    return torch.randn(size, 64), torch.randint(0, 3, (size,))

class GreedyBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, grad):
        return grad + torch.ones(4096 * MIB).sum()

def backward_loss(model, batch):
    return GreedyBackward.apply(nn.functional.cross_entropy(model(batch[0]), batch[1]))

def greedy_optimizer(params):
    torch.ones(4096 * MIB)

model = Wide()
live = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
live.step()
before, soft = state_entries({"": model}, live), resource.getrlimit(resource.RLIMIT_DATA)
found = []
for batch, loss, optimizer, parts in (
    (pairs, nn.CrossEntropyLoss(), live, (100000, 100000)),
    (pairs, backward_loss, live, (4, 4)),
    (greedy_batch, nn.CrossEntropyLoss(), live, (4, 4)),
    (pairs, nn.CrossEntropyLoss(), greedy_optimizer, (4, 4)),
    (pairs, nn.CrossEntropyLoss(), lambda params: Greedy(params, lr=0.1), (4, 4)),
):
    given = {"objective": resolve_objective(loss), "options": Options(optimizer=optimizer)}
    objects = LiveObjects(model=model, batch=batch, **given)
    device = InPlaceDevice(objects, share=parts[0], memory=MemorySize(bytes=64 * MIB))
    trial = device.trial(parts)
    found.append({
        "outcome": trial.outcome, "phase": trial.phase, "message": trial.message,
        "same": state_entries({"": model}, live) == before, "limit": resource.getrlimit(resource.RLIMIT_DATA) == soft,
        "peak": trial.peak_reserved_bytes,
    })
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds anonymous memory on Linux only")
def test_real_out_of_memory_errors(tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python(tmp_path, "-c", SCRIPT, environment=os.environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["outcome"] for one in found] == ["oom"] * 5, found
    assert found[0]["phase"] in ("forward", "backward")
    assert [one["phase"] for one in found[1:]] == ["backward", "batch", "optimizer", "update"]
    assert all(one["same"] and one["limit"] for one in found)
    assert all("DefaultCPUAllocator" in one["message"] for one in found[1:])
    assert all(one["peak"] < 700 * 2**20 for one in found)
