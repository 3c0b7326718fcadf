"""Show a study of `tune`: its progress, and its result as tables or as a record."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.checks import counted
from autoaccum.reporting.console import PlainConsole, make_table, one_line, path_value, print_rows, relative_path
from autoaccum.reporting.fit_report import format_seconds
from autoaccum.reporting.page import Block, Facts, Grid, Page, Picture, Section, Tone, plain_facts
from autoaccum.reporting.plan_report import answer_rows, speeds_table
from autoaccum.reporting.progress import PlanProgress, parameter_words
from autoaccum.serialization import to_plain
from autoaccum.training.fit_events import Notice
from autoaccum.tuning.tuning_records import (
    Row,
    SearchSpace,
    SearchStarted,
    State,
    StudyOpened,
    Tuning,
)
from autoaccum.units import percent

STYLES: dict[State, str] = {
    "complete": "green",
    "pruned": "",
    "diverged": "magenta",
    "out_of_memory": "magenta",
    "failed": "bold red",
    "running": "cyan",
    "waiting": "cyan",
}
"""The style of each state, the best state first."""
NOTHING = "no trial finished its budget with a finite loss"
_MOST_TRIALS = 15
_ORDER = tuple(STYLES)


def tuning_record(tuning: Tuning) -> dict[str, Any]:
    """Return the result of a study as plain values; the plan is as in a plan file."""
    plan = None if tuning.plan is None else json.loads(tuning.plan.to_json())
    return {"schema": tuning.schema, **to_plain(dataclasses.replace(tuning, plan=None)), "plan": plan}


def row_cells(row: Row, space: SearchSpace) -> tuple[str, str, str, str, str]:
    """Return a trial's number, outcome, loss, time, and what it trained with."""
    loss = row.loss if row.loss is not None or not row.losses else row.losses[-1][1]
    took = f"{row.seconds:.1f} s" if row.samples else "-"
    words = filter(None, (setting_words(row, space), *_notes(row, space)))
    return str(row.number), _outcome(row), format_loss(loss), took, "; ".join(words)


def _outcome(row: Row) -> str:
    return "interrupted" if row.lost else row.state.replace("_", " ")


def _notes(row: Row, space: SearchSpace) -> Iterator[str]:
    if row.setting is not None and row.setting.learning_rate == space.default_learning_rate:
        yield "the workload's learning rate"
    if row.state == "pruned" and row.losses:
        yield f"loss after {row.losses[-1][0]} %"
    if row.oom_retries:
        yield f"out of memory {counted(row.oom_retries, 'time')}"
    if row.reason is not None:
        yield row.reason


def setting_words(trial: Row, space: SearchSpace) -> str:
    """Write the settings of a trial that differ between trials; empty until they are drawn."""
    setting = trial.setting
    if setting is None:
        return ""
    words = [f"learning rate {setting.learning_rate:.3g}"]
    if len(space.target_batches.sizes) > 1:
        words.append(f"effective batch {setting.target_batch}")
    return ", ".join(words)


def space_words(space: SearchSpace) -> str:
    """Write the search space."""
    rates, targets = space.learning_rates, space.target_batches
    words = [f"learning rates {rates.low:.3g} to {rates.high:.3g}"]
    words.append(f"effective batch {' or '.join(map(str, targets.sizes))}")
    return "; ".join(words)


def format_loss(loss: float | None) -> str:
    """Format a loss; a dash where there is none."""
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.4g}"


def print_tuning(
    console: Console, tuning: Tuning, commands: Mapping[str, Sequence[str]], written: Mapping[str, Path]
) -> None:
    """Print the result of a study, the files `written`, and the exact next `commands`, each with a phrase."""
    print_rows(console, result_rows(tuning))
    console.print()
    console.print(trials_table(tuning, _MOST_TRIALS))
    if tuning.throughput is not None:
        console.print()
        console.print(speeds_table(tuning.throughput))
    console.print()
    for what, path in written.items():
        console.print(f"{what} in {relative_path(path)}", soft_wrap=True)
    for what, words in commands.items():
        console.print(f"{what}:\n  {shlex.join(words)}", soft_wrap=True)


def result_rows(tuning: Tuning) -> Iterator[tuple[str, Text]]:
    """Yield the rows of the result: name and value."""
    best, plan, space = tuning.best, tuning.plan, tuning.space
    if best is None:
        yield "best", Text(NOTHING, "bold red")
    else:
        yield "best", Text(f"{setting_words(best, space)}, of trial {best.number}", "bold green")
        yield "loss", Text(f"{format_loss(best.loss)} on held-out data", "bold green")
        yield "default rate", Text(_own_words(tuning, best))
    yield "micro-batch", Text(f"{space.micro_batch}, the plan's for all trials")
    if plan is not None:
        yield "plan", Text(f"{format_parts(plan.micro_batches)} samples per update")
    yield "budget", Text(f"{tuning.budget:,} samples a trial; losses are of {tuning.workload['held_out']}")
    yield "trials", Text(_trial_words(tuning))
    yield "study", path_value(f"{tuning.study} in {tuning.storage}")
    yield "time", Text(format_seconds(tuning.seconds))
    for warning in tuning.warnings:
        yield "warning", Text(warning, "yellow")


def _own_words(tuning: Tuning, best: Row) -> str:
    """Compare with the workload's own learning rate."""
    own, rate = tuning.own, f"{tuning.space.default_learning_rate:.3g}"
    if own is None:
        return f"{rate}: not run to the end"
    if own.number == best.number:
        return f"{rate}: no other rate was better"
    theirs, ours = own.loss or 0.0, best.loss or 0.0
    change = f" ({percent(ours - theirs, theirs, sign=True)})" if theirs > 0 else ""
    return f"{rate}: loss {format_loss(theirs)}, the best has {format_loss(ours)}{change}"


