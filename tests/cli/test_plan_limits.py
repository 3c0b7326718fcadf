"""`--time-limit`, `--max-trials` and `--emit`, as a person types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import Command
from small_classifier import MODEL

from autoaccum.cli import main
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


@pytest.mark.slow
def test_the_training_step_beside_the_plan(folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, "--max-micro-batch", "1000", "-o", "plan.json", "--emit", "train_step.py")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    assert "train without autoaccum: train_step.py is the step in plain PyTorch\n" in done.stdout
    assert f"MICRO_BATCH = {plan.micro_batch}  #" in (folder / "train_step.py").read_text()


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--emit", "same", "-o", "./same"], "-o and --emit both name same: take two names"),
        (["--emit", "torch.py"], "would hide the module torch"),
        (["--emit", "step.py", "--world-size", "2"], "the plan is for 2 ranks"),
        (["--plot", "memory.pdf"], "the picture memory.pdf ends in .pdf: give a name that ends in .svg or .png"),
        (["--plot", "/dev/null"], "/dev/null is not a regular file: give a name that ends in .svg or .png"),
        (["--plot", "model.svg"], "model.svg exists already: add --force to overwrite it, or choose another name"),
    ],
)
def test_what_cannot_be_written_is_said_before_any_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.svg").write_text("precious")
    result = CliRunner().invoke(main, ["plan", "model.py", "--target-batch", "8", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (folder / "model.svg").read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "model.svg"]


@pytest.mark.parametrize("workload", ["model:MODEL", "model.py:MODEL", "./model.py"])
def test_the_workload_is_never_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch, workload: str) -> None:
    monkeypatch.chdir(folder)
    (folder / "link.py").symlink_to(folder / "model.py")
    for words in (["-o", "model.py"], ["--emit", "link.py"], ["--plot", "model.py"]):
        result = CliRunner().invoke(main, ["plan", workload, "--target-batch", "8", "--force", *words])
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{words[0]} names the workload itself, {words[1]}: choose another name" in result.stderr
    assert (folder / "model.py").read_text() == MODEL
