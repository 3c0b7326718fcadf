"""`autoaccum plan` for several cards: one table from few traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command

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

ASKED = ("plan", "model.py", "--target-batch", "64", "--gpu")
SAME = ("micro_batch", "iter_size", "peak_bytes", "least_bytes", "limit_bytes", "band_bytes")


@pytest.mark.slow
def test_a_table_of_cards_is_that_of_their_plans(folder: Path, command: Command) -> None:
    (folder / "prices.csv").write_text("name,per_hour\nrtx3090,0.46\nt4,0.35\n")
    within = ("--memory", "0.4%", "--prices", "prices.csv")
    done = command(folder, *ASKED, "t4,rtx3090,rtx3060,3090,rtx3070", *within, "--json")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(":")[0] for line in done.stderr.splitlines() if ": micro-batch" in line]
    assert lines == ["t4", "rtx3090", "rtx3060", "rtx3070"], "as they are found: two share their traces"
    record = json.loads(done.stdout)
    assert record["least_world_sizes"] == dict.fromkeys(lines, 1)
    rows = {row["card"]: row for row in record["plans"]}
    assert list(rows)[:2] == sorted(("t4", "rtx3090"), key=lambda name: rows[name]["cost_per_million"])
    assert rows["rtx3060"]["cost_per_million"] is None
    assert all(row["headroom_bytes"] == row["limit_bytes"] - row["least_bytes"] >= 0 for row in rows.values())
    assert rows["rtx3090"]["samples_per_second"] > rows["rtx3060"]["samples_per_second"]
    for name in ("t4", "rtx3070"):
        alone = json.loads(command(folder, *ASKED, name, "--memory", "0.4%", "--json").stdout)
        assert 1 < alone["iter_size"] < 64
        assert {field: rows[name][field] for field in SAME} == {field: alone[field] for field in SAME}, name


@pytest.mark.slow
def test_the_table_is_shown_by_the_column_asked_for(folder: Path, command: Command) -> None:
    words = (*ASKED, "rtx3060,l4", "--sort", "speed", "--world-size", "1..2", "-q", "--memory")
    done = command(folder, *words, "10%")
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.split() == ["card", "ranks", "fits", "micro-batch", "iter_size", "needed", "peak", "headroom", "speed"]
    assert [line.split()[:3] for line in rows[:2]] == [["l4", "1", "yes"], ["rtx3060", "1", "yes"]]
    done = command(folder, *words, "1MiB")
    assert done.returncode == 1
    assert [line.split()[:4] for line in done.stdout.splitlines()[1:3]] == [
        [name, ">", "2", "no"] for name in ("rtx3060", "l4")
    ]
    assert "error: none of 1 to 2 ranks trains the model: on rtx3060, micro-batch 1 does not fit" in done.stderr


@pytest.mark.slow
def test_an_error_comes_after_the_rows_that_are_done(folder: Path, command: Command) -> None:
    (folder / "prices.csv").write_text("name,per_hour\nl4,1\nmy-card,2\n")
    asking = 'if x.is_cuda and torch.cuda.get_device_capability() == (8, 6):\n        raise ValueError("not this one")'
    (folder / "model.py").write_text(MODEL.replace("    return model(x)", f"    {asking}\n    return model(x)"))
    done = command(folder, *ASKED, "l4,rtx3060", "--prices", "prices.csv", "-q")
    assert done.returncode == 2
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:2]] == [["l4", "yes"]]
    assert "warning: prices.csv, line 3 is not used, there is no 'my-card'" in done.stderr
    assert done.stderr.endswith("in forward raised ValueError: not this one\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["all", "-o", "plan.json"], "--gpu all makes a table, and -o goes with one card: give one name"),
        (["t4,l4", "--prefer", "fastest"], "--gpu t4,l4 makes a table, and --prefer fastest goes with one card"),
        ([","], "there is no ',' among the 97 cards"),
        (["t4,l4", "--parallel", "fsdp2"], "--parallel fsdp2 shards over ranks, and there is one"),
        (["t4,l4", "--world-size", "1..2", "--mesh", "2"], "--world-size 1..2 makes a table, and --mesh goes with one"),
        (["t4,nothing"], "there is no 'nothing' among the 97 cards"),
        (["t4,l4", "--sort", "cost"], "--sort cost needs the prices of cards: give them (--prices FILE)"),
        (["t4,l4", "--sort", "size"], "'size' is not one of 'card', 'ranks', "),
        (["t4,l4", "--prices", "none.csv"], "none.csv cannot be read (No such file or directory)"),
        (["t4", "--sort", "speed"], "--sort is for the table of several cards: name them (--gpu all,"),
        (["t4", "--world-size", "1..2", "--prices", "none.csv"], "and --prices goes with one number of ranks"),
    ],
)
def test_what_goes_with_no_table_is_refused_before_anything_starts(
    folder: Path, command: Command, words: list[str], text: str
) -> None:
    done = command(folder, *ASKED, *words, "-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
