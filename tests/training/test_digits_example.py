"""The example reads at least 97 % of the digits it has never seen, from Python and from the command line."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "digits_fit.py"
LEAST = 0.97


def command(program: str) -> list[str]:
    """The command in the example's docstring."""
    text = ast.get_docstring(ast.parse(EXAMPLE.read_text())) or ""
    return shlex.split(next(line for line in text.splitlines() if line.startswith(program)))[1:]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_script_reads_the_held_out_digits() -> None:
    output = run(*command("python")).stdout
    found = re.fullmatch(r"240 updates, (\d+\.\d)% of the held-out digits are right\n", output)
    assert found is not None, output
    assert float(found[1]) >= 100 * LEAST


def test_the_command_reads_most_of_the_held_out_digits_sooner(tmp_path: Path) -> None:
    words = command("autoaccum")
    words[words.index("--epochs") + 1] = "4"
    words[words.index("--run-dir") + 1] = str(tmp_path / "run")
    result = json.loads(run("-m", "autoaccum", *words, "--quiet", "--json").stdout)
    assert result["evaluation"]["right"] >= 0.8
    assert (tmp_path / "run" / "model.pt").exists()
