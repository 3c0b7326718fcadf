"""`autoaccum compare`: one table of plans for cards, ranks and savers; and what sends there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Command, invoke
from factories import codes
from torch import nn

import autoaccum
from autoaccum.cli import main
from autoaccum.errors import UsageError
from autoaccum.planning.plan_record import Plan

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

precision = "bf16"


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.cuda.get_device_properties(0).multi_processor_count > 60
        self.inner = nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.inner(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def model():
    return Mixer()


def batch(size):
    return torch.randn(size, 256, 64)


def loss(model, x):
    return model(x).square().mean()
"""
"""It asks for a property of the card, and CUDA would choose its attention by another: t4 has none in bf16."""

ASKED = ("compare", "model.py", "--target-batch", "64", "--gpu")
SAME = ("micro_batch", "iter_size", "peak_bytes", "min_budget_bytes", "limit_bytes", "uncertainty_bytes")


@pytest.mark.slow
def test_a_table_of_cards_is_that_of_their_plans(folder: Path, command: Command) -> None:
    (folder / "prices.csv").write_text("name,per_hour\nrtx3090,0.46\nt4,0.35\n")
    within = ("--memory", "0.4%", "--prices", "prices.csv", "-o", "table.json", "--plot", "table.svg")
    done = command(folder, *ASKED, "t4,rtx3090,rtx3060,3090,rtx3070", *within, "--json")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(":")[0] for line in done.stderr.splitlines() if ": micro-batch" in line]
    assert lines == ["t4", "rtx3090", "rtx3060", "rtx3070"], "as they are found: two share their traces"
    record = json.loads(done.stdout)
    assert json.loads((folder / "table.json").read_text()) == record
    assert record["least_world_sizes"] == dict.fromkeys(lines, 1)
    rows = {row["card"]: row for row in record["rows"]}
    priced = {name: row["price_per_hour"] for name, row in rows.items()}
    assert priced == {"t4": 0.35, "rtx3090": 0.46, "rtx3060": None, "rtx3070": None}
    assert "micro-batch" in (folder / "table.svg").read_text()
    assert rows["rtx3090"]["update_seconds"] < rows["rtx3060"]["update_seconds"]
    alone = json.loads(command(folder, "plan", *ASKED[1:], "rtx3070", "--memory", "0.4%", "--json").stdout)
    assert 1 < alone["iter_size"] < 64
    plan = rows["rtx3070"]["plan"]
    assert {field: plan[field] for field in SAME} == {field: alone[field] for field in SAME}
    assert Plan.from_json(json.dumps(plan)).micro_batch == plan["micro_batch"]


@pytest.mark.slow
def test_cards_ranks_and_the_column_asked_for(folder: Path, command: Command) -> None:
    words = (*ASKED, "rtx3060,l4", "--sort", "speed", "--world-size", "1..2", "-q", "--memory")
    done = command(folder, *words, "10%")
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.split() == ["card", "fits", "micro-batch", "iter_size", "needed", "peak", "headroom", "speed"]
    assert [line.split()[:2] for line in rows[:2]] == [["l4", "yes"], ["rtx3060", "yes"]]
    done = command(folder, *words, "1MiB")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["rtx3060", "no"], ["l4", "no"]]
    assert "error: no row fits: rtx3060, 2 ranks: does not fit, since micro-batch 1 does not fit" in done.stderr


@pytest.mark.slow
def test_a_workload_made_in_code() -> None:
    workload = autoaccum.Workload(
        model=lambda: nn.Linear(4, 2),
        batch=lambda size: (torch.randn(size, 4), torch.randn(size, 2)),
        loss=nn.MSELoss(),
    )
    table = autoaccum.compare(workload, target_batch=8, gpu="t4,l4")
    assert [row.plan.micro_batch for row in table.rows if row.plan] == [8, 8]
    assert all("shared_traces" in codes(row.plan.notes) for row in table.rows if row.plan)


@pytest.mark.slow
def test_an_error_comes_after_the_rows_that_are_done(folder: Path, command: Command) -> None:
    asking = 'if x.is_cuda and torch.cuda.get_device_capability() == (8, 6):\n        raise ValueError("not this one")'
    (folder / "model.py").write_text(MODEL.replace("    return model(x)", f"    {asking}\n    return model(x)"))
    done = command(folder, *ASKED, "l4,rtx3060", "-q")
    assert done.returncode == 2
    assert [line.split()[:1] for line in done.stdout.splitlines()[1:2]] == [["yes"]]
    assert done.stderr.endswith("in forward raised ValueError: not this one\n")


def test_what_python_alone_can_ask_for_is_refused_too() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"world_size": range(1, 9, 2)}, r"world_size is range\(1, 9, 2\)"),
        ({"world_size": range(0)}, r"world_size is range\(0, 0\)"),
        ({"device": "cpu"}, r"compare\(\) got an unexpected keyword argument 'device'"),
    )
    for asked, text in refused:
        with pytest.raises((UsageError, TypeError), match=text):
            autoaccum.compare("model.py", target_batch=8, gpu="t4", **asked)


@pytest.mark.parametrize("name", ["plan", "compare"])
def test_the_help_has_its_options_in_groups_and_says_each_in_two_sentences(name: str) -> None:
    done = invoke(name, "--help")
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Options:"
    assert headings[1:] == ["The micro-batch:", "The training loop:", "Memory savers:", "Ranks:", "Output:"]
    first = done.stdout.partition("Options:\n")[2].partition("\n\n")[0]
    assert len([line for line in first.splitlines() if line.startswith("  -")]) <= 13
    for option in main.get_command(None, name).params:  # type: ignore[arg-type, union-attr]
        text = getattr(option, "help", None) or ""
        assert len(text.rstrip(".").split(". ")) <= 2, text
        assert len(text) <= 190, text
