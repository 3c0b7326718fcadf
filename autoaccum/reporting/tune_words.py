"""Words that a study's progress and its table have in common, and its record for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from autoaccum.planning.shapes import thaw
from autoaccum.reporting.update_line import format_seconds
from autoaccum.tuning.records import Row, Setting, Space, Speed, State, Tuning

STYLES: dict[State, str] = {
    "complete": "green",
    "pruned": "",
    "diverged": "magenta",
    "out_of_memory": "magenta",
    "failed": "bold red",
    "running": "cyan",
    "waiting": "cyan",
}
"""By state, the best ending first."""
_SECONDS_SHOWN = 100


def tuning_record(tuning: Tuning) -> dict[str, Any]:
    """Return what a study has found as plain values: records by the names of their fields, its plan as a plan file."""
    record: dict[str, Any] = thaw(dataclasses.replace(tuning, plan=None))
    plan = None if tuning.plan is None else json.loads(tuning.plan.to_json())
    return {"schema": record.pop("schema"), **record, "plan": plan}


def row_cells(row: Row, space: Space) -> tuple[str, str, str, str, str]:
    """Return a trial's number, outcome, loss, time, and what it trained with."""
    loss = row.loss if row.loss is not None or not row.losses else row.losses[-1][1]
    outcome = "interrupted" if row.lost else row.state.replace("_", " ")
    took = "-"
    if row.seconds is not None:
        took = f"{row.seconds:.1f} s" if row.seconds < _SECONDS_SHOWN else format_seconds(row.seconds)
    about = [] if row.setting is None else [setting_words(row.setting, space)]
    return str(row.number), outcome, format_loss(loss), took, "; ".join([*about, *_remarks(row)])


def _remarks(row: Row) -> Iterator[str]:
    if row.own:
        yield "the workload's own rate"
    if row.confirms is not None:
        yield f"trial {row.confirms} with seed {row.seed}"
    if row.state == "pruned" and row.losses:
        yield f"loss after {row.losses[-1][0]} %"
    if row.repeats is not None:
        yield f"trial {row.repeats} again, whose process died"
    if row.shortages:
        yield f"memory ran out {counted(row.shortages, 'time')}"
    if row.reason is not None:
        yield row.reason


def setting_words(setting: Setting, space: Space) -> str:
    """Say what a trial trains with, as far as trials differ by it."""
    words = [f"learning rate {setting.learning_rate:.3g}"]
    if not space.target_batches.single:
        words.append(f"effective batch {setting.target_batch}")
    if space.coupled is not None:
        words.append(f"micro-batch {setting.micro_batch}")
    return ", ".join(words)


def space_words(space: Space) -> str:
    """Say what is searched."""
    rates, targets = space.learning_rates, space.target_batches
    words = [f"learning rates {rates.low:.3g} to {rates.high:.3g}"]
    words.append(f"effective batch {' or '.join(map(str, targets.sizes))}")
    if space.coupled is not None:
        words.append(f"micro-batch {' or '.join(map(str, space.micro_batches))}, since {space.coupled}")
    return "; ".join(words)


def format_loss(loss: float | None) -> str:
    """Format a loss; a dash where there is none.

    >>> format_loss(0.43125678), format_loss(123456.0), format_loss(None)
    ('0.4313', '1.235e+05', '-')
    """
    return "-" if loss is None or not math.isfinite(loss) else f"{loss:.4g}"


def speed_cells(speed: Speed) -> tuple[str, str, str, str]:
    """Return a micro-batch, its `iter_size`, its samples per second, and how sure they are."""
    size, parts = str(speed.micro_batch), str(speed.iter_size)
    if speed.state == "out_of_memory":
        return size, parts, "-", "out of memory"
    if speed.samples_per_second is None:
        return size, parts, "-", "not measured: the next larger are far from the best"
    known = (speed.samples_per_second, speed.low or 0.0, speed.high or 0.0)
    rate, low, high = (f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in known)
    return size, parts, rate, f"{low} to {high} in the middle half of {counted(speed.updates, 'update')}"


def counted(number: int, word: str) -> str:
    """Count things.

    >>> counted(1, "trial"), counted(30, "trial")
    ('1 trial', '30 trials')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
