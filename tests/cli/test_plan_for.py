"""`autoaccum plan --for FRAMEWORK`: what a person pastes, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command
from small_classifier import MODEL

from autoaccum.integrations.framework_arguments import arguments_for
from autoaccum.planning.plan_record import Plan

WORDS = ("plan", "model.py", "--memory", "200MiB", "-q", "--for")


@pytest.mark.slow
def test_the_lines_to_paste_and_the_file(folder: Path, command: Command) -> None:
    sizes = ("--target-batch", "96", "--max-micro-batch", "40")
    done = command(folder, *WORDS, "transformers", *sizes, "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.micro_batches == (32, 32, 32)
    pasted = "TrainingArguments(per_device_train_batch_size=32, gradient_accumulation_steps=3"
    assert f"train with   {pasted}" in done.stdout
    assert "\n             --per_device_train_batch_size 32 --gradient_accumulation_steps 3" in done.stdout
    assert "Accumulator(" not in done.stdout
    assert plan.arguments is not None
    assert dict(plan.arguments["transformers"]) == arguments_for(plan, "transformers")


def test_a_target_with_few_divisors_is_exact_and_a_better_one_is_named(folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, "deepspeed", "--target-batch", "257", "--max-micro-batch", "100", "--json")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert (plan.micro_batch, plan.iter_size, plan.largest_fit) == (1, 257, 100)
    config = json.loads(done.stdout)["arguments"]["deepspeed"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 257)
    assert any("a target batch of 258 is 3 x 86" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("keras",), "'keras' is not one of 'transformers', 'lightning', 'accelerate', 'deepspeed', 'torchtitan'"),
        (("lightning", "--savers", "auto"), "Lightning does not know autoaccum's savers (auto)"),
        (("torchtitan", "--world-size", "3"), "a target batch of 8 does not divide equally over 3 ranks: take 6"),
    ],
)
def test_refused_before_anything_runs(words: tuple[str, ...], text: str, folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, *words, "--target-batch", "8")
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_refused_before_any_trial_by_what_the_workload_says(folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(MODEL.replace("()\n", '(reduction="sum")\n'))
    done = command(folder, *WORDS[:-2], "--for", "accelerate", "--target-batch", "8")
    assert done.returncode == 2, done.stdout
    assert "the loss is a sum, and accelerate divides it by the number of micro-batches" in " ".join(
        done.stderr.split()
    )
    assert "  ok  " not in done.stderr
