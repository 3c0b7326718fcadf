"""`autoaccum verify` as a person types it: verdict, exit code, JSON, files, and what the workload prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import ROOT, Command, invoke

MODEL = """
import os
import torch
from torch import nn

print("loading")
os.write(1, b"from below\\n")

def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

class Remembering(nn.Linear):
    last = 0.0
    def forward(self, x):
        shift, self.last = self.last, x.mean().detach()
        return super().forward(x + shift)

def remembering():
    return Remembering(4, 3)

def batch(size):
    return torch.randn(size, 4), torch.arange(size) % 3

def loss(model, batch):
    if "BREAK" in os.environ:
        raise ValueError("row 3 is odd")
    if "FULL" in os.environ:
        raise MemoryError("std::bad_alloc")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_equivalent_is_zero_and_one_line() -> None:
    result = invoke("verify", "model.py", "--micro-batch", "5")
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert line.startswith("equivalent: the accumulated update is the full batch's, to ")
    assert line.endswith(" of the largest gradient entry (4 tensors, 16 samples as 4 + 4 + 4 + 4, float64)")
    shown = invoke("verify", "model.py", "--micro-batch", "5", "-v").stdout.splitlines()
    assert shown[0] == line
    assert "the Accumulator, whole window: 4 + 4 + 4 + 4 = 16" in shown
    assert "model: Sequential, 51 parameters; compared in fp64 on cpu\n" in result.stderr
    assert list(Path.cwd().iterdir()) == [Path.cwd() / "model.py"]


def test_not_equivalent_is_one_and_names_the_cause(folder: Path, command: Command) -> None:
    done = command(folder, "verify", "model.py:normed", "--target-batch", "8", "-q", "--report", "p.html")
    assert done.returncode == 1, done.stderr
    again = "autoaccum verify model.py:normed --target-batch 8 --batchnorm exact"
    assert f"{again}\nreport in p.html\n" in done.stdout
    page = (folder / "p.html").read_text(encoding="utf-8")
    assert again in page
    assert "BatchNorm" in page
    assert done.stdout.startswith("not equivalent: the gradients are off by ")
    assert "cause        batchnorm: " in done.stdout
    assert "\x1b" not in done.stdout
    assert set(done.stderr.splitlines()) == {"from below", "loading"}


def test_a_difference_of_unknown_cause_is_one_and_names_the_first_tensor() -> None:
    result = invoke("verify", "model.py:remembering", "--target-batch", "8", "-q", "--json")
    assert result.exit_code == 1, result.stderr
    (cause,) = json.loads(result.stdout)["causes"]
    assert cause["found"]["code"] == "unexplained"
    assert cause["found"]["facts"]["tensor"] == "weight"


def test_json_is_alone_on_stdout_and_a_file_keeps_it(folder: Path) -> None:
    result = invoke("verify", "model.py", "--target-batch", "4", "--json", "-o", "found.json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["schema"], record["equivalent"], record["target_batch"], record["micro_batch"]) == (3, True, 4, 1)
    assert (folder / "found.json").read_text() == result.stdout
    again = invoke("verify", "model.py", "-o", "found.json")
    assert again.exit_code == 2
    assert "found.json exists already: add --force" in again.stderr
    assert "loading" not in again.stderr, "it is refused before anything is loaded"
    forced = invoke("verify", "model.py", "--target-batch", "4", "-o", "found.json", "--force")
    assert forced.exit_code == 0
    assert "kept in found.json" in forced.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model.py", "--micro-batch", "16"], "nothing accumulates: give a smaller micro-batch"),
        (["model.py", "--longest-of", "9"], "dataset"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_wrong_usage_is_two(words: list[str], told: str) -> None:
    result = invoke("verify", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert told in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("variable", "code", "text"),
    [
        ("BREAK", 2, "raised ValueError: row 3 is odd"),
        ("FULL", 3, "verify with a smaller --target-batch"),
    ],
)
def test_an_exception_is_shown_as_the_users_unless_memory_ran_out(
    variable: str, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    result = invoke("verify", "model.py")
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr.splitlines()[-1]
    assert ("Traceback" in result.stderr) == (code == 2)
    assert "autoaccum/" not in result.stderr.replace(str(ROOT), "")
