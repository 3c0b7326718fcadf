"""The command in a process of its own, or in this one with warm children, which takes a tenth of the time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autoaccum.cli import main

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]
"""What the fixture `command` returns: called with a folder, words, and variables of the environment."""
_OUTSIDE = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTORCH")


def environment(**extra: str) -> dict[str, str]:
    """That of this process, without what changes what is shown or predicted."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_OUTSIDE)}
    return plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | extra


def autoaccum(folder: Path, *words: str, code: str | None = None, **extra: str) -> Done:
    """Run it in `folder`, or lines of Python in its place; `extra` are variables of the environment."""
    command = ["-m", "autoaccum"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *command, *words],
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def invoke(*words: str, env: Mapping[str, str] | None = None) -> Result:
    """Run it in this process, without children that are warm: for what needs none."""
    return CliRunner().invoke(main, words, env=env)


def printed_lines(stdout: str) -> list[str]:
    """Return the lines without those that gloo itself prints of each group of ranks, up to torch 2.10."""
    return [line for line in stdout.splitlines() if not line.startswith("[Gloo] ")]


def wait_for(path: Path) -> None:
    """Wait for a file, as long as a machine that others use may take to start a process."""
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not come")


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def command(warm_children: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run it in this process; what its children write is captured, too."""

    def run(folder: Path, *words: str, **extra: str) -> Done:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name in os.environ:
                if name.startswith(_OUTSIDE):
                    patch.delenv(name)
            for name, value in extra.items():
                patch.setenv(name, value)
            capfd.readouterr()
            with pytest.raises(SystemExit) as leaving:
                main(list(words))
        assert isinstance(leaving.value.code, int)
        return Done(words, leaving.value.code, *capfd.readouterr())

    return run
