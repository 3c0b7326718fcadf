"""The example reads at least 97 % of the digits it has never seen, and its command trains."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import ROOT, Command, environment
from warm_children import WarmPython

pytestmark = pytest.mark.slow
EXAMPLE = ROOT / "examples" / "digits_fit.py"
LEAST = 0.97


def command_of(program: str) -> list[str]:
    """The command in the example's docstring."""
    text = ast.get_docstring(ast.parse(EXAMPLE.read_text())) or ""
    return shlex.split(next(line for line in text.splitlines() if line.startswith(program)))[1:]


def test_the_script_reads_the_held_out_digits(warm_python: WarmPython) -> None:
    done = warm_python(ROOT, *command_of("python"), environment=environment())
    found = re.fullmatch(r"240 updates, (\d+\.\d)% of the held-out digits are right\n", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) >= 100 * LEAST


def test_the_command_trains(tmp_path: Path, command: Command) -> None:
    words = command_of("autoaccum")
    words[words.index("--epochs") + 1] = "1"
    words[words.index("--run-dir") + 1] = str(tmp_path / "run")
    done = command(ROOT, *words, "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["updates"] == 12
    assert (tmp_path / "run" / "model.pt").exists()
