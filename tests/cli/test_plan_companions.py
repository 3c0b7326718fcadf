"""`--keeps`, `--evaluation-batch` and `--worst-of`, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import Done, autoaccum

from autoaccum.cli import main

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


def run(folder: Path, *words: str) -> Done:
    return autoaccum(folder, "plan", "model.py", "--memory", "64MiB", "--target-batch", "8", *words)


def test_all_of_it_is_planned_and_offered_again(folder: Path) -> None:
    words = ["--keeps", "ema", "--keeps", "outputs", "--evaluation-batch", "6", "--worst-of", "10"]
    done = run(folder, *words, "-v")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert (
        "an average of the weights; an evaluation between updates, in batches of 6 batches of the longest of 10" in said
    )
    assert " ".join(words) in said


def test_the_files_own_words_count_where_none_are_typed(folder: Path) -> None:
    done = run(folder, "--worst-of", "10", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workload"]["keeps"] == ["outputs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keeps", "logs"), 'nothing is known to be kept as \'logs\': take "outputs" or "ema"'),
        (("--evaluation-batch", "none"), "invalid value for '--evaluation-batch': 'none' is not a whole number"),
        (("--worst-of", "0"), "invalid value for '--worst-of': 0 is too small, the least is 1"),
    ],
)
def test_what_is_no_word_or_number_is_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    arguments = ["plan", str(folder / "model.py"), "--target-batch", "8", *words]
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_a_file_without_batch_needs_samples_to_look_at(folder: Path) -> None:
    done = run(folder)
    assert done.returncode == 2
    assert "the workload defines no 'batch': write def batch(size)" in done.stderr
    assert "--worst-of N" in done.stderr
