"""`autoaccum plan --gpu`: a plan for a card that is not here, as a person asks for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import Command, autoaccum
from small_classifier import LONG

from autoaccum.planning.plan_record import Plan

MODEL = LONG
MASKED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

def batch(size):
    return torch.randn(size, 32, 64), torch.randint(0, 10, (size, 32))

def loss(model, batch):
    inputs, labels = batch[0].flatten(0, 1), batch[1].flatten()
    outputs = model(inputs)
    wrong = outputs.argmax(1) != labels
    return nn.functional.cross_entropy(outputs, labels) + model(inputs[wrong]).square().sum() / (1 + int(wrong.sum()))
"""


def test_a_table_a_plan_and_a_step(folder: Path, command: Command) -> None:
    words = ["--target-batch", "256", "--gpu", "RTX 3090", "--memory", "1GiB", "-o", "plan.json", "--emit", "step.py"]
    done = command(folder, "plan", "model.py", *words, "-v", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.kind == "predicted"
    assert 1 < plan.micro_batch < 256
    assert plan.least_bytes is not None
    assert plan.least_bytes <= plan.limit_bytes == 2**30
    assert f"largest fit  {plan.largest_fit} (" in done.stdout
    assert "(predicted)" in done.stdout
    assert re.search(r"^band +[\d.,]+ [MG]iB either way", done.stdout, re.MULTILINE)
    assert "with less memory the schedule would not run\n" in done.stdout
    assert "device       rtx3090 (simulated), NVIDIA GeForce RTX 3090, 23.6 GiB\n" in done.stdout
    assert "nothing ran on a card" in done.stdout
    assert "predicted for rtx3090 (simulated) with 1.0 GiB, sizes up to 256" in done.stderr
    assert "predicted: nothing ran there" in " ".join((folder / "step.py").read_text().split())


@pytest.mark.slow
def test_json_alone_and_no_torch_in_this_process(folder: Path) -> None:
    code = """
import sys
from autoaccum.cli import main
try:
    main()
finally:
    assert not {"torch", "numpy"} & set(sys.modules)
"""
    words = ["--target-batch", "16", "--gpu", "24GiB", "--json", "-q"]
    done = autoaccum(folder, "plan", "model.py", *words, code=code)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["kind"], record["device"]["name"], record["device"]["card"]) == (
        "predicted",
        "24GiB (simulated)",
        None,
    )
    assert Plan.from_json(done.stdout).micro_batches == (16,)


def test_a_model_that_reads_values_is_planned_with_those_of_the_cpu(folder: Path, command: Command) -> None:
    """The rows that a mask lets through do not grow evenly with the batch, so each size is traced by itself."""
    (folder / "model.py").write_text(MASKED)
    words = ["plan", "model.py", "--target-batch", "48", "--max-micro-batch", "24", "--gpu", "rtx3090"]
    refused = command(folder, *words)
    assert refused.returncode == 2
    assert "have the CPU compute them (--values cpu)" in refused.stderr
    done = command(folder, *words, "--values", "cpu", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.micro_batch == 24
    note = next(note for note in plan.notes if note.startswith("values were read "))
    assert "as the batch of 24 samples answered on the CPU" in note
    elsewhere = command(folder, *words[:6], "--device", "cpu", "--values", "cpu")
    assert (elsewhere.returncode, "--values is for a simulated card" in elsewhere.stderr) == (2, True)
