"""What to do next with what a study has found: the exact commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from autoaccum.reporting.plain_text import near_path
from autoaccum.tuning.records import Tuning


def next_lines(
    tuning: Tuning,
    *,
    command: Sequence[str],
    more: Sequence[str],
    train: Sequence[str],
    kept: Path | None = None,
    pictured: Path | None = None,
    name: str = "best.json",
) -> Iterator[Text]:
    """What to do next, as lines to be copied."""
    if pictured is not None:
        yield Text(f"pictures in {near_path(pictured)}")
    if tuning.plan is not None:
        if kept is None:
            yield Text("keep its plan:")
            yield Text(f"  {shlex.join([*command, '-o', name])}", "cyan")
        else:
            yield Text(f"its plan is kept in {near_path(kept)}")
        yield Text("train with it:")
        yield Text(f"  {shlex.join([*train, '--plan', name if kept is None else str(kept)])}", "cyan")
    yield Text("go on with more trials:")
    yield Text(f"  {shlex.join(more)}", "cyan")
    yield Text("look at the study (pip install optuna-dashboard):")
    yield Text(f"  {shlex.join(['optuna-dashboard', tuning.storage_url])}", "cyan")
