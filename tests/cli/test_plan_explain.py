"""`autoaccum plan --explain`: where the memory goes, as a person asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from small_blocks import blocks_source

from autoaccum.planning.plan_record import Plan

MODEL = blocks_source(6, hidden=512, length=256, width=128)


@pytest.mark.slow
def test_a_table_after_the_plans_and_a_file_that_keeps_it(folder: Path, command: Command) -> None:
    words = ["--target-batch", "256", "--gpu", "rtx3090", "--memory", "1GiB", "--explain", "-o", "plan.json"]
    done = command(folder, "plan", "model.py", *words, COLUMNS="80")
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
    assert "the peak is in " in after.splitlines()[1]
    for word in ("parameters", "activations", "in all", "context", "least budget", "6 blocks *"):
        assert word in after, word
    assert before.splitlines()[-2] == "kept in plan.json"
    long = [line for line in after.splitlines() if len(line) > 80]
    assert all("autoaccum" in line for line in long)  # Commands are not broken.
