"""Live objects and a Workload made in code are planned for a card that is not there, as the same in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import environment
from warm_children import WarmPython

from autoaccum.api import plan

pytestmark = pytest.mark.slow

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 256)
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.last = nn.Linear(256, 1000, bias=False)
        self.last.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.last(self.layers(self.table(x)) * self.scale)

TWICE = 2.0
def model():
    return Net()
def batch(size):
    return torch.randint(0, 1000, (size, 32)), torch.randint(0, 1000, (size, 32))
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()) * TWICE
def optimizer(params):
    return torch.optim.SGD(params, lr=1.0, momentum=0.9)
"""
SCRIPT = (
    FILE
    + """
import json, sys
import autoaccum

asked = dict(target_batch=512, gpu="rtx3090", memory="256MiB")
net = Net()
live = optimizer(net.parameters())
torch.manual_seed(3)
sample = batch(3)
state = lambda: [one.tolist() for one in (*net.state_dict().values(), torch.get_rng_state())]
before = state()
seen = {}
def tell(name, plan):
    seen[name] = [plan.kind, plan.micro_batch, plan.peak_bytes, plan.least_bytes, plan.workload["parameters"],
        plan.workload["optimizer"], plan.explanation is not None]
tell("live", autoaccum.plan(model=net, batch=sample, loss=loss, optimizer=live, explain=True, **asked))
tell("workload", autoaccum.plan(autoaccum.Workload(model=Net, batch=batch, loss=loss, optimizer=optimizer), **asked))
after = state()
tied = net.last.weight is net.table.weight
seen["unchanged"] = [before == after, tied, not live.state, not torch.cuda.is_initialized()]
json.dump(seen, sys.stdout)
"""
)


@pytest.mark.usefixtures("warm_children")
def test_what_a_script_holds_is_predicted_as_its_file(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = warm_python(tmp_path, "script.py", environment=environment())
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("unchanged") == [True] * 4
    made = plan(tmp_path / "net.py", target_batch=512, gpu="rtx3090", memory="256MiB")
    assert 1 < made.micro_batch < 512, "the budget binds"
    for name, (kind, *figures, parameters, optimizer, explained) in seen.items():
        assert (kind, optimizer, explained) == ("predicted", "SGD", name == "live")
        assert parameters == made.workload["parameters"]
        assert figures == [made.micro_batch, made.peak_bytes, made.least_bytes], name
