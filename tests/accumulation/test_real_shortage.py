"""Memory that is really out: torch's own allocator refuses, under a limit on the data of a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, re, resource, warnings
import torch
from pathlib import Path
from torch import nn
from autoaccum.accumulation.accumulator import Accumulator

torch.set_num_threads(1)
MIB = 2**20

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())])

def limit(extra):
    held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + extra, resource.RLIM_INFINITY))

x = torch.randn(4096, 256)
model, other = build(), build()
optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, other)]
full = Accumulator(other, optimizers[1], nn.MSELoss(), micro_batch=4096)
mine = Accumulator(model, optimizers[0], nn.MSELoss(), micro_batch=4096)
full.step((x, x))
mine.step((x, x))
expected = full.step((x, x))
limit(30 * MIB)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = mine.step((x, x))
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
scale = max(float(p.detach().abs().max()) for p in other.parameters())
error = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters()))
print(json.dumps({
    "retries": result.retries, "parts": result.micro_batches, "loss": [result.loss, expected.loss],
    "error": error / scale, "warnings": [str(warning.message) for warning in caught],
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds anonymous memory on Linux only")
def test_a_step_shrinks_and_its_update_is_the_full_batch_s() -> None:
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen["retries"] >= 1
    assert len(seen["warnings"]) == seen["retries"]
    assert sum(seen["parts"]) == 4096
    assert max(seen["parts"]) < 4096
    assert seen["loss"][0] == pytest.approx(seen["loss"][1], rel=1e-5)
    assert seen["error"] < 1e-3  # AdamW's first updates turn rounding near zero gradients into a share of lr
