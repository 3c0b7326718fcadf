"""`autoaccum plan --savers auto`: savers are chosen, as a person asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from small_blocks import blocks_source

from autoaccum.planning.plan_record import Plan

MODEL = blocks_source(3, hidden=1024, length=1024, width=16)


@pytest.mark.slow
def test_savers_are_chosen_noted_and_kept(folder: Path, command: Command) -> None:
    """A sample takes 4 MiB in each block for the relu, which recomputed blocks run again: of 4, 16 MiB in each of 3."""
    asked = ["--target-batch", "8", "--gpu", "24GiB", "--memory", "110MiB"]
    done = command(folder, "plan", "model.py", *asked, "--savers", "auto", "--micro-batch", "4", "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert plan.micro_batch >= 4
    assert plan.workload["savers"]
    assert "micro-batch 4 with no savers: does not fit\n" in done.stderr
    assert any(note.startswith(" + ".join(plan.workload["savers"]) + " chosen, since") for note in plan.notes)


def test_what_no_savers_make_fit_is_a_clear_no(folder: Path, command: Command) -> None:
    asked = ["--target-batch", "2", "--gpu", "24GiB", "--memory", "16MiB", "-q"]
    done = command(folder, "plan", "model.py", *asked, "--savers", "auto")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: micro-batch 1 does not fit with any savers: ")
    assert "MiB of 16.0 MiB: take a smaller model" in line


def test_a_choice_without_a_plan_is_refused(folder: Path, command: Command) -> None:
    done = command(folder, "verify", "model.py", "--target-batch", "4", "--savers", "auto")
    assert done.returncode == 2
    assert "savers are auto (--savers auto), which a plan chooses" in done.stderr
