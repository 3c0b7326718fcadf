"""`autoaccum plan --prefer fastest` as a person runs it: updates are timed in a real process."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from small_blocks import blocks_source

from autoaccum.planning.plan_record import Plan

MODEL = """
import time
import torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.001 * len(x) if len(x) > 4 else 0.004)
        return super().forward(x)

def model():
    return Slow(8, 2)

def batch(size):
    return torch.randn(size, 8), torch.randint(0, 2, (size,))

criterion = nn.CrossEntropyLoss()
"""
WORDS = ("plan", "model.py", "--memory", "200MiB", "--target-batch", "16", "--prefer", "fastest")


@pytest.mark.slow
def test_the_knee_is_planned_and_told(folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, "-o", "plan.json", "-v")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.throughput is not None
    assert [speed.micro_batch for speed in plan.throughput.speeds] == [1, 2, 4, 8, 16]
    assert plan.micro_batch == plan.throughput.knee >= 4, "a part of fewer samples takes as long as one of 4"
    assert plan.largest_fit == 16
    proof = plan.trials[-1]
    assert (proof.parts, proof.fresh, proof.outcome) == (plan.schedule.trial_parts, True, "ok")
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert ["speed"] in [line[:1] for line in lines]
    assert [line[1] for line in lines if line[0] in ("1", "2", "4", "8", "16")] == ["16", "8", "4", "2", "1"]
    assert any("samples/s" in note and f"micro-batch {plan.micro_batch} makes" in note for note in plan.notes)


@pytest.mark.slow
def test_savers_are_chosen_first_and_the_speed_is_an_estimate_for_a_card(folder: Path, command: Command) -> None:
    (folder / "blocks.py").write_text(blocks_source(2, hidden=1024, length=256, width=16))
    asked = ("--gpu", "24GiB", "--savers", "auto", "--prefer", "fastest", "-o", "plan.json")
    for budget in ("24MiB", "26MiB"):  # The workspaces of torch 2.11 take 2 MiB more.
        done = command(folder, "plan", "blocks.py", "--target-batch", "8", "--memory", budget, *asked)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.workload["savers"], "no sample fits without"
    assert plan.throughput is not None
    assert (plan.throughput.kind, plan.throughput.knee) == ("estimated", plan.micro_batch)
    assert any("by an estimate from FLOPs, bytes and kernels" in note for note in plan.notes)
