"""`autoaccum plan` with its options, as a person gives them: cards, explanations, savers, limits, frameworks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Command, Done, autoaccum
from factories import codes
from small_blocks import blocks_source
from small_classifier import LONG, MODEL

from autoaccum.integrations.arguments_from_plan import arguments_for
from autoaccum.planning.plan_record import Plan

SLOW = """
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
ENDLESS = """
import os, time
from pathlib import Path
Path("pids").open("a").write(f"{os.getpid()} ")
"""


def planned(folder: Path, command: Command, source: str, words: str, **variables: str) -> tuple[Plan, Done]:
    """Plan a file, and return the plan that was written."""
    (folder / "model.py").write_text(source)
    done = command(folder, "plan", "model.py", "-o", "plan.json", "--force", *words.split(), **variables)
    assert done.returncode == 0, done.stderr
    return Plan.load(folder / "plan.json"), done


def test_a_card_that_is_not_here(folder: Path, command: Command) -> None:
    words = "--target-batch 256 --gpu rtx_3090 --memory 1GiB --emit step.py -v"
    plan, done = planned(folder, command, LONG, words, COLUMNS="200")
    assert plan.kind == "predicted"
    assert 1 < plan.micro_batch < 256
    assert plan.min_budget_bytes is not None
    assert plan.min_budget_bytes <= plan.limit_bytes == 2**30
    assert f"largest fit  {plan.largest_fit} (" in done.stdout
    assert re.search(r"^uncertainty +[\d.,]+ [MG]iB either way", done.stdout, re.MULTILINE)
    assert "device       rtx3090 (simulated), NVIDIA GeForce RTX 3090, 23.6 GiB\n" in done.stdout
    assert "nothing ran on a card" in done.stdout
    assert "predicted for rtx3090 (simulated) with 1.0 GiB, sizes up to 256" in done.stderr
    assert "predicted: nothing ran there" in " ".join((folder / "step.py").read_text().split())


@pytest.mark.slow
def test_json_is_alone_and_no_torch_is_in_this_process(folder: Path) -> None:
    (folder / "model.py").write_text(LONG)
    code = """
import sys
from autoaccum.cli import main
try:
    main()
finally:
    assert not {"torch", "numpy"} & set(sys.modules)
"""
    words = "plan model.py --target-batch 16 --gpu 24GiB --json -q"
    done = autoaccum(folder, *words.split(), code=code)
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert (plan.kind, plan.device.name, plan.device.card) == ("predicted", "24GiB (simulated)", None)
    assert plan.micro_batches == (16,)


