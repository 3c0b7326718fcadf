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
from autoaccum.reporting.tune_lists import advice_lines, speed_lines, standing_lines, trial_lines
from autoaccum.reporting.tune_next import next_lines
from autoaccum.reporting.tune_words import (
    LABELS,
    batch_words,
    budget_words,
    counted,
    format_loss,
    format_rate,
    setting_words,
)
from autoaccum.reporting.update_line import format_seconds
from autoaccum.tuning.records import Bracket, Row, Standing, Tuning
from autoaccum.units import format_bytes, percent

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
        yield "loss", Text(_loss(best), "bold green")
        yield "own rate", Text(_compared(tuning, best))
    if tuning.bracket is not None:
        yield "tolerance", Text(bracket_words(tuning.bracket))
    yield "micro-batch", Text(_micro_batch(tuning))
    if tuning.plan is not None:
        yield "plan", Text(_plan(tuning.plan))
    yield "budget", Text(f"{budget_words(tuning.budget)} a trial; losses are of {tuning.held_out}")
    yield "searched", Text(_searched(tuning))
    yield "trials", Text(trial_words(tuning))
    yield "sampler", Text(f"{tuning.sampler}; {tuning.pruner}; trials train with seed {tuning.seed}")
    yield "study", path_value(f"{tuning.study} in {tuning.storage}")
    yield "time", Text(format_seconds(tuning.seconds))
    for warning in tuning.warnings:
        yield "warning", Text(warning, "yellow")


def bracket_words(bracket: Bracket) -> str:
    """Which rates the study cannot tell from the best, and under what premise."""
    low, high = bracket.low, bracket.high
    if low is None and high is None:
        return "no rate that was tried is clearly worse: the study cannot tell one from the other"
    if low is not None and high is not None:
        where = f"the best rate lies between {format_rate(low)} and {format_rate(high)}, which are clearly worse"
    elif high is not None:
        where = f"the best rate lies below {format_rate(high)}, and no lower one that was tried is clearly worse"
    else:
        where = f"the best rate lies above {format_rate(low or 0)}, and no higher one that was tried is clearly worse"
    return f"{where}{_noise_words(bracket)}, if the loss has one valley"


def _noise_words(bracket: Bracket) -> str:
    if bracket.noise is None:
        return " (by any difference: no setting was repeated)"
    return f" (by more than {format_loss(bracket.noise)}, which may be chance)"


def _loss(best: Standing) -> str:
    if best.mean is None or len(best.losses) < 2:
        return f"{format_loss(best.losses[0] if best.losses else None)} on held-out data, in one run"
    spread = "" if best.spread is None else f", standard deviation {format_loss(best.spread)}"
    return f"{format_loss(best.mean)} on held-out data, the mean of {counted(len(best.losses), 'seed')}{spread}"


def _compared(tuning: Tuning, best: Standing) -> str:
    """The workload's own rate beside the best: the same number of seeds where both have it, else run beside run."""
    own = tuning.own
    rate = format_rate(tuning.space.own_rate)
    if own is None:
        ran = next((row for row in tuning.rows if row.own and row.confirms is None), None)
        why = f"its trial is {LABELS[ran.state]}" if ran is not None else "it was not run"
        return f"{rate}: {why}"
    if own.trial == best.trial:
        return f"{rate}: none that was tried is better"
    like = len(own.losses) == len(best.losses) and own.mean is not None and best.mean is not None
    theirs = own.mean if like else own.losses[0] if own.losses else None
    ours = best.mean if like else best.losses[0]
    if theirs is None or ours is None:
        return f"{rate}: its trial did not end well"
    runs = "" if like and len(own.losses) > 1 else " with the same seed" if len(best.losses) > 1 else ""
    change = f" ({percent(ours - theirs, theirs, sign=True)})" if theirs > 0 else ""
    return f"{rate}: loss {format_loss(theirs)}, the best has {format_loss(ours)}{runs}{change}"


def _micro_batch(tuning: Tuning) -> str:
    space, throughput = tuning.space, tuning.throughput
    if space.coupled is not None:
        size = space.micro_batch if tuning.best is None else tuning.best.setting.micro_batch
        return f"{size}, searched with the learning rate: {space.coupled}, which changes the training"
    fastest = throughput.fastest
    which = "the fastest" if fastest == throughput.knee else f"the smallest within 2 % of the fastest, {fastest}"
    return (
        f"{throughput.knee}, {which}; with exact accumulation it changes speed and memory, not the gradient, and no "
        "trial was spent on it"
    )


def _plan(plan: Plan) -> str:
    sum_of = "" if plan.iter_size == 1 else f" = {plan.target_batch}"
    peak = "" if plan.peak_bytes is None else f", peak {format_bytes(plan.peak_bytes)}"
    return f"{format_parts(plan.micro_batches)}{sum_of} samples per update{peak} of {format_bytes(plan.limit_bytes)}"


def _searched(tuning: Tuning) -> str:
    space = tuning.space
    rates = f"{format_rate(space.learning_rates.low)} to {format_rate(space.learning_rates.high)}"
    batches = "batch" if space.target_batches.single else "batches"
    words = [f"learning rates {rates}", f"effective {batches} {batch_words(space.target_batches)}"]
    if space.coupled is not None:
        words.append(f"micro-batches {', '.join(map(str, space.micro_batches))}")
    return "; ".join(words)


def trial_words(tuning: Tuning) -> str:
    """How many trials there are, and what they came to."""
    searched, confirming = split_rows(tuning.rows)
    words = f"{len(searched)}: {state_words(searched)}" if searched else "none"
    if confirming:
        words += f"; {counted(len(confirming), 'run')} of the best with other seeds: {state_words(confirming)}"
    if tuning.ended is not None:
        words += f"; ended early: {tuning.ended}"
    return words


def state_words(rows: Sequence[Row]) -> str:
    """How many of each state."""
    counts = Counter(row.state for row in rows)
    return ", ".join(f"{counts[state]} {label}" for state, label in LABELS.items() if counts[state])


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The trials of the search, and the confirmations."""
    return [row for row in rows if row.confirms is None], [row for row in rows if row.confirms is not None]
