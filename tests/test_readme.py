"""README's two commands are where CI looks for them, and what it says is so."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_finds_both_commands() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    assert [("autoaccum plan" in line, "pytest" in line) for line in commands] == [(True, False), (False, True)]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "command_of 'autoaccum plan'" in script
    assert "command_of pytest" in script


def test_ci_takes_old_and_new_torch_in_turn(tmp_path: Path) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^second_torch\(\).*?^}$", script, re.DOTALL | re.MULTILINE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m one"
    lines = ("set -euo pipefail", "git init -q", function, *(commit, "second_torch") * 3)
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, check=True)
    (least,) = re.findall(r'"torch>=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert done.stdout.split() == [f"torch=={least}.*", "torch==2.10.*", "torch"]
    assert f"PyTorch, {least} or newer" in README


def test_the_terminal_block_shows_the_first_command() -> None:
    (shown,) = re.findall(r"^\$ (autoaccum plan .*)$", README, re.MULTILINE)
    assert f".venv/bin/{shown.replace('-- ', '-- .venv/bin/')}\n" in README


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150
