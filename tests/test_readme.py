"""The code of README and guides runs, and README's two commands are where CI looks for them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch
from command_line import environment
from factories import make_plan
from torch import nn
from warm_children import WarmPython

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.devices.trial_run import TrialRun
from autoaccum.sources.source import FileSource

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "examples" / "docs").rglob("*.md"))
}
for page in (ROOT / "tests" / "benchmarks" / "README.md", ROOT / ".github" / "CONTRIBUTING.md"):
    PAGES[page] = page.read_text(encoding="utf-8")
GUIDES = "\n".join(PAGES.values())
PYTHON = re.findall(r"```python\n(.*?)```", GUIDES, re.DOTALL)


def block(text: str) -> str:
    (found,) = [str(code) for code in PYTHON if text in code]
    return found


def test_ci_finds_both_commands() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    assert [("autoaccum plan" in line, "pytest" in line) for line in commands] == [(True, False), (False, True)]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "command_of 'autoaccum plan'" in script
    assert "command_of pytest" in script


def test_ci_takes_the_oldest_torch_in_turn_with_the_newest(tmp_path: Path) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^second_torch\(\).*?^}$", script, re.DOTALL | re.MULTILINE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m one"
    lines = ("set -euo pipefail", "git init -q", function, *(commit, "second_torch") * 2)
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, check=True)
    (least,) = re.findall(r'"torch>=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert done.stdout.split() == [f"torch=={least}", "torch"]
    assert f"PyTorch, {least} or newer" in README


def test_the_terminal_block_shows_the_first_command() -> None:
    (shown,) = re.findall(r"^\$ (autoaccum plan .*)$", README, re.MULTILINE)
    assert f".venv/bin/{shown.replace('-- ', '-- .venv/bin/')}\n" in README


def test_the_workload_file_is_one(tmp_path: Path) -> None:
    model = "class MyModel(nn.Sequential):\n    def __init__(self): super().__init__(nn.Flatten(), nn.LazyLinear(10))\n"
    path = tmp_path / "model.py"
    path.write_text(f"from torch import nn\n{model}{block('model = MyModel')}", encoding="utf-8")
    workload = FileSource(str(path)).load()
    assert workload.precision == "bf16"
    assert workload.objective.weight(workload.build_batch(3)) == 3


def test_a_coupled_loss_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    head = "import torch\nfrom torch import nn\ndef batch(size): return torch.randn(size, 4), torch.randn(size, 4)\n"
    path = tmp_path / "model.py"
    path.write_text(f"{head}model = nn.Linear(4, 3)\n{block('def coupled_loss')}", encoding="utf-8")
    workload = FileSource(str(path)).load()
    model, batch = workload.build_model(), workload.build_batch(6)
    steps = torch.optim.SGD(model.parameters(), lr=0.0)
    whole, parts = (Accumulator(model, steps, workload.objective, micro_batch=size).step(batch) for size in (6, 4))
    assert parts.micro_batches == (3, 3)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_what_stands_around_the_step_is_part_of_a_workload(tmp_path: Path) -> None:
    head = "import torch\nfrom torch import nn\ndef batch(size): return torch.zeros(size, 4), torch.arange(size) % 3\n"
    path = tmp_path / "model.py"
    lines = "model = nn.Linear(4, 3)\ncriterion = nn.CrossEntropyLoss()\n"
    path.write_text(f"{head}{lines}{block('ema =')}", encoding="utf-8")
    workload = FileSource(str(path)).load()
    trial_run = TrialRun(workload, 4)
    trial_run.run((2, 2))
    assert workload.evaluation_batch == 64
    assert len(trial_run.averages) == len(trial_run.outputs) == 2, "weight and bias, output and loss"


def test_the_weight_counts_the_shifted_labels() -> None:
    names: dict[str, object] = {}
    exec(block("def weight"), names)
    weight = names["weight"]
    assert callable(weight)
    assert weight({"labels": torch.tensor([[5, 1, -100], [5, 1, 2]])}) == 3


def test_the_training_loop_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    make_plan(8, 3, workload={}).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    loader = [(torch.randn(8, 4), torch.randint(0, 2, (8,))), (torch.randn(5, 4), torch.randint(0, 2, (5,)))]
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": loader,
    }
    exec(block("accumulator.step(batch)"), names)
    assert names["result"].samples == 5  # type: ignore[attr-defined]
    assert not torch.equal(model.weight, before)


LIVE = """
import torch
from torch import nn

model = nn.Linear(4, 2)
before = model.weight.detach().clone()
batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

{block}
assert sum(plan.micro_batches) == plan.target_batch == 256
assert torch.equal(model.weight, before)
assert not optimizer.state
"""


def test_what_is_there_already_is_planned_as_it_is(warm_python: WarmPython) -> None:
    """In a process of its own: pytest's has threads, which a limit on its memory would reach."""
    script = LIVE.format(block=block("autoaccum.plan(model=model"))
    done = warm_python(ROOT, "-c", script, environment=environment())
    assert done.returncode == 0, done.stderr


FIT = """
import torch
from torch import nn
model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
dataset = torch.utils.data.TensorDataset(torch.randn(600, 4), torch.randint(0, 3, (600,)))
{block}
assert (result.updates, result.samples) == (9, 1800)
assert result.plan is not None
"""


def test_one_call_trains(tmp_path: Path, warm_python: WarmPython) -> None:
    """In a process of its own, as above."""
    script = FIT.format(block=block("import autoaccum\n\nresult = "))
    done = warm_python(tmp_path, "-c", script, environment=environment())
    assert done.returncode == 0, done.stderr
    made = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert {"metrics.jsonl", "plan.json", "checkpoints", "model.pt"} <= made


def test_commands_are_ones_that_there_are() -> None:
    lines = re.findall(r"^(?:\$ )?autoaccum (plan|fit|tune|verify|guard)\b([^#\n]*)", GUIDES, re.MULTILINE)
    lines += re.findall(r"`autoaccum (plan|fit|tune|verify|guard|gpus) (\S*\.py[^`]*|--[^`]*)`", GUIDES)
    assert {command for command, _ in lines} == {"plan", "fit", "tune", "verify", "guard"}
    for command, words in lines:
        import_module(f"autoaccum.cli.{command}").command.make_context(command, shlex.split(words))


def test_pages_files_and_scripts_it_names_are_there() -> None:
    named = re.findall(r"`(?:python |pytest )?((?:autoaccum|tests|examples)/[\w/.]*)", GUIDES)
    assert {"tests/benchmarks/peers.py", "tests/gpu/", "autoaccum/planning/"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text)]
    assert len(links) > 20
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []
    chosen = re.findall(r"`pytest (tests/[\w/.]+) -k (\w+)`", GUIDES)
    for place, words in chosen:
        files = [ROOT / place] if (ROOT / place).is_file() else list((ROOT / place).glob("test_*.py"))
        assert any(re.search(rf"def test_\w*{words}", path.read_text()) for path in files), place


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200
