"""Show a training: its progress, and its result as a table with the next commands or as a record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from autoaccum.checks import counted
from autoaccum.reporting.console import Block, Facts, PlainConsole, copied, offer, one_line, relative_path
from autoaccum.reporting.progress import PlanProgress
from autoaccum.serialization import to_plain
from autoaccum.training.fit_events import Evaluated, FitResult, Notice, Started, Updated, WorkloadOutput
from autoaccum.units import format_bytes, format_rate

SCHEMA = 3
_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0


def fit_blocks(result: FitResult, *, command: Sequence[str]) -> list[Block]:
    """Return the result of a training, and the exact next commands; `command` continues the training."""
    blocks: list[Block] = [Facts(list(_rows(result))), "", *offer("continue the training", command)]
    if result.model_path is not None:
        weights = f"torch.load({relative_path(result.model_path)!r}, weights_only=True)"
        blocks += offer("use the weights", f"model.load_state_dict({weights})")
    return blocks


def fit_record(result: FitResult, **target: int | None) -> dict[str, Any]:
    """Return the result of a training as plain values: the fields of `FitResult`.

    What there is none of is null, and so is a number that is not finite.
    """
    record = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    for name in ("model", "optimizer", "ema_model", "plan"):
        del record[name]
    record["weights"], record["ema_weights"] = record.pop("model_path"), record.pop("ema_path")
    evaluation = result.evaluation or {}
    return {
        "schema": SCHEMA,
        **target,
        **{name: str(value) if isinstance(value, Path) else value for name, value in record.items()},
        "loss": _finite(result.loss),
        "evaluation": {name: _finite(value) for name, value in evaluation.items()} or None,
        "planned_micro_batch": None if result.plan is None else result.plan.micro_batch,
        "warnings": to_plain(result.warnings),
    }


def _rows(result: FitResult) -> Iterator[tuple[str, str | Text]]:
    epochs = f" in {counted(result.epochs, 'epoch')}" if result.epochs else ""
    yield "updates", Text(f"{result.updates}{epochs}, {result.samples:,} samples")
    if result.loss is not None:
        yield "loss", Text(f"{result.loss:.6g} in the last update", "bold green")
    if result.evaluation is not None:
        yield "evaluation", Text(_format_values(result.evaluation), "bold green")
    size, plan, limit = result.micro_batch, result.plan, f"{result.micro_batch:,}"
    planned = size if plan is None else plan.micro_batch
    if result.micro_tokens is not None:
        size, limit = result.micro_tokens, f"{result.micro_tokens:,} padded tokens"
        planned = size if plan is None or plan.tokens is None else plan.tokens.micro_tokens
    yield "micro-batch", Text(limit if size == planned else f"lowered to {limit} ({planned:,} planned)")
    if result.oom_retries:
        yield "OOM retries", Text(f"{result.oom_retries}")
    if result.added_savers:
        yield "added savers", Text(f"{', '.join(result.added_savers)}: no smaller micro-batch was left", "yellow")
    if result.skipped:
        yield "skipped", Text(f"{counted(result.skipped, 'update')}, not finite", "yellow")
    yield "time", Text(format_seconds(result.seconds))
    paths = {
        "resumed from": result.resumed_from,
        "checkpoint": result.checkpoint,
        "weights": result.model_path,
        "average": result.ema_path,
    }
    for name, path in paths.items():
        if path is not None:
            yield name, copied(relative_path(path))
    if result.stopped is not None:
        yield "ended by", Text(f"a {result.stopped}")


class TrainingProgress(PlanProgress):
    """Draws a training's events, and the planner's before it starts.

    On a terminal one line is redrawn, at most four times a second. Elsewhere a line is written every ten seconds, and
    at the end. No thread does that, since data workers may be forked.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self, console: PlainConsole, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, quiet=quiet, auto_refresh=False)
        self._clock = clock
        self._seconds_between = _REDRAW_SECONDS if console.can_redraw else _LINE_SECONDS
        self._next_drawn = 0.0
        self._started: Started | None = None
        self._first: tuple[int, float] | None = None
        self._line = ""

    def notify(self, event: Any) -> None:
        """Show one event, of training or of planning."""
        match event:
            case Started():
                self.stop()
                self._started, self._next_drawn = event, self._clock() + self._seconds_between
                self.say(headline(event))
                if self.console.can_redraw:
                    self.show(f"update {event.update}")
            case Updated() if self._started is not None:
                now = self._clock()
                # The first update takes longer than others: state is allocated, kernels are chosen.
                self._first = self._first or (event.update, now)
                self._line = self._describe(self._started, event, now)
                if now >= self._next_drawn:
                    self._next_drawn = now + self._seconds_between
                    if self.console.can_redraw:
                        self.show(self._line)
                    else:
                        self._write()
            case WorkloadOutput(line):
                self.print_output(line)
            case Evaluated(update, values, samples, seconds):
                text = f"{_format_values(values)} ({samples:,} samples in {seconds:.1f} s)"
                self.say(f"update {update}: evaluation {text}")
            case Notice(said, warns=True):
                self.warn(str(said))
            case Notice(said):
                self.say(f"note: {said}")
            case _:
                super().notify(event)

    def stop(self) -> None:
        """Remove the live line, and print that of the last update."""
        super().stop()
        self._write()

    def _write(self) -> None:
        if self._line:
            self.say(self._line)
        self._line = ""

    def _describe(self, started: Started, event: Updated, now: float) -> str:
        """Return the line that shows a running training."""
        of = "" if started.updates is None else f" of {started.updates}"
        pieces = [f"update {event.update}{of}"]
        if started.epochs is not None and (started.updates is None or started.epochs > 1):
            pieces[0] += f", epoch {event.epoch} of {started.epochs}"
        pieces.append(f"loss {event.loss:.4g}")
        first, began = self._first or (event.update, now)
        if first < event.update < (total := started.updates or 0):
            left = (now - began) / (event.update - first) * (total - event.update)
            pieces.append(f"{format_seconds(left)} left")
        pieces.append(f"{format_rate(event.samples_per_second)} samples/s")
        if event.peak_bytes is not None:
            of_process = "process " if str(started.device) == "cpu" else ""
            pieces.append(f"{of_process}peak {format_bytes(event.peak_bytes)}")
        return "  ".join(pieces)


def headline(event: Started) -> str:
    """Say what is trained on which device, and from which update it continues."""
    from autoaccum.sharded_tensors import model_class  # Later: it imports torch.

    limit = f"{event.micro_batch:,}" if event.micro_tokens is None else f"{event.micro_tokens:,} padded tokens"
    is_whole = event.micro_tokens is None and event.micro_batch >= (event.target_batch or math.inf)
    parts = "whole" if is_whole else f"in micro-batches of up to {limit}"
    updates = f"{event.target_batch:,} samples" if event.target_tokens is None else f"{event.target_tokens:,} tokens"
    name = model_class(event.model).__name__
    text = f"training {name} on {event.device}: {updates} per update, {parts}"
    if event.resumed_from is not None:
        text += f"; continuing after update {event.update}, from {relative_path(event.resumed_from)}"
    return one_line(text)


def format_seconds(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds.

    >>> format_seconds(59.6), format_seconds(3723), format_seconds(100 * 3600)
    ('1:00', '1:02:03', '100:00:00')
    """
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _format_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
