"""What libraries print around an answer: bars, reports and warnings stay on stderr, each line of them once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command

MODEL = """
import os
import sys
import warnings
import torch
from torch import nn

print("printed at import")
warnings.warn("warned at import")
os.write(1, b"from below\\n")

def model():
    for done in range(4):
        sys.stderr.write(f"\\rLoading weights: {done}/3 [00:00<00:00, {os.getpid()}.5it/s]")
    sys.stderr.write("\\n")
    print("3 weights are new")
    return nn.Linear(4, 3)

def batch(size):
    return torch.randn(size, 4), torch.arange(size) % 3

criterion = nn.CrossEntropyLoss()
"""

NOISE = ("printed at import", "UserWarning: warned at import", "from below", "Loading weights: 3/3", "weights are new")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:warned at import")
@pytest.mark.parametrize(
    "words",
    [
        ("plan", "model.py", "--gpu", "t4", "--target-batch", "8", "--json"),
        ("plan", "model.py", "--device", "cpu", "--memory", "300MiB", "--target-batch", "64", "--json"),
    ],
    ids=lambda words: " ".join(words[:3:2]),
)
def test_stdout_is_the_record_alone_and_stderr_has_each_line_once(
    words: tuple[str, ...], folder: Path, command: Command
) -> None:
    done = command(folder, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"]
    for line in NOISE:
        assert done.stderr.count(line) == 1, (line, done.stderr)
        assert line not in done.stdout
    assert "Loading weights: 0/3" not in done.stderr, "a bar is its last state"
