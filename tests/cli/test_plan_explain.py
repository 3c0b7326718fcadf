"""`autoaccum plan --explain`: where the memory goes, as a person asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Done, autoaccum

from autoaccum.planning.records import Plan

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(128, 10))

def batch(size):
    return torch.randn(size, 256, 128), torch.randn(size, 256, 10)

criterion = nn.MSELoss()
"""


def run(folder: Path, *words: str) -> Done:
    return autoaccum(folder, "plan", "model.py", *words, COLUMNS="80")


def test_a_table_after_the_plans_and_a_file_that_keeps_it(folder: Path) -> None:
    done = run(folder, "--target-batch", "256", "--gpu", "rtx3090", "--memory", "1GiB", "--explain", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.explanation is not None
    assert [change.name for change in plan.explanation.changes if change.message is not None] == []
    names = {change.name for change in plan.explanation.changes}
    assert names == {"bf16", "checkpoint", "expandable_segments", "foreach=False", "SGD"}
    before, after = done.stdout.split("where the memory goes\n")
    assert before.startswith("micro-batch ")
    assert "(predicted)" in after.splitlines()[0]
    assert "rtx3090 (simulated), micro-batches of " in after.splitlines()[0]
    assert "the peak stands in " in after.splitlines()[1]
    for word in ("parameters", "activations", "in all", "context", "per sample", "least budget", "6 blocks *"):
        assert word in after, word
    assert before.splitlines()[-2] == "kept in plan.json"
    long = [line for line in after.splitlines() if len(line) > 80]
    assert all("autoaccum" in line for line in long)  # Commands are not broken.


def test_nothing_but_json_on_stdout(folder: Path) -> None:
    done = run(folder, "--target-batch", "8", "--gpu", "rtx3090", "--explain", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["explanation"]
    assert sum(record["categories"].values()) == record["peak_bytes"]
    assert record["card"] == "rtx3090 (simulated)"
    assert len(record["modules"]) <= 10
    assert all(change["saved_bytes"] == record["peak_bytes"] - change["peak_bytes"] for change in record["changes"])


@pytest.mark.without_gpu
def test_on_the_cpu_it_is_bad_usage_before_anything_runs(folder: Path) -> None:
    (folder / "model.py").write_text("print('it was run')\n")
    done = run(folder, "--target-batch", "8", "--explain")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "it was run" not in done.stderr
    assert "(--explain) tells where the memory of a card goes, and trials run on the CPU" in " ".join(
        done.stderr.split()
    )
    assert "--gpu NAME" in done.stderr


def test_where_nothing_fits_it_says_how_to_see_where_memory_goes(folder: Path) -> None:
    too_little = ("--target-batch", "8", "--gpu", "rtx3090", "--memory", "4MiB")
    said = [run(folder, *too_little, *more).stderr.splitlines()[-1] for more in ((), ("--explain",))]
    assert said[0].endswith("activation checkpointing, or more memory")
    assert said[1] == (
        f"{said[0]}; where memory goes is told of plans: plan with more of it (--memory, or a card such as"
        " --gpu 80GiB) to see it"
    )


def test_the_command_that_is_offered_asks_for_it_again(folder: Path) -> None:
    done = run(folder, "--target-batch", "8", "--gpu", "rtx3090", "--explain", "-v")
    assert "plan model.py --target-batch 8 --gpu rtx3090 --explain -o plan.json\n" in done.stdout
