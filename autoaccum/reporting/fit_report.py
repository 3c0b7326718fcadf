"""Show a training: its progress, and its result as a table with the next commands or as a record."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.checks import counted
from autoaccum.reporting.console import PlainConsole, one_line, path_value, print_rows, relative_path
from autoaccum.reporting.plan_report import PlanProgress
from autoaccum.reporting.progress import Progress
from autoaccum.training import fit_events
from autoaccum.training.fit_events import FitResult, Updated
from autoaccum.units import format_bytes

SCHEMA = 2


def print_fit(console: Console, result: FitResult, *, last: Updated | None, command: Sequence[str]) -> None:
    """Print the result of a training, and the exact next commands; `command` continues the training.

    `last` is the last update of a whole batch that this call made, else its last update; None when it made none.
    """
    print_rows(console, fit_rows(result, last=last))
    console.print()
    for line in next_lines(result, command=command):
        console.print(line, soft_wrap=True)


def fit_rows(result: FitResult, *, last: Updated | None) -> Iterator[tuple[str, Text]]:
    """Yield the rows of the table: name and value."""
    epochs = f" in {counted(result.epochs, 'epoch')}" if result.epochs else ""
    yield "updates", Text(f"{result.updates}{epochs}, {result.samples:,} samples")
    if result.loss is not None:
        yield "loss", Text(f"{result.loss:.6g} in the last update", "bold green")
    if result.evaluation is not None:
        yield "evaluation", Text(format_values(result.evaluation), "bold green")
    if last is not None:
        size = str(last.micro_batch)
        if result.plan is not None and last.micro_batch != result.plan.micro_batch:
            size += f" in the last update, planned were {result.plan.micro_batch}"
        yield "micro-batch", Text(size)
        yield "iter_size", Text(f"{last.micro_batches}")
    if result.oom_retries:
        how = " or with more savers" if result.added_savers else ""
        yield "OOM retries", Text(f"{result.oom_retries}, in smaller micro-batches{how}")
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
            yield name, path_value(relative_path(path))
    if result.stopped is not None:
        yield "ended by", Text(f"a {result.stopped}")


def next_lines(result: FitResult, *, command: Sequence[str]) -> Iterator[Text]:
    """Yield what to do next, as lines to be copied."""
    yield Text("continue the training:")
    yield Text(f"  {shlex.join(command)}", "cyan")
    if result.model_path is not None:
        yield Text("use the weights:")
        yield Text(
            f"  model.load_state_dict(torch.load({relative_path(result.model_path)!r}, weights_only=True))", "cyan"
        )


def fit_record(result: FitResult, *, target_batch: int, last: Updated | None) -> dict[str, Any]:
    """Return the result of a training as plain values.

    `schema`; `target_batch`; `updates`, `epochs`, `samples` so far; `loss` of the last update; `evaluation` by name;
    `micro_batch` (samples) and `iter_size` (how many) of the last whole update; `planned_micro_batch`; `oom_retries`;
    `added_savers`; `skipped`; `seconds`; `stopped`; `run_dir`,
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_SAID = (
    *(fit_events.OutOfMemoryRetry, fit_events.SaverAdded, fit_events.CeilingRaised),
    *(fit_events.Evaluated, fit_events.Skipped),
)
_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0


