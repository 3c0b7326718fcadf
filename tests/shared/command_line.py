"""The command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]
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
