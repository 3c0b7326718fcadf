"""A processor without AVX-512, on which oneDNN has no LSTM in bf16: every command says so, and none says memory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.head(self.rnn(inputs)[0].mean(1))

model, criterion, precision = Recurrent, nn.MSELoss(), "bf16"
dataset = [(torch.randn(5, 8), torch.randn(2)) for _ in range(8)]

def batch(size):
    return torch.randn(size, 5, 8), torch.randn(size, 2)
"""
SCRIPT = """
import json, sys
import torch
from click.testing import CliRunner
from autoaccum import Accumulator
from autoaccum.cli import main
import model

told = {}
options = "--target-batch 8 --micro-batch 4 --steps 1 --device cpu --run-dir run".split()
result = CliRunner().invoke(main, ["fit", "model.py", "-q", *options])
told["fit"] = result.exit_code, result.stderr
net = model.Recurrent()
accumulator = Accumulator(
    net, torch.optim.SGD(net.parameters(), lr=0.1), model.criterion, micro_batch=2, precision="bf16"
)
try:
    accumulator.step(model.batch(4))
except RuntimeError as error:
    told["step"] = 2, str(error)
torch.backends.mkldnn.set_flags(False)
told["way out"] = 0, str(accumulator.step(model.batch(4)).loss)
print(json.dumps(told))
"""
SAID = "could not create a primitive descriptor for the LSTM forward propagation primitive"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA is of x86 processors")
def test_an_operation_without_a_kernel_is_told_with_the_way_out(tmp_path: Path, command: Command) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    lower = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=os.environ | lower | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout.splitlines()[-1])
    planned = command(tmp_path, "plan", "model.py", "-q", "--target-batch", "8", "--device", "cpu", **lower)
    told["plan"] = planned.returncode, planned.stderr
    assert told.pop("way out")[0] == 0
    assert len(told) == 3
    for words, (code, said) in told.items():
        assert code == 2, (words, said)
        assert SAID in said, words
        assert "out of memory" not in said, words
