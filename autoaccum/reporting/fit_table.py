"""What a training came to: a small table with what to do next, or a record for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.reporting.plain_text import near_path
from autoaccum.reporting.rows import path_value, row_lines
from autoaccum.reporting.update_line import format_seconds, format_values
from autoaccum.training.events import FitResult, Updated
from autoaccum.training.noise_scale import noise_sentence

SCHEMA = 1


def print_fit(
    console: Console, result: FitResult, *, target_batch: int, last: Updated | None, command: Sequence[str]
) -> None:
    """Draw what a training came to, and the exact next commands.

    Args:
        console: Where to.
        result: What it came to.
        target_batch: Samples per update.
        last: The last update of a whole batch that this call made, or the last; None when it made none.
        command: The words of a command that goes on from here.
    """
    for title, value in fit_rows(result, target_batch=target_batch, last=last):
        for line in row_lines(console, title, value):
            console.print(line, soft_wrap=True)
    console.print()
    for line in next_lines(result, command=command):
        console.print(line, soft_wrap=True)


def fit_rows(result: FitResult, *, target_batch: int, last: Updated | None) -> Iterator[tuple[str, Text]]:
    """The rows of the table: name and value."""
    yield "updates", Text(_made(result))
    if result.loss is not None:
        yield "loss", Text(f"{result.loss:.6g} in the last update", "bold green")
    if result.evaluation is not None:
        yield "evaluation", Text(format_values(result.evaluation), "bold green")
    if last is not None:
        yield "micro-batch", Text(_micro_batch(result, last))
        yield "iter_size", Text(f"{last.micro_batches}")
    if result.shortages:
        yield "shortages", Text(f"out of memory {_times(result.shortages)}, repeated in smaller micro-batches")
    if result.skipped:
        yield "skipped", Text(f"{_count(result.skipped, 'update')}, not finite", "yellow")
    if result.noise_scale is not None:
        yield "noise scale", Text(noise_sentence(result.noise_scale, target_batch))
    yield "time", Text(format_seconds(result.seconds))
    if result.resumed_from is not None:
        yield "resumed from", path_value(near_path(result.resumed_from))
    if result.checkpoint is not None:
        yield "checkpoint", path_value(near_path(result.checkpoint))
    if result.model_path is not None:
        yield "weights", path_value(near_path(result.model_path))
    if result.ema_path is not None:
        yield "average", path_value(near_path(result.ema_path))
    if result.stopped is not None:
        yield "ended by", Text(f"a {result.stopped}")


def next_lines(result: FitResult, *, command: Sequence[str]) -> Iterator[Text]:
    """What to do next, as lines to be copied."""
    yield Text("go on from here:")
    yield Text(f"  {shlex.join(command)}", "cyan")
    if result.model_path is not None:
        yield Text("use the weights:")
        yield Text(f"  model.load_state_dict(torch.load({near_path(result.model_path)!r}, weights_only=True))", "cyan")


def fit_record(result: FitResult, *, target_batch: int, last: Updated | None) -> dict[str, Any]:
    """What a training came to, as plain values.

    `schema`; `target_batch`; `updates`, `epochs`, `samples` so far; `loss` of the last update; `evaluation` by name;
    `micro_batch` (samples) and `iter_size` (how many) of the last whole update; `planned_micro_batch`; `shortages`;
    `skipped`; `seconds`; `stopped`; `noise_scale` with `value`, `low`, `high`, `updates`, `reason`; `run_dir`,
    `checkpoint`, `weights`, `ema_weights`, `resumed_from` as paths; `unsaved`: why the end is not on disk;
    `warnings`. What there is none of is null, and so is a number that is not finite.
    """
    return {
        "schema": SCHEMA,
        "target_batch": target_batch,
        "updates": result.updates,
        "epochs": result.epochs,
        "samples": result.samples,
        "loss": _finite(result.loss),
        "evaluation": None
        if result.evaluation is None
        else {name: _finite(value) for name, value in result.evaluation.items()},
        "micro_batch": None if last is None else last.micro_batch,
        "iter_size": None if last is None else last.micro_batches,
        "planned_micro_batch": None if result.plan is None else result.plan.micro_batch,
        "shortages": result.shortages,
        "skipped": result.skipped,
        "seconds": result.seconds,
        "stopped": result.stopped,
        "noise_scale": None if result.noise_scale is None else asdict(result.noise_scale),
        "run_dir": _path(result.run_dir),
        "checkpoint": _path(result.checkpoint),
        "weights": _path(result.model_path),
        "ema_weights": _path(result.ema_path),
        "resumed_from": _path(result.resumed_from),
        "unsaved": result.unsaved,
        "warnings": list(result.warnings),
    }


def _made(result: FitResult) -> str:
    epochs = f" in {_count(result.epochs, 'epoch')}" if result.epochs else ""
    return f"{result.updates}{epochs}, {result.samples:,} samples"


def _micro_batch(result: FitResult, last: Updated) -> str:
    plan = result.plan
    if plan is None or last.micro_batch == plan.micro_batch:
        return str(last.micro_batch)
    return f"{last.micro_batch} in the last update, planned were {plan.micro_batch}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)
