"""Every example is short, runs, and is planned by the very command its docstring gives."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from command_line import Command, environment
from warm_children import WarmPython, WarmRanks

from autoaccum.planning.plan_record import Plan

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / "docs_hook.py"})
LOOPS = {"accelerate_loop", "lightning_manual", "ddp_loop", "fsdp2_loop", "accumulation_mistakes"}
"""Loops by hand or a framework's, which there is nothing to plan of."""
ELSEWHERE = {"digits_fit", "batchnorm_modes", "gan", "accelerate_loop", "lightning_manual", "train"}
"""What tests/verification/test_verified_examples.py, tests below, and
tests/libraries/test_framework_examples.py run."""
COMMANDS = {
    (path.stem, line)
    for path in EXAMPLES
    for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    if line.startswith(("autoaccum ", "python ", "torchrun "))
}


def test_there_are_examples_and_each_says_how_it_is_used() -> None:
    assert len(EXAMPLES) >= 4
    assert len(COMMANDS) == 2 * len(EXAMPLES) - len(LOOPS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_fit_on_one_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"), sorted(c for c in COMMANDS if c[1].startswith("python") and c[0] not in ELSEWHERE)
)
@pytest.mark.filterwarnings("ignore:BatchNorm normalises")
def test_examples_train(
    name: str, line: str, warm_children: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which imports scikit-learn and the rest of PyTorch once for all of them."""
    _, *words = shlex.split(line)
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    told = capsys.readouterr().out
    assert told.strip(), f"{name} prints what it does"
    assert "nan" not in told


@pytest.mark.slow
def test_two_networks_are_planned_and_trained(warm_children: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "gan.py"), run_name="__main__")
    planned, other, *trained = capsys.readouterr().out.splitlines()
    assert planned.startswith("discriminator: (512, ")
    assert other.startswith("generator: (512, ")
    assert len(trained) == 4


@pytest.mark.slow
def test_digits_that_were_never_seen_are_read(
    command: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (line,) = (line for name, line in COMMANDS if name == "digits_fit" and line.startswith("autoaccum"))
    words = shlex.split(line)[1:]
    words[words.index("--epochs") + 1], words[words.index("--run-dir") + 1] = "1", str(tmp_path / "run")
    done = command(ROOT, *words, "--quiet", "--json")
    assert (done.returncode, json.loads(done.stdout)["updates"]) == (0, 12), done.stderr
    runpy.run_path(str(ROOT / "examples" / "digits_fit.py"), run_name="__main__")
    found = re.fullmatch(r"240 updates, (\d+\.\d)% of the held-out digits are right\n", capfd.readouterr().out)
    assert found is not None
    assert float(found[1]) >= 97


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), sorted(c for c in COMMANDS if c[1].startswith("torchrun")))
def test_examples_train_on_several_ranks(name: str, line: str, warm_ranks: WarmRanks) -> None:
    words = shlex.split(line)
    assert words[1:3] == ["--nproc-per-node", "2"]
    both = warm_ranks(ROOT, *words[3:], environment=environment())
    for done in both:
        assert done.returncode == 0, done.stderr
        assert "nan" not in done.stdout
    assert both[0].stdout.strip(), f"{name} prints what it does"


def test_a_training_script_is_planned_as_it_is_and_trains(
    tmp_path: Path, command: Command, warm_python: WarmPython
) -> None:
    plan_line, train_line = sorted(line for name, line in COMMANDS if name == "train")
    words = shlex.split(plan_line)[1:]
    at, small = words.index("--"), ("--layers", "1", "--length", "32")
    words[at + 1] = sys.executable
    done = command(ROOT, *words[:at], "--json", *words[at:], *small)
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert (plan.micro_batch, plan.iter_size, plan.spec.precision) == (256, 1, "bf16")
    done = warm_python(ROOT, *shlex.split(train_line)[1:], environment=environment())
    assert done.stdout.startswith("update 1: loss 1"), done.stderr


@pytest.mark.parametrize(("name", "line"), sorted(c for c in COMMANDS if c[1].startswith("autoaccum verify")))
def test_examples_are_verified(name: str, line: str, command: Command) -> None:
    done = command(ROOT, *shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equivalent: "), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"), sorted(c for c in COMMANDS if c[1].startswith("autoaccum plan") and c[0] not in ELSEWHERE)
)
def test_examples_are_planned(name: str, line: str, command: Command, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    done = command(ROOT, *shlex.split(line)[1:], "-o", str(written))
    assert done.returncode == 0, done.stderr
    plan = Plan.load(written)
    assert 1 <= plan.micro_batch < plan.target_batch, f"{name}'s budget should bind, or it shows nothing"
    assert sum(plan.micro_batches) == plan.target_batch
    needed = plan.peak_bytes if plan.min_budget_bytes is None else plan.min_budget_bytes
    assert needed is not None
    assert needed <= plan.limit_bytes
