"""`autoaccum plan` on ranks: those that it starts itself, and those of torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command, environment, printed_lines
from warm_children import WarmRanks

from autoaccum.accumulation.ranks import launch
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.planning.plan_record import Plan

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))

def batch(size):
    print("said by the workload")
    return torch.randn(size, 64), torch.randint(0, 8, (size,))

criterion = nn.CrossEntropyLoss()
"""
ASKED = ("--target-batch", "4", "--device", "cpu", "--memory")
BUDGET = "60MiB"
LONG = MODEL.replace("64", "4").replace("torch.randint(0, 8, (size,))", "torch.randn(size, 8)")
LONG = LONG.replace("(size, ", "(size, 1024, ").replace("CrossEntropyLoss", "MSELoss")
"""Of which each sample takes 16 MiB for what the ReLU makes."""


def check(plan: Plan) -> None:
    """The budget binds: on each rank the schedule ran, and one with fewer parts did not."""
    assert plan.world_size == len(plan.devices or ()) == 2
    assert plan.ranks == (plan.micro_batches,) * 2
    assert plan.iter_size == 2
    assert sum(plan.micro_batches) == 2
    assert plan.peak_bytes is not None
    assert plan.peak_bytes <= plan.limit_bytes == 60 * 2**20
    assert {trial.outcome for trial in plan.trials} == {"ok", "oom"}


def test_the_command_starts_itself_on_a_rank_for_each_budget(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, list[str]]] = []

    def run_ranks(count: int, arguments: list[str]) -> int:
        started.append((count, arguments))
        return 2

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    words = ["plan", "model.py", *ASKED, BUDGET, "--world-size", "2"]
    assert command(folder, *words).returncode == 2
    ((count, arguments),) = started
    assert (count, arguments[:4]) == (2, ["-m", "autoaccum", "plan", "model.py"])
    assert sorted(arguments[2:]) == sorted(words)


@pytest.mark.slow
def test_ranks_plan_together_and_the_first_tells(folder: Path, warm_ranks: WarmRanks) -> None:
    (folder / "model.py").write_text(LONG)
    words = "-m", "autoaccum", "plan", "model.py", *ASKED, BUDGET, "-o", "plan.json"
    first, second = warm_ranks(folder, *words, environment=environment(), measured=True)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    check(Plan.load(folder / "plan.json"))
    assert "where the least fits of 2 that were tried at once" in " ".join(first.stdout.split())
    assert first.stderr.count("micro-batch  outcome") == 1
    assert "said by the workload" in first.stderr
    assert (second.stdout, "micro-batch" in second.stderr) == ("", False)


def test_an_error_of_ranks_is_said_once(folder: Path, warm_ranks: WarmRanks) -> None:
    """Of one that ranks find before they try anything."""
    half = f"{round(0.7 * read_host_memory().free_bytes)}B"
    words = "-m", "autoaccum", "plan", "model.py", *ASKED, half
    first, second = warm_ranks(folder, *words, environment=environment())
    assert (first.returncode, printed_lines(first.stdout + second.stdout)) == (2, [])
    assert (first.stderr + second.stderr).count("error: ") == 1
    assert "2 budgets of " in first.stderr
