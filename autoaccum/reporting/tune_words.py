"""Words and columns that a study's progress and its table have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from autoaccum.reporting.plain_text import one_line
from autoaccum.reporting.update_line import format_seconds
from autoaccum.tuning.records import Row, Speed, State
from autoaccum.tuning.settings import BatchSpan, Budget, Setting, Space

LABELS: dict[State, str] = {
    "complete": "complete",
    "pruned": "pruned",
    "diverged": "diverged",
    "out_of_memory": "out of memory",
    "failed": "failed",
    "running": "running",
    "waiting": "waiting",
}
"""What a person reads for a state; the best ending first."""
LOST = "lost"
"""What a person reads for a run that is put back, whose state is `failed`."""
STYLES: dict[State, str] = {
    "complete": "green",
    "pruned": "",
    "diverged": "magenta",
    "out_of_memory": "magenta",
    "failed": "bold red",
    "running": "cyan",
    "waiting": "cyan",
}
_LABEL_WIDTH = max(map(len, LABELS.values()))
_SECONDS_SHOWN = 100


@dataclass(frozen=True)
class TrialColumns:
    """The columns of trials: what was not searched has none.

    Attributes:
        batches: One for the effective batch.
        parts: One for the micro-batch.
    """

    batches: bool
    parts: bool

    @classmethod
    def of(cls, space: Space) -> TrialColumns:
        """Those that tell trials of `space` apart."""
        return cls(batches=not space.target_batches.single, parts=space.coupled is not None)

    def header(self) -> str:
        """What stands above."""
        return self._line("trial", f"{'outcome':<{_LABEL_WIDTH}}", ("rate", "batch", "micro-batch"), "loss", "time")

    def row(self, row: Row) -> Text:
        """One trial: number (where it repeats another one, that one's), outcome, setting, loss, time."""
        outcome = LOST if row.lost else LABELS[row.state]
        label = f"{outcome:<{_LABEL_WIDTH}}"
        line = Text(
            self._line(
                str(row.number if row.confirms is None else row.confirms),
                label,
                setting_cells(row.setting),
                format_loss(last_loss(row)),
                "-" if row.seconds is None else format_duration(row.seconds),
            )
        )
        at = line.plain.index(label, 5)
        line.stylize("yellow" if row.lost else STYLES[row.state], at, at + len(outcome))
        return line

    def _line(self, number: str, outcome: str, setting: Sequence[str], loss: str, seconds: str) -> str:
        rate, batch, micro_batch = setting
        cells = [f"{number:>5}", outcome, f"{rate:>9}"]
        if self.batches:
            cells.append(f"{batch:>6}")
        if self.parts:
            cells.append(f"{micro_batch:>11}")
        return "  ".join([*cells, f"{loss:>9}", f"{seconds:>8}"])


def setting_cells(setting: Setting | None) -> tuple[str, str, str]:
    """Learning rate, effective batch and micro-batch."""
    if setting is None:
        return "-", "-", "-"
    return format_rate(setting.learning_rate), str(setting.target_batch), str(setting.micro_batch)


def remarks(row: Row) -> Iterator[str]:
    """What else there is to say of a trial."""
    if row.own:
        yield "the workload's own rate"
    if row.confirms is not None:
        yield f"again, with seed {row.seed}"
    if row.state == "pruned" and row.losses:
        yield f"loss after {row.losses[-1][0]} %"
    if row.repeats is not None:
        # A repetition's number is not that of a trial of the search.
        is_trial = row.confirms is None
        yield f"again, for trial {row.repeats}, which was lost" if is_trial else "in place of a run that was lost"
    if row.shortages:
        yield "memory ran out " + {1: "once", 2: "twice"}.get(row.shortages, f"{row.shortages} times")
    if row.reason is not None:
        yield one_line(row.reason)


def last_loss(row: Row) -> float | None:
    """At the end, or where it was looked at last; None: of a trial without a bound, or none is known."""
    loss = row.loss if row.loss is not None or not row.losses else row.losses[-1][1]
    return loss if row.state in ("complete", "pruned", "running") and loss is not None else None


def format_rate(rate: float) -> str:
    """A learning rate.

    >>> format_rate(0.0312345), format_rate(1e-5), format_rate(1234.5)
    ('0.0312', '1e-05', '1.23e+03')
    """
    return f"{rate:.3g}"


def format_loss(loss: float | None) -> str:
    """A loss; a dash where there is none.

    >>> format_loss(0.43125678), format_loss(123456.0), format_loss(None)
    ('0.4313', '1.235e+05', '-')
    """
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.4g}"


def format_duration(seconds: float) -> str:
    """Seconds as long as they are easily read, else hours and minutes.

    >>> format_duration(2.14), format_duration(754.4), format_duration(4 * 3600)
    ('2.1 s', '12:34', '4:00:00')
    """
    return f"{seconds:.1f} s" if seconds < _SECONDS_SHOWN else format_seconds(seconds)


def format_speed(rate: float) -> str:
    """Samples per second.

    >>> format_speed(12345.6), format_speed(1.234)
    ('12,346', '1.23')
    """
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def middle_half(speed: Speed) -> str:
    """Between the quartiles; empty where there are none."""
    known = speed.low is not None and speed.high is not None
    return f"{format_speed(speed.low or 0)} to {format_speed(speed.high or 0)}" if known else ""


def unmeasured(speed: Speed) -> Text:
    """Why a size has no median."""
    if speed.state == "out_of_memory":
        return Text(LABELS["out_of_memory"], STYLES["out_of_memory"])
    return Text("not measured: the next larger are far from the best", "dim")


def batch_words(span: BatchSpan) -> str:
    """Effective batches.

    >>> batch_words(BatchSpan(64, 64)), batch_words(BatchSpan(64, 1024))
    ('64', '64 to 1024')
    """
    return str(span.low) if span.single else f"{span.low} to {span.high}"


def budget_words(budget: Budget) -> str:
    """How long each trial trains.

    >>> budget_words(Budget(1617, "samples")), budget_words(Budget(2.5, "seconds")), budget_words(Budget(1, "samples"))
    ('1,617 samples', '2.5 seconds', '1 sample')
    """
    unit = budget.unit.removesuffix("s") if budget.amount == 1 else budget.unit
    return f"{budget.amount:,.0f} {unit}" if budget.unit == "samples" else f"{budget.amount:g} {unit}"


def setting_words(setting: Setting, space: Space) -> str:
    """What a trial trains with, as far as trials differ by it."""
    words = [f"learning rate {format_rate(setting.learning_rate)}"]
    if not space.target_batches.single:
        words.append(f"effective batch {setting.target_batch}")
    if space.coupled is not None:
        words.append(f"micro-batch {setting.micro_batch}")
    return ", ".join(words)


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "trial"), counted(30, "trial")
    ('1 trial', '30 trials')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
