"""Running out of memory during training changes no result: a real limit is lowered and raised again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import environment
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from warm_children import WarmPython

import autoaccum
from autoaccum.errors import DoesNotFitError
from autoaccum.training.fit_events import Started, Updated

SCRIPT = """
import json, re, resource, sys, warnings
from pathlib import Path
import torch
from torch import nn
import autoaccum
from autoaccum.training.fit_events import Evaluated, Updated

warnings.simplefilter("error")
torch.set_num_threads(1)
MIB = 2**20
torch.manual_seed(0)
x = torch.randn(1024, 16, dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, x.roll(1, 1))

def limit(extra):
    held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    soft = resource.RLIM_INFINITY if extra is None else held + extra
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))

def run(limited, folder):
    torch.manual_seed(0)
    wide = [(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(2)]
    model = nn.Sequential(*wide[0], *wide[1]).double()
    events = []
    def listen(event):
        events.append(event)
        if limited and isinstance(event, Updated) and event.update == 3:
            limit(5 * MIB)
        if limited and isinstance(event, Updated) and event.update == 8:
            limit(None)
    result = autoaccum.fit(model, data, target_batch=1024, loss=nn.MSELoss(), optimizer="AdamW", micro_batch=1024,
                           steps=46, callbacks=[listen], progress=False, run_dir=folder, eval_data=data, eval_every=5)
    return model, result, events

plain, _, _ = run(False, sys.argv[1] + "/plain")
model, result, events = run(True, sys.argv[1] + "/limited")
updates = [event for event in events if isinstance(event, Updated)]
scale = max(float(p.detach().abs().max()) for p in plain.parameters())
print(json.dumps({
    "error": max(float((a - b).detach().abs().max()) for a, b in zip(plain.parameters(), model.parameters())) / scale,
    "oom_retries": result.oom_retries,
    "largest": [event.micro_batch for event in updates],
    "samples": sorted({event.micro_batches * 0 + event.samples - 1024 * (event.update - 1) for event in updates}),
    "evaluations": sum(isinstance(event, Evaluated) for event in events),
    "warnings": result.warnings,
    "retries": [json.loads(line).get("retries") for line in open(sys.argv[1] + "/limited/metrics.jsonl")],
}))
"""


@pytest.mark.slow
def test_a_limit_lowered_in_mid_run_changes_no_result(tmp_path: Path, warm_python: WarmPython) -> None:
    child = warm_python(tmp_path, "-c", SCRIPT, str(tmp_path), environment=environment(), measured=True)
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen["error"] < 1e-9
    assert seen["oom_retries"] >= 1
    assert seen["samples"] == [1024], "the effective batch is the same in every update"
    assert seen["largest"][2] == 1024
    assert seen["largest"][3] < 1024, "with the limit on, it goes on with smaller micro-batches"
    assert seen["largest"][-1] > seen["largest"][7], "and with larger ones again, long after it was lifted"
    assert seen["evaluations"] == 10, "the evaluation under the limit shrinks, too"
    assert seen["warnings"] == []
    assert sum(retries or 0 for retries in seen["retries"]) == seen["oom_retries"]


class Crowded(nn.Linear):
    """Runs out of memory above a number of samples, as on a GPU that others use."""

    most = 10**9

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def fit_crowded(model: Crowded, listen: Any, **options: Any) -> autoaccum.FitResult:
    x = torch.linspace(-1, 1, 64 * 3, dtype=torch.float64).reshape(64, 3)
    settings: dict[str, Any] = {"target_batch": 64, "loss": nn.MSELoss(), "micro_batch": 32, "progress": False}
    return autoaccum.fit(model, TensorDataset(x, x[:, :2]), callbacks=[listen], **settings | options)


def test_the_ceiling_falls_rises_and_survives_a_stop(tmp_path: Path) -> None:
    sizes: list[int] = []
    events: list[Any] = []
    model = Crowded(3, 2, dtype=torch.float64)

    def listen(event: Any) -> None:
        events.append(event)
        if isinstance(event, Updated):
            sizes.append(event.micro_batch)
            model.most = 9 if 2 <= event.update < 20 else 10**9
            if event.update == 30 and len(sizes) == 30:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_crowded(model, listen, steps=120, run_dir=tmp_path, checkpoint_every=10)
    assert sizes[:3] == [32, 32, 7]
    result = fit_crowded(model, listen, steps=120, run_dir=tmp_path, checkpoint_every=10)
    started = [event for event in events if isinstance(event, Started)]
    assert [event.micro_batch for event in started] == [32, 7]
    assert sizes[-1] == 32, "after a while without OOM all of it is used again"
    assert result.oom_retries > 0


def test_if_not_even_one_sample_fits_it_says_so_and_saves_its_state(tmp_path: Path) -> None:
    model = Crowded(3, 2, dtype=torch.float64)

    def listen(event: Any) -> None:
        model.most = 0 if isinstance(event, Updated) and event.update == 5 else model.most

    with pytest.raises(DoesNotFitError, match="not even one sample at a time fits"):
        fit_crowded(model, listen, steps=9, run_dir=tmp_path)
    newest = max((tmp_path / "checkpoints").glob("*.pt"))
    assert newest.name == "checkpoint-00000005.pt"
