"""Show a study of `tune`: its progress, and its result as tables or as a record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from autoaccum.checks import counted, join_words
from autoaccum.messages import Message
from autoaccum.reporting.console import Block, Facts, Table, copied, offer
from autoaccum.reporting.fit_report import format_seconds
from autoaccum.reporting.plan_report import speeds_table
from autoaccum.reporting.progress import PlanProgress
from autoaccum.serialization import to_plain
from autoaccum.tuning.tuning_records import Row, SearchSpace, SearchStarted, State, StudyOpened, Tuning
from autoaccum.units import format_parts, percent

_STYLES: dict[State, str] = {
    "complete": "green",
    "pruned": "",
    "diverged": "magenta",
    "out_of_memory": "magenta",
    "failed": "bold red",
    "running": "cyan",
    "waiting": "cyan",
}
"""The style of each state, the best state first."""
_MOST_TRIALS = 15
_ORDER = tuple(_STYLES)


def tuning_record(tuning: Tuning) -> dict[str, Any]:
    """Return the result of a study as plain values; the plan is as in a plan file."""
    plan = None if tuning.plan is None else json.loads(tuning.plan.to_json())
    return {"schema": tuning.schema, **to_plain(dataclasses.replace(tuning, plan=None)), "plan": plan}


def _row_cells(row: Row, own_rate: float, space: SearchSpace | None) -> tuple[str, str, str, str, str]:
    """Return a trial's number, outcome, loss, time, and what it trained with."""
    percent, loss = row.losses[-1] if row.losses else (0, None)
    notes = [
        _setting(row, space),
        "the workload's learning rate" if row.learning_rate == own_rate else "",
        f"loss after {percent} %" if row.state == "pruned" and row.losses else "",
        f"out of memory {counted(row.oom_retries, 'time')}" if row.oom_retries else "",
        str(row.reason or ""),
    ]
    took = f"{row.seconds:.1f} s" if row.samples else "-"
    shown = _format_loss(loss if row.loss is None else row.loss)
    return str(row.number), _outcome(row), shown, took, "; ".join(filter(None, notes))


def _setting(row: Row, space: SearchSpace | None) -> str:
    """Write the setting of a trial, as far as it is searched; empty until it is drawn."""
    if row.learning_rate is None:
        return ""
    words = [f"learning rate {row.learning_rate:.3g}"]
    if space is not None and len(space.target_batches) > 1:
        words.append(f"batch {row.target_batch}")
    if space is not None and len(space.micro_batches) > 1:
        words.append(f"micro-batch {row.micro_batch}")
    return ", ".join(words)


def _outcome(row: Row) -> str:
    return "interrupted" if row.lost else row.state.replace("_", " ")


def _format_loss(loss: float | None) -> str:
    """Format a loss; a dash where there is none."""
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.4g}"


def tuning_blocks(tuning: Tuning, commands: Mapping[str, Sequence[str]]) -> list[Block]:
    """Return the result of a study, and the exact next `commands`, each with a phrase."""
    blocks: list[Block] = [Facts(list(_result_rows(tuning))), "", _trials_table(tuning)]
    if tuning.throughput is not None:
        blocks += ["", speeds_table(tuning.throughput)]
    blocks.append("")
    for what, words in commands.items():
        blocks += offer(what, words)
    return blocks


def _result_rows(tuning: Tuning) -> Iterator[tuple[str, str | Text]]:
    best = tuning.best
    if best is None:
        yield "best", Text("no trial finished its budget with a finite loss", "bold red")
    else:
        yield "best", Text(f"{_setting(best, tuning.space)}, of trial {best.number}", "bold green")
        yield "loss", Text(f"{_format_loss(best.loss)} on held-out data", "bold green")
        yield "default rate", _compare_default(tuning, best)
    if tuning.plan is not None:
        yield "plan", f"{format_parts(tuning.plan.micro_batches)} samples per update"
    yield "budget", f"{tuning.budget:,} samples a trial; losses are of {tuning.workload.held_out}"
    yield "trials", _count_outcomes(tuning)
    yield "study", copied(f"{tuning.study} in {tuning.storage}")
    yield "time", format_seconds(tuning.seconds)
    yield from Facts.of_messages(tuning.warnings, ()).rows


