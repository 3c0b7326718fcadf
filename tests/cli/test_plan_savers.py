"""`autoaccum plan --savers auto`: savers are chosen, as a person asks for it."""

from __future__ import annotations

from pathlib import Path

from command_line import Command

from autoaccum.planning.plan_record import Plan

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(6)))

def batch(size):
    return torch.randn(size, 1024, 64)

def loss(model, batch):
    return model(batch).square().mean()
"""


def test_savers_are_chosen_noted_and_kept(folder: Path, command: Command) -> None:
    """A sample takes 4 MiB in each block for the relu, which recomputed blocks run again: of 8, 192 MiB."""
    asked = ["--target-batch", "16", "--gpu", "24GiB", "--memory", "200MiB"]
    done = command(folder, "plan", "model.py", *asked, "--savers", "auto", "--micro-batch", "8", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.micro_batch >= 8
    assert plan.workload["savers"]
    assert "micro-batch 8 with no savers: does not fit\n" in done.stderr
    assert any(note.startswith(" + ".join(plan.workload["savers"]) + " chosen, since") for note in plan.notes)


def test_what_no_savers_make_fit_is_a_clear_no(folder: Path, command: Command) -> None:
    asked = ["--target-batch", "2", "--gpu", "24GiB", "--memory", "22MiB", "-q"]
    done = command(folder, "plan", "model.py", *asked, "--savers", "auto")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: micro-batch 1 does not fit with any savers: ")
    assert "MiB of 22.0 MiB: take a smaller model" in line


def test_a_choice_without_a_plan_is_refused(folder: Path, command: Command) -> None:
    done = command(folder, "verify", "model.py", "--target-batch", "4", "--savers", "auto")
    assert done.returncode == 2
    assert "savers are auto (--savers auto), which a plan chooses" in done.stderr
