"""What benchmarks share: times, the environment of child processes, and tables."""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def seconds_of(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def environment() -> dict[str, str]:
    """For processes that import this checkout and the files beside this one."""
    paths = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def format_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, the first row its head, padded so that the source reads as a table too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *rest = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["-" * width for width in widths], *rest))


def load_model(name: str) -> Any:
    """A module of the folder `models`, which has `model`, `criterion`, `dataset` and `batch`."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "models" / f"{name}.py")))
