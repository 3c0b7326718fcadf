"""A training plans first, without side effects, or uses a plan and names what does not match."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import environment
from warm_children import WarmPython

SCRIPT = """
import dataclasses, json, os, sys
import torch
from torch import nn
import autoaccum
from autoaccum.errors import AutoaccumError
from autoaccum.training.fit_events import Started

torch.set_num_threads(1)
folder = sys.argv[1]
x = torch.randn(2048, 64)
data = torch.utils.data.TensorDataset(x, x.roll(1, 1))
seen = {"refused": {}}

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))])

def fit(model=None, given=data, **options):
    settings = dict(target_batch=1024, loss=nn.MSELoss(), steps=2, progress=False, memory="20MiB") | options
    return autoaccum.fit(build() if model is None else model, given, **settings)

def refused(name, **options):
    try:
        fit(**options)
        seen["refused"][name] = None
    except AutoaccumError as error:
        seen["refused"][name] = [error.exit_code, str(error)]

events = []
planned = fit(callbacks=[events.append], run_dir=folder + "/planned")
plan = planned.plan
leaves = torch.utils._pytree.tree_leaves
digest = lambda result: repr([one.tolist() if isinstance(one, torch.Tensor) else one for one in leaves([
    result.model.state_dict(), result.optimizer.state_dict()])])
seen["plan"] = [plan.kind, plan.target_batch, plan.micro_batch, plan.iter_size]
seen["saved"] = autoaccum.Plan.load(folder + "/planned/plan.json") == plan
seen["trials"] = sum(type(event).__name__ == "TrialFinished" for event in events)
by_plan = fit(plan=plan)
by_number = fit(micro_batch=plan.micro_batch)
by_file = fit(plan=folder + "/planned/plan.json", target_batch=None)
seen["same"] = len({digest(result) for result in (planned, by_plan, by_number, by_file)})
events.clear()
resumed = fit(callbacks=[events.append], run_dir=folder + "/planned", steps=3)
tried = any(type(event).__name__ == "TrialFinished" for event in events)
seen["resumed"] = [resumed.plan == plan, tried, resumed.updates]
one = iter([(x[:1024], x[:1024].roll(1, 1))] * 2)
seen["of an iterator"] = [fit(given=one).updates, next(one, None) is None]
refused("target", plan=plan, target_batch=512)
refused("model", plan=plan, model=nn.Linear(64, 64))
refused("ranks", plan=dataclasses.replace(
    plan, target_batch=2048, world_size=2, ranks=(plan.micro_batches, plan.micro_batches)))
card = dataclasses.replace(plan.device, kind="cuda", card="NVIDIA T4")
refused("device", plan=dataclasses.replace(plan, device=card))
refused("no file", plan=folder + "/nothing.json")
refused("too small a budget", memory="1MiB", run_dir=folder + "/refused")
seen["left behind"] = os.path.exists(folder + "/refused")
refused("a number", plan=3)
json.dump(seen, sys.stdout)
"""


@pytest.mark.slow
def test_it_plans_a_live_model_and_uses_plans(tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python(tmp_path, "-c", SCRIPT, str(tmp_path), environment=environment(), measured=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    kind, target, micro_batch, iter_size = seen["plan"]
    assert (kind, target) == ("measured", 1024)
    assert 1 < micro_batch < 1024, "the budget binds"
    assert iter_size * micro_batch >= 1024
    assert seen["saved"]
    assert seen["trials"] >= 2
    assert seen["same"] == 1, "planning left no trace: the weights are those of a run that was given the number"
    assert seen["resumed"] == [True, False, 3], "a resumed run keeps its plan"
    assert seen["of an iterator"] == [2, True], "what was read for the plan is not lost"
    messages = {name: message for name, (_, message) in seen["refused"].items()}
    codes = {name: code for name, (code, _) in seen["refused"].items()}
    assert codes.pop("too small a budget") in (1, 2)
    assert not seen["left behind"], "a run that never began leaves no folder"
    assert set(codes.values()) == {2}
    assert "the plan is for updates of 1024 samples; here is updates of 512" in messages["target"]
    assert "the plan is for the model Sequential" in messages["model"]
    assert "here is the model Linear" in messages["model"]
    assert "the plan is for 2 ranks" in messages["ranks"]
    assert "a CUDA card" in messages["device"]
    assert "there is no file" in messages["no file"]
    assert "plan is a" in messages["a number"]
