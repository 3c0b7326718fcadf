"""What a study has found: a small table with what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.planning.records import Plan
from autoaccum.reporting.plain_text import one_line
from autoaccum.reporting.rows import path_value, row_lines
from autoaccum.reporting.tune_found import loss_words, micro_batch_words, own_words, tolerance_words
from autoaccum.reporting.tune_lines import pruner_words
from autoaccum.reporting.tune_lists import advice_lines, speed_lines, standing_lines, trial_lines
from autoaccum.reporting.tune_next import next_lines
from autoaccum.reporting.tune_words import (
    LABELS,
    LOST,
    batch_words,
    budget_words,
    counted,
    format_rate,
    setting_words,
)
from autoaccum.reporting.update_line import format_seconds
from autoaccum.tuning.records import Row, Tuning
from autoaccum.units import format_bytes

NOTHING = "no trial came to the end of its budget with a finite loss"


def print_tuning(
    console: Console,
    tuning: Tuning,
    *,
    command: Sequence[str],
    more: Sequence[str],
    train: Sequence[str],
    kept: Path | None = None,
    pictured: Path | None = None,
    name: str = "best.json",
) -> None:
    """Draw what a study has found, and the exact next commands.

    Args:
        console: Where to.
        tuning: What it has found.
        command: The words of the command that made it, to be offered again with `-o`.
        more: The words of one that runs more trials.
        train: The words of one that trains, to be offered with `--plan`.
        kept: Where the plan was written, if it was.
        pictured: The folder of the pictures, if they were drawn.
        name: What is offered to `-o`: a file that is not there yet.
    """
    for title, value in tuning_rows(tuning):
        for line in row_lines(console, title, value):
            console.print(line, soft_wrap=True)
    for lines in (standing_lines(tuning), trial_lines(tuning), speed_lines(tuning), advice_lines(console, tuning)):
        _print_list(console, lines)
    console.print()
    offered = next_lines(tuning, command=command, more=more, train=train, kept=kept, pictured=pictured, name=name)
    for line in offered:
        console.print(line, soft_wrap=True)


def _print_list(console: Console, lines: Iterator[Text]) -> None:
    for number, line in enumerate(lines):
        if number == 0:
            console.print()
        line.plain = one_line(line.plain)
        line.rstrip()
        console.print(line, soft_wrap=True)


def tuning_rows(tuning: Tuning) -> Iterator[tuple[str, Text]]:
    """The rows of the table: name and value."""
    best = tuning.best
    if best is None:
        yield "best", Text(NOTHING, "bold red")
    else:
        yield "best", Text(setting_words(best.setting, tuning.space), "bold green").append(f", of trial {best.trial}")
        yield "loss", Text(loss_words(best), "bold green")
        yield "own rate", Text(own_words(tuning, best))
    if tuning.bracket is not None:
        yield "tolerance", Text(tolerance_words(tuning, tuning.bracket))
    yield "micro-batch", Text(micro_batch_words(tuning))
    if tuning.plan is not None:
        yield "plan", Text(_plan(tuning.plan))
    yield "budget", Text(f"{budget_words(tuning.budget)} a trial; losses are of {tuning.held_out}")
    yield "searched", Text(_searched(tuning))
    yield "trials", Text(trial_words(tuning))
    yield "sampler", Text(f"{tuning.sampler}; {pruner_words(tuning.pruner)}; trials train with seed {tuning.seed}")
    yield "study", path_value(f"{tuning.study} in {tuning.storage}")
    yield "time", Text(format_seconds(tuning.seconds))
    for warning in tuning.warnings:
        yield "warning", Text(warning, "yellow")


def _plan(plan: Plan) -> str:
    sum_of = "" if plan.iter_size == 1 else f" = {plan.target_batch}"
    peak = "" if plan.peak_bytes is None else f", peak {format_bytes(plan.peak_bytes)}"
    return f"{format_parts(plan.micro_batches)}{sum_of} samples per update{peak} of {format_bytes(plan.limit_bytes)}"


def _searched(tuning: Tuning) -> str:
    space = tuning.space
    rates = f"{format_rate(space.learning_rates.low)} to {format_rate(space.learning_rates.high)}"
    batches = batch_words(space.target_batches)
    single = space.target_batches.single
    words = [
        f"learning rates {rates}",
        f"effective batch {batches}" if single else f"effective batches {batches} by doublings",
    ]
    if space.coupled is not None:
        words.append(f"micro-batches {', '.join(map(str, space.micro_batches))}")
    return "; ".join(words)


def trial_words(tuning: Tuning) -> str:
    """How many trials there are, and what they came to."""
    searched, confirming = split_rows(tuning.rows)
    count = _count_kept(searched)
    words = (f"{count}: " if count else "none") + state_words(searched)
    if confirming:
        runs = counted(_count_kept(confirming), "run")
        words += f"; {runs} of the best with other seeds: {state_words(confirming)}"
    if tuning.ended is not None:
        words += f"; ended early: {tuning.ended}"
    return words


def state_words(rows: Sequence[Row]) -> str:
    """How many of each state; those that were lost are in no count but their own."""
    counts = Counter(row.state for row in rows if not row.lost)
    words = ", ".join(f"{counts[state]} {label}" for state, label in LABELS.items() if counts[state])
    lost = len(rows) - _count_kept(rows)
    return f"{words} ({lost} more {LOST} and put back)" if lost else words


def _count_kept(rows: Sequence[Row]) -> int:
    return sum(not row.lost for row in rows)


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The trials of the search, and the confirmations."""
    return [row for row in rows if row.confirms is None], [row for row in rows if row.confirms is not None]