class TrainingProgress(Progress):
    """Draws a training's events, and the planner's before it starts.

    On a terminal one line is redrawn, at most four times a second and by no thread of its own. Elsewhere a line is
    written every ten seconds, and at the end.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self, console: PlainConsole, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, quiet=quiet, outlives_console=True, auto_refresh=False)
        # Trials in this process refuse other threads.
        self._planning = PlanProgress(console, quiet=quiet, outlives_console=True, auto_refresh=False)
        self._clock = clock
        self._seconds_between = _REDRAW_SECONDS if console.can_redraw else _LINE_SECONDS
        self._next_drawn = 0.0
        self._line = UpdateLine()
        self._shown: Updated | None = None

    def notify(self, event: Any) -> None:
        """Show one event, of training or of planning."""
        if isinstance(event, fit_events.Updated):
            now = self._clock()
            self._line.update(event, now)
            if now >= self._next_drawn:
                self._draw()
        elif isinstance(event, fit_events.Started):
            self._planning.stop()
            self._line.start(event)
            self.say(headline(event))
            self._next_drawn = self._clock() + self._seconds_between
            self.show(self._line.text())
        elif isinstance(event, fit_events.WorkloadOutput):
            self._planning.print_output(event.line)
        elif isinstance(event, fit_events.EvaluationFailed | fit_events.CheckpointFailed):
            self.warn(sentence(event))
        elif isinstance(event, _SAID):
            self.say(sentence(event))
        elif isinstance(event, fit_events.Notice):
            if event.warns:
                self.warn(event.text)
            else:
                self.say(f"note: {event.text}")
        elif not isinstance(event, fit_events.Planning | fit_events.EpochEnded | fit_events.CheckpointWritten):
            self._planning.notify(event)

    def stop(self) -> None:
        """Remove the live line, and print that of the last update."""
        self._planning.stop()
        super().stop()
        self._write()

    def _draw(self) -> None:
        """Update the live line; without a terminal, print a line if there is anything new."""
        self._next_drawn = self._clock() + self._seconds_between
        if self.is_live:
            self.show(self._line.text())
        else:
            self._write()

    def _write(self) -> None:
        if self._line.last is not self._shown:
            self._shown = self._line.last
            self.say(self._line.text())


def headline(event: fit_events.Started) -> str:
    """Say what is trained on which device, and from which update it continues."""
    from autoaccum.accumulation.sharded_tensors import model_class  # Later: it imports torch.

    parts = f"in micro-batches of up to {event.micro_batch}" if event.micro_batch < event.target_batch else "whole"
    name = model_class(event.model).__name__
    text = f"training {name} on {event.device}: {event.target_batch} samples per update, {parts}"
    if event.resumed_from is not None:
        text += f"; continuing after update {event.update}, from {relative_path(event.resumed_from)}"
    return one_line(text)


def sentence(event: Any) -> str:
    """Write an event as a line."""
    if isinstance(event, fit_events.OutOfMemoryRetry):
        return (
            f"update {event.update}: out of memory in {event.phase} with micro-batches of {event.micro_batch}, "
            f"repeated with at most {event.next_micro_batch}"
        )
    if isinstance(event, fit_events.SaverAdded):
        return (
            f"update {event.update}: out of memory in {event.phase} with micro-batches of {event.micro_batch}, "
            f"repeated with {event.saver}, and so are later updates"
        )
    if isinstance(event, fit_events.CeilingRaised):
        return f"update {event.update}: after a while without OOM, micro-batches of up to {event.micro_batch} are tried"
    if isinstance(event, fit_events.Evaluated):
        values = format_values(event.values)
        return f"update {event.update}: evaluation {values} ({event.samples:,} samples in {event.seconds:.1f} s)"
    if isinstance(event, fit_events.EvaluationFailed):
        return f"update {event.update}: the evaluation could not be finished, training goes on: {event.reason}"
    if isinstance(event, fit_events.CheckpointFailed):
        return f"update {event.update}: no checkpoint could be written, earlier ones are as they were: {event.reason}"
    assert isinstance(event, fit_events.Skipped)
    return f"update {event.update} is skipped: {event.reason}"


class UpdateLine:
    """The line that shows a running training; `last` is its last update, None before the first."""

    def __init__(self) -> None:
        self.last: fit_events.Updated | None = None
        self._first_update, self._first_time, self._time = 0, 0.0, 0.0
        self._update = 0
        self._updates: int | None = None
        self._epochs: int | None = None

    def start(self, event: fit_events.Started) -> None:
        """Set the number of updates and epochs."""
        self._update = event.update
        self._updates, self._epochs = event.updates, event.epochs

    def update(self, event: fit_events.Updated, now: float) -> None:
        """Take an update made at `now`, in seconds."""
        if self.last is None:  # It took longer than others: state is allocated, kernels are chosen.
            self._first_update, self._first_time = event.update, now
        self.last, self._update, self._time = event, event.update, now

    def text(self) -> str:
        """Return the line."""
        of = "" if self._updates is None else f" of {self._updates}"
        pieces = [f"update {self._update}{of}"]
        if self.last is not None:
            if self._epochs is not None and (self._updates is None or self._epochs > 1):
                pieces[0] += f", epoch {self.last.epoch} of {self._epochs}"
            pieces.append(f"loss {self.last.loss:.4g}")
            if (left := self._seconds_left()) is not None:
                pieces.append(f"{format_seconds(left)} left")
            pieces.append(f"{_format_rate(self.last.samples_per_second)} samples/s")
            if self.last.peak_bytes is not None:
                pieces.append(f"peak {format_bytes(self.last.peak_bytes)}")
        return "  ".join(pieces)

    def _seconds_left(self) -> float | None:
        made = self._update - self._first_update
        if self._updates is None or made < 1 or self._update >= self._updates:
            return None
        return (self._time - self._first_time) / made * (self._updates - self._update)


def format_values(values: Mapping[str, float]) -> str:
    """Write values with their names.

    >>> format_values({"loss": 0.25, "accuracy": 0.9375})
    'loss 0.25, accuracy 0.9375'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def format_seconds(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds.

    >>> format_seconds(59.6), format_seconds(3723), format_seconds(100 * 3600)
    ('1:00', '1:02:03', '100:00:00')
    """
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 or not math.isfinite(rate) else f"{rate:.3g}"
