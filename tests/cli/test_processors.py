"""A processor without AVX-512, on which oneDNN has no LSTM in bf16: a plan says so, and not that memory ran out."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from command_line import autoaccum

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
OLDER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA is of x86 processors")
@pytest.mark.parametrize("words", ["plan model.py", "fit model.py --micro-batch 4 --steps 1 --run-dir run"])
def test_an_operation_without_a_kernel_is_told_as_such(words: str, folder: Path) -> None:
    done = autoaccum(folder, *words.split(), "--target-batch", "8", "--device", "cpu", "-q", **OLDER)
    assert done.returncode == 2, done.stderr
    assert "could not create a primitive descriptor for the LSTM forward propagation primitive" in done.stderr
    assert "out of memory" not in done.stderr
