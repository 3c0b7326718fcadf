"""A signal or a kill at any moment loses no update; the benchmark soak.py has more kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import ROOT, environment
from warm_children import WarmPython

SCRIPT = """
import json, os, signal, sys, tempfile
from pathlib import Path
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
import autoaccum
from autoaccum.training.fit_events import Updated

torch.set_num_threads(1)
x = torch.randn(64, 3)
data = torch.utils.data.TensorDataset(x, x)

class Strike(TorchDispatchMode):
    def __init__(self, update, at):
        super().__init__()
        self.armed, self.seen, self.at = update == 1, 0, at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.armed:
            self.seen += 1
            if self.seen == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
        return func(*args, **(kwargs or {}))

def run(update, at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    made = [0]
    optimizer.register_step_post_hook(lambda *_: made.__setitem__(0, made[0] + 1))
    strike = Strike(update, at)

    def listen(event):
        if isinstance(event, Updated):
            strike.armed = event.update == update - 1

    with tempfile.TemporaryDirectory() as folder:
        with strike:
            try:
                autoaccum.fit(model, data, target_batch=8, loss=nn.MSELoss(), optimizer=optimizer, micro_batch=5,
                              steps=4, run_dir=folder, callbacks=[listen], progress=False, clip_norm=1.0)
                code = None
            except SystemExit as leaving:
                code = leaving.code
        newest = max(Path(folder, "checkpoints").glob("*.pt"))
        saved = torch.load(newest, weights_only=True)["record"]
    return {"code": code, "made": made[0], "saved": saved["progress"]["update"], "seen": strike.seen}

def struck(update):
    whole = run(update, 10**9)
    seen = whole["seen"]
    return [whole, *[run(update, at) for at in (*range(1, seen + 1, seen // 5), seen - 4, seen)]]

print(json.dumps({"later": struck(3), "first": struck(1)}))
"""


@pytest.mark.slow
def test_an_update_is_made_or_undone(tmp_path: Path, warm_python: WarmPython) -> None:
    """The first one is guarded by a copy, later ones are not."""
    done = warm_python(tmp_path, "-c", SCRIPT, environment=environment())
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for name, update in (("later", 3), ("first", 1)):
        whole, *runs = seen[name]
        assert whole["code"] is None
        assert whole["made"] == whole["saved"] == 4
        assert len(runs) >= 7
        assert {run["code"] for run in runs} == {143}
        assert all(run["made"] == run["saved"] for run in runs)
        assert {run["saved"] for run in runs} == {update - 1, update}, "some were undone, some were finished"


@pytest.mark.slow
def test_kills_lose_nothing_with_workers(warm_python: WarmPython) -> None:
    options = ["--kills", "2", "--updates", "12", "--workers", "2"]
    done = warm_python(ROOT, "tests/benchmarks/soak.py", *options, environment=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert ": 0 ended otherwise than one never stopped" in line
    assert int(line.split()[0]) >= 2
