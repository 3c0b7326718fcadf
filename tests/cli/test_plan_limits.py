"""`--time-limit` and `--max-trials`, as a person types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Command
from small_classifier import MODEL

from autoaccum.planning.plan_record import Plan

WORDS = ("plan", "model.py", "--memory", "64MiB", "--target-batch", "40000")


@pytest.mark.slow
def test_few_trials_are_marked(folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, "--ceiling", "--max-trials", "2", "-o", "plan.json", "-v")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert (plan.stopped, len(plan.trials)) == ("trials", 3)
    said = " ".join(done.stdout.split())
    assert f"largest fit {plan.largest_fit}, the largest before the limit on trials ended the search" in said
    assert f"the limit of 2 trials ended the search: no size above {plan.largest_fit}" in said


ENDLESS = """
import os, time
from pathlib import Path
Path("pids").open("a").write(f"{os.getpid()} ")
"""


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
    assert "loading the workload " in said
    assert re.search(r" took longer than [\d.]+ s, and was ended", said)
    assert "Traceback" not in said
    pids = (folder / "pids").read_text().split()
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()