def _trial_words(tuning: Tuning) -> str:
    counts = Counter(map(_outcome, sorted(tuning.rows, key=_rank)))
    words = ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "none"
    return words if tuning.ended is None else f"{words}; ended early: {tuning.ended}"


def trials_table(tuning: Tuning, most: int | None = None) -> Table:
    """List the trials of the search, the best first; only the first `most` of them."""
    table = make_table(">trial", "outcome", ">loss", ">time", "with")
    rows = sorted(tuning.rows, key=_rank)
    for row in rows[:most]:
        number, outcome, loss, took, words = row_cells(row, tuning.space)
        is_best = tuning.best is not None and tuning.best.number == row.number
        table.add_row(
            *(number, Text(outcome, STYLES[row.state]), loss, took, one_line(words)),
            style="bold green" if is_best else "",
        )
    if most is not None and len(rows) > most:
        table.add_row(*[""] * 4, f"{len(rows) - most} more: --json has them all", style="dim")
    return table


def _rank(row: Row) -> tuple[int, int, float, int]:
    done = row.losses[-1] if row.losses else (0, float("inf"))
    loss = done[1] if row.loss is None else row.loss
    return _ORDER.index(row.state), -done[0] if row.state == "pruned" else 0, loss, row.number


_TRIAL = "{:>5}  {:<13}  {:>9}  {:>8}  {}"


class TuneProgress(PlanProgress):
    """Shows the progress of a study and of its planning; an error of the console ends the drawing, not the study."""

    _space: SearchSpace
    _finished = _trials = 0
    _headed = False

    def __init__(self, console: PlainConsole, *, quiet: bool = False) -> None:
        super().__init__(console, quiet=quiet, outlives_console=True)

    def notify(self, event: Any) -> None:
        """Show one event."""
        match event:
            case StudyOpened():
                self._open(event)
            case SearchStarted(space, remembered):
                self._space = space
                how = "was planned for this study before" if remembered else "is the plan's for all trials"
                self.say(f"micro-batch {space.micro_batch} {how}")
                self.say(f"searching {space_words(space)}")
            case Row(state="running"):
                done = f"{self._finished} of {self._trials} are done"
                self.show(f"trial {event.number}, {done}: {setting_words(event, self._space)} ...")
            case Row():
                self._end_run(event)
            case Notice(text):
                self.warn(text)
            case _:
                super().notify(event)

    def _open(self, event: StudyOpened) -> None:
        facts, self._finished, self._trials = event.facts, event.finished, event.trials
        schedule = f" with {facts.schedule}" if facts.schedule else ""
        self.say(
            f"{facts.name}: {facts.model}, {parameter_words(facts.parameters, facts.dtypes, facts.precision)},"
            f" {facts.optimizer} at a"
            f" learning rate of {facts.learning_rate:.3g}{schedule}; on {facts.device}; losses on"
            f" {facts.held_out}"
        )
        done = f"; continuing after {event.finished} of {counted(event.trials, 'trial')}" if event.finished else ""
        self.say(f"study {event.name} in {event.storage}{done}")

    def _end_run(self, row: Row) -> None:
        self._finished += not row.lost
        if not self._headed:
            self._headed = True
            self.say(_TRIAL.format("trial", "outcome", "loss", "time", "with"), "dim")
        line = Text(_TRIAL.format(*row_cells(row, self._space)))
        line.stylize(STYLES[row.state], 7, 20)
        self.say(line)


def tune_page(tuning: Tuning, pictures: Mapping[str, bytes]) -> Page:
    """Return the page of a study, with its pictures by `draw_tuning`."""
    from autoaccum.reporting.plan_page import throughput_blocks  # It loads matplotlib.

    best, own, plan = tuning.best, tuning.own, tuning.plan
    tiles: list[tuple[str, str, Tone]] = [("trials", str(len(tuning.rows)), "")]
    if best is not None and best.setting is not None:
        rate = f"{best.setting.learning_rate:.3g}"
        tiles = [("best learning rate", rate, "good"), ("its loss", format_loss(best.loss), ""), *tiles]
    if own is not None:
        tiles += [("loss of the workload's own rate", format_loss(own.loss), "")]
    return Page(
        kind="autoaccum tune",
        title=f"{tuning.study}: {NOTHING if best is None else setting_words(best, tuning.space)}",
        tiles=tiles,
        sections=[
            Section("Result", (Facts.of(result_rows(tuning)),)),
            Section("Loss by learning rate", _picture("the loss over the learning rate", pictures.get("rates.svg"))),
            Section("Course of the search", _picture("the loss over the trials", pictures.get("trials.svg"))),
            Section("Loss while training", _picture("the losses within each trial", pictures.get("courses.svg"))),
            *([] if tuning.throughput is None else [Section("Throughput", throughput_blocks(tuning.throughput))]),
            Section("Trials", (Grid.of(trials_table(tuning)),) if tuning.rows else ()),
            Section("Plan of the best setting", () if plan is None else (Facts.of(answer_rows(plan)),)),
            Section("Made with", (Facts.of(plain_facts(tuning.workload)),)),
        ],
    )


def _picture(name: str, svg: bytes | None) -> tuple[Block, ...]:
    return () if svg is None else (Picture(name, svg),)
