"""`--keeps`, `--evaluation-batch` and `--worst-of`, as a person types them."""

from __future__ import annotations

from pathlib import Path

from command_line import Command

MODEL = """
import torch
from torch import nn

class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 4)
    def forward(self, x):
        return self.last(x).mean(1)

model = Pooling
keeps = "outputs"
dataset = [(torch.randn(length, 8), length % 4) for length in range(1, 30)]

def collate(samples):
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])

criterion = nn.CrossEntropyLoss()
"""


def test_all_of_it_is_planned_and_offered_again(folder: Path, command: Command) -> None:
    words = ["--keeps", "ema", "--keeps", "outputs", "--evaluation-batch", "6", "--worst-of", "10"]
    done = command(folder, "plan", "model.py", "--memory", "64MiB", "--target-batch", "8", *words, "-v")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "an average of the weights (EMA); an evaluation between updates, in batches of 6" in said
    assert "batches made of the longest of 10" in said
    assert " ".join(words) in said
