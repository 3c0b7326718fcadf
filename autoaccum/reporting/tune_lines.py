"""Single lines of a study: what is tuned, what is searched, and one micro-batch size with its speed."""

from __future__ import annotations

from rich.text import Text

from autoaccum.reporting.tune_words import batch_words, counted, format_rate, format_speed, middle_half, unmeasured
from autoaccum.tuning.events import Described
from autoaccum.tuning.records import Speed
from autoaccum.tuning.settings import Space

_SPEED_COLUMNS = "{size:>11}  {parts:>9}  {speed:>11}"
_HALF_WIDTH = 21


def headline(event: Described) -> Text:
    """What is tuned, on one line."""
    facts = event.facts
    schedule = f" with {facts.schedule}" if facts.schedule else ""
    return Text.assemble(
        (facts.name, "bold"),
        f": {facts.model}, {facts.parameters:,} parameters, {facts.precision}, {facts.optimizer} at a learning rate of"
        f" {format_rate(facts.learning_rate)}{schedule}; on {facts.card or facts.device}; losses on {facts.held_out}",
    )


def space_words(space: Space) -> str:
    """What is searched, and what is not since it changes nothing."""
    rates = f"{format_rate(space.learning_rates.low)} to {format_rate(space.learning_rates.high)}"
    words = [f"learning rates from {rates}"]
    if not space.target_batches.single:
        words.append(f"effective batches from {batch_words(space.target_batches)} by doublings")
    if space.coupled is not None:
        sizes = ", ".join(map(str, space.micro_batches))
        return f"searching {', '.join(words)}, and micro-batches {sizes}, since {space.coupled}"
    return f"searching {' and '.join(words)}, in micro-batches of {space.micro_batch}"


def pruner_words(pruner: str) -> str:
    """What ends trials early.

    >>> pruner_words("none"), pruner_words("successive halving")
    ('no trial is pruned', 'successive halving')
    """
    return "no trial is pruned" if pruner == "none" else pruner


def speed_header() -> str:
    """What stands above sizes and their speeds."""
    return _SPEED_COLUMNS.format(size="micro-batch", parts="iter_size", speed="samples/s")


def compared_header() -> str:
    """What stands above sizes that are compared with the fastest."""
    return f"{speed_header()}  {'middle half':<{_HALF_WIDTH}}"


def timed_line(speed: Speed) -> Text:
    """One micro-batch size, as soon as it is timed."""
    line = _size_line(speed)
    if speed.samples_per_second is not None and (spread := middle_half(speed)):
        line.append(f"  {spread} in the middle half of {counted(speed.updates, 'update')}", "dim")
    return line


def compared_line(speed: Speed, best: float | None, mark: str) -> Text:
    """One micro-batch size beside the fastest.

    Args:
        speed: The size.
        best: Samples per second of the fastest; None where none is known.
        mark: What it is, `knee` or `fastest`; may be empty.
    """
    line = _size_line(speed)
    if speed.samples_per_second is None:
        return line
    line.append(f"  {middle_half(speed):<{_HALF_WIDTH}}")
    line.append(f"  {100 * speed.samples_per_second / best:>5.1f} %" if best else "")
    line.append(f"  median of {counted(speed.updates, 'update')}", "dim")
    return line.append(f"  {mark}" if mark else "", "bold green" if mark.startswith("knee") else "")


def _size_line(speed: Speed) -> Text:
    shown = "-" if speed.samples_per_second is None else format_speed(speed.samples_per_second)
    line = Text(_SPEED_COLUMNS.format(size=speed.micro_batch, parts=speed.iter_size, speed=shown))
    return line if speed.samples_per_second is not None else line.append("  ").append_text(unmeasured(speed))