def test_a_model_that_reads_values_is_planned_with_those_of_the_cpu(folder: Path, command: Command) -> None:
    """The rows that a mask lets through do not grow evenly with the batch, so each size is traced by itself."""
    words = "--target-batch 48 --max-micro-batch 24 --gpu rtx3090"
    plan, _ = planned(folder, command, MASKED, f"{words} --values cpu")
    assert plan.micro_batch == 24
    note = next(note for note in plan.notes if note.code == "values_read")
    assert note.facts["samples"] == 24
    refused = command(folder, "plan", "model.py", *words.split())
    assert (refused.returncode, "have the CPU compute them (--values cpu)" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_an_explanation_follows_the_plan_and_is_kept_with_it(folder: Path, command: Command) -> None:
    source = blocks_source(6, hidden=512, length=256, width=128)
    words = "--target-batch 256 --gpu rtx3090 --memory 1GiB --explain"
    plan, done = planned(folder, command, source, words, COLUMNS="80")
    assert plan.explanation is not None
    assert [change.name for change in plan.explanation.changes if change.message is not None] == []
    names = {change.name for change in plan.explanation.changes}
    assert names == {"bf16", "checkpoint", "expandable_segments", "foreach=False", "SGD"}
    before, after = done.stdout.split("where the memory goes\n")
    assert before.splitlines()[-2] == "kept in plan.json"
    assert re.match(r"rtx3090 \(simulated\), micro-batches of .*\(predicted\)\nthe peak is in ", after)
    for word in ("parameters", "activations", "in all", "context", "smallest budget", "{0..5}"):
        assert word in after, word


@pytest.mark.slow
def test_the_fastest_is_planned_and_told(folder: Path, command: Command) -> None:
    plan, done = planned(folder, command, SLOW, "--memory 200MiB --target-batch 16 --prefer fastest -v")
    assert plan.throughput is not None
    assert [speed.micro_batch for speed in plan.throughput.speeds] == [1, 2, 4, 8, 16]
    assert plan.micro_batch == plan.throughput.knee >= 4, "a part of fewer samples takes as long as one of 4"
    assert plan.largest_fit == 16
    proof = plan.trials[-1]
    assert (proof.parts, proof.fresh, proof.outcome) == (plan.schedule.trial_parts, True, "ok")
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert ["speed"] in [line[:1] for line in lines]
    assert [line[1] for line in lines if line[0] in ("1", "2", "4", "8", "16")] == ["16", "8", "4", "2", "1"]
    assert next(note for note in plan.notes if note.code == "fastest").facts["chosen"] == plan.micro_batch


@pytest.mark.slow
def test_savers_are_chosen_first_and_the_speed_is_an_estimate_for_a_card(folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(blocks_source(2, hidden=1024, length=256, width=16))
    words = "plan model.py --target-batch 8 --gpu 24GiB --savers auto --prefer fastest -o plan.json --memory"
    budgets = ("24MiB", "26MiB")  # The workspaces of torch 2.11 take 2 MiB more.
    assert any(command(folder, *words.split(), budget).returncode == 0 for budget in budgets)
    plan = Plan.load(folder / "plan.json")
    assert plan.spec.savers, "no sample fits without"
    assert plan.throughput is not None
    assert (plan.throughput.kind, plan.throughput.knee) == ("estimated", plan.micro_batch)
    assert "fastest" in codes(plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("plan --device cpu --time-limit 1", "while True: pass"),
        ("guard --gpu 24GiB --time-limit 1 --update", "time.sleep(1e9)"),
    ],
)
def test_what_does_not_end_is_ended_and_named(
    folder: Path, words: str, file: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.py").write_text(MODEL + ENDLESS + file)
    monkeypatch.setattr("autoaccum.planning.plan_request._MIN_LOAD_SECONDS", 2.0)
    name, *rest = words.split()
    done = command(folder, name, "model.py", "--target-batch", "8", *rest)
    assert done.returncode == 3, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert re.search(r"loading .*took longer than [\d.]+ s, and was ended", said)
    assert "Traceback" not in said
    (pid,) = (folder / "pids").read_text().split()
    assert not Path(f"/proc/{pid}").exists()


def test_the_arguments_of_a_framework_are_printed_and_kept(folder: Path, command: Command) -> None:
    words = "--memory 200MiB -q --for transformers --target-batch 96 --max-micro-batch 40"
    plan, done = planned(folder, command, MODEL, words)
    assert plan.micro_batches == (32, 32, 32)
    pasted = "TrainingArguments(per_device_train_batch_size=32, gradient_accumulation_steps=3"
    assert f"train with   {pasted}" in done.stdout
    assert "\n             --per_device_train_batch_size 32 --gradient_accumulation_steps 3" in done.stdout
    assert "Accumulator(" not in done.stdout
    assert plan.arguments is not None
    assert dict(plan.arguments["transformers"]) == arguments_for(plan, "transformers")


def test_a_target_with_few_divisors_is_exact_and_a_better_one_is_named(folder: Path, command: Command) -> None:
    words = "--memory 200MiB -q --for deepspeed --target-batch 257 --max-micro-batch 100"
    plan, _ = planned(folder, command, MODEL, words)
    assert (plan.micro_batch, plan.iter_size, plan.largest_fit) == (1, 257, 100)
    assert "equal_parts" in codes(plan.notes)


def test_a_sum_that_a_framework_would_divide_is_refused_before_any_trial(folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(MODEL.replace("()\n", '(reduction="sum")\n'))
    done = command(folder, "plan", "model.py", "--target-batch", "8", "--for", "accelerate", COLUMNS="200")
    assert done.returncode == 2, done.stdout
    assert "the loss is a sum, and accelerate divides it by the number of micro-batches" in done.stderr
    assert "Traceback" not in done.stderr
    assert "  ok  " not in done.stderr
