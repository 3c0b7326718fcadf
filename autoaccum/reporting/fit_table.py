"""What a training came to: a small table with what to do next, or a record for programs."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.reporting.plain_text import near_path
from autoaccum.reporting.rows import path_value, print_rows
from autoaccum.reporting.training_progress import format_seconds, format_values
from autoaccum.training.events import FitResult, Updated

SCHEMA = 1


def print_fit(console: Console, result: FitResult, *, last: Updated | None, command: Sequence[str]) -> None:
    """Draw what a training came to, and the exact next commands.

    Args:
        console: Where to.
        result: What it came to.
        last: The last update of a whole batch that this call made, or the last; None when it made none.
        command: The words of a command that goes on from here.
    """
    print_rows(console, fit_rows(result, last=last))
    console.print()
    for line in next_lines(result, command=command):
        console.print(line, soft_wrap=True)


def fit_rows(result: FitResult, *, last: Updated | None) -> Iterator[tuple[str, Text]]:
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
        yield "shortages", Text(f"out of memory {_count(result.shortages, 'time')}, repeated in smaller micro-batches")
    if result.skipped:
        yield "skipped", Text(f"{_count(result.skipped, 'update')}, not finite", "yellow")
    yield "time", Text(format_seconds(result.seconds))
    paths = {
        "resumed from": result.resumed_from,
        "checkpoint": result.checkpoint,
        "weights": result.model_path,
        "average": result.ema_path,
    }
    for name, path in paths.items():
        if path is not None:
            yield name, path_value(near_path(path))
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
    `skipped`; `seconds`; `stopped`; `run_dir`,
    `checkpoint`, `weights`, `ema_weights`, `resumed_from` as paths; `unsaved`: why the end is not on disk;
    `warnings`. What there is none of is null, and so is a number that is not finite.
    """
    record = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    for name in ("model", "optimizer", "ema_model", "plan"):
        del record[name]
    record["weights"], record["ema_weights"] = record.pop("model_path"), record.pop("ema_path")
    evaluation = result.evaluation or {}
    return {
        "schema": SCHEMA,
        "target_batch": target_batch,
        **{name: str(value) if isinstance(value, Path) else value for name, value in record.items()},
        "loss": _finite(result.loss),
        "evaluation": {name: _finite(value) for name, value in evaluation.items()} or None,
        "micro_batch": None if last is None else last.micro_batch,
        "iter_size": None if last is None else last.micro_batches,
        "planned_micro_batch": None if result.plan is None else result.plan.micro_batch,
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