def _compare_default(tuning: Tuning, best: Row) -> str:
    """Compare with the workload's own learning rate."""
    own, rate = tuning.own, f"{tuning.workload.learning_rate:.3g}"
    if own is None:
        return f"{rate}: not run to the end"
    if own.number == best.number:
        return f"{rate}: no other rate was better"
    default, least = own.loss or 0.0, best.loss or 0.0
    change = f" ({percent(least - default, default, sign=True)})" if default > 0 else ""
    return f"{rate}: loss {_format_loss(default)}, the best has {_format_loss(least)}{change}"


def _count_outcomes(tuning: Tuning) -> str:
    counts = Counter(map(_outcome, sorted(tuning.rows, key=_rank)))
    words = ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "none"
    return words if tuning.ended is None else f"{words}; ended early: {tuning.ended}"


def _trials_table(tuning: Tuning) -> Table:
    """List the trials of the search, the best first; only the first of many."""
    table = Table(">trial", "outcome", ">loss", ">time", "with")
    rows = sorted(tuning.rows, key=_rank)
    for row in rows[:_MOST_TRIALS]:
        number, outcome, *others = _row_cells(row, tuning.workload.learning_rate, tuning.space)
        is_best = tuning.best is not None and tuning.best.number == row.number
        table.add(number, Text(outcome, _STYLES[row.state]), *others, style="bold green" if is_best else "")
    if len(rows) > _MOST_TRIALS:
        table.add(*[""] * 4, f"{len(rows) - _MOST_TRIALS} more: --json has them all", style="dim")
    return table


def _rank(row: Row) -> tuple[int, int, float, int]:
    done = row.losses[-1] if row.losses else (0, float("inf"))
    loss = done[1] if row.loss is None else row.loss
    return _ORDER.index(row.state), -done[0] if row.state == "pruned" else 0, loss, row.number


_TRIAL = "{:>5}  {:<13}  {:>9}  {:>8}  {}"


class TuneProgress(PlanProgress):
    """Shows the progress of a study and of its planning."""

    _own_rate = 0.0
    _space: SearchSpace | None = None
    _finished = _trials = 0
    _headed = False

    def notify(self, event: Any) -> None:
        """Show one event."""
        match event:
            case StudyOpened(facts, name, storage, finished, trials):
                self._own_rate, self._finished, self._trials = facts.learning_rate, finished, trials
                schedule = f" with {facts.schedule}" if facts.schedule else ""
                trained = f"{facts.optimizer} at a learning rate of {facts.learning_rate:.3g}{schedule}"
                self.say(f"{facts.name}: {trained}; on {facts.device}; losses on {facts.held_out}")
                done = f"; continuing after {finished} of {counted(trials, 'trial')}" if finished else ""
                self.say(f"study {name} in {storage}{done}")
            case SearchStarted(space, plan, remembered):
                self._space = space
                how = "was planned for this study before" if remembered else "is planned"
                self.say(f"micro-batch {plan.micro_batch} {how}")
                rates = space.learning_rates
                self.say(
                    f"searching learning rates {rates.low:.3g} to {rates.high:.3g}, batches of"
                    f" {join_words(map(str, space.target_batches))}, micro-batches of"
                    f" {join_words(map(str, space.micro_batches))}"
                )
            case Row(state="running"):
                done = f"{self._finished} of {self._trials} are done"
                self.show(f"trial {event.number}, {done}: {_setting(event, self._space)} ...")
            case Row():
                self._show_end(event)
            case Message():
                self.warn(str(event))
            case _:
                super().notify(event)

    def _show_end(self, row: Row) -> None:
        self._finished += not row.lost
        if not self._headed:
            self._headed = True
            self.say(_TRIAL.format("trial", "outcome", "loss", "time", "with"), "dim")
        line = Text(_TRIAL.format(*_row_cells(row, self._own_rate, self._space)))
        line.stylize(_STYLES[row.state], 7, 20)
        self.say(line)
