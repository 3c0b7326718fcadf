"""Results as a table in markdown, and in one sentence for each model whether the aim was met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from contenders.records import Result, Training

HEADER = (
    "model",
    "contender",
    "trials",
    "seconds until known",
    "chosen size",
    "trains",
    "micro-batches",
    "samples per update",
)
NAMES = {
    "by_autoaccum": "autoaccum",
    "by_lightning": "Lightning",
    "by_accelerate": "accelerate",
}
_MOST_TEXT = 70


def format_table(results: Sequence[Result]) -> str:
    """One row for each result, columns padded so that the source reads as a table too."""
    rows = [HEADER, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def format_samples(samples: Sequence[int]) -> str:
    """What each update had, counted.

    >>> format_samples([96, 96]), format_samples([80, 96, 80]), format_samples([])
    ('96', '80 to 96', '-')
    """
    if not samples:
        return "-"
    least, most = min(samples), max(samples)
    return str(most) if least == most else f"{least} to {most}"


def format_parts(parts: Sequence[int]) -> str:
    """Micro-batches of one update.

    >>> format_parts([34, 31, 31]), format_parts([32, 32, 32]), format_parts([])
    ('34 + 31 + 31', '3 x 32', '-')
    """
    if len(parts) > 2 and len(set(parts)) == 1:
        return f"{len(parts)} x {parts[0]}"
    return " + ".join(map(str, parts)) or "-"


def verdicts(results: Iterable[Result]) -> list[str]:
    """For each model: is autoaccum's size the largest that trains, exact, in at most half the time of the next?"""
    return [_verdict(model, list(group)) for model, group in groupby(results, key=lambda result: result.model)]


def describe_ceilings(results: Iterable[Result]) -> list[str]:
    """Where a plan divides the target evenly: whether the size that fits trains too, with the rest of the target."""
    return [
        f"{result.model}: {NAMES[result.contender]}'s {result.search.largest} that fit, in updates of "
        f"{_whole_and_rest(result)}: {_trains(result.training_largest, result.updates)}"
        for result in results
        if result.training_largest is not None
    ]


def _whole_and_rest(result: Result) -> str:
    size = result.search.largest or 1
    full, rest = divmod(result.target, size)
    return format_parts([size] * full + ([rest] if rest else []))


def _verdict(model: str, results: Sequence[Result]) -> str:
    own = next((result for result in results if result.contender == "by_autoaccum"), None)
    peers = [result for result in results if result.contender != "by_autoaccum" and result.search.size is not None]
    if own is None or own.search.size is None or not peers:
        return f"{model}: nothing to compare"
    is_largest = 0 < own.largest_trained >= max(peer.largest_trained for peer in peers)
    fastest = min(peers, key=lambda peer: peer.search.total_seconds)
    share = own.search.total_seconds / fastest.search.total_seconds
    return (
        f"{model}: largest size that trains: {_yes(is_largest)}; exact effective batch: {_yes(own.exact)}; "
        f"{share:.2f} of the time of {NAMES[fastest.contender]}, the fastest peer (aim 0.50): {_yes(share <= 0.5)}"
    )


def _row(result: Result) -> tuple[str, ...]:
    search, training = result.search, result.training
    name = f"{NAMES[result.contender]} {search.version}".strip()
    if search.size is None:
        failed = f"failed: {_short(search.failure)}"
        return (result.model, name, str(len(search.attempts)), _seconds(result), failed, "-", "-", "-")
    parts = training.micro_batches[0] if training is not None and training.micro_batches else ()
    samples = format_samples(() if training is None else training.samples)
    exact = "" if result.exact or training is None else f" (asked: {result.target})"
    return (
        result.model,
        name,
        str(len(search.attempts)),
        _seconds(result),
        str(search.size) if search.largest in (None, search.size) else f"{search.size} (fits: {search.largest})",
        _trains(training, result.updates),
        format_parts(parts),
        samples + exact,
    )


def _seconds(result: Result) -> str:
    return f"{result.search.total_seconds:.1f} ({result.search.start_seconds:.1f} of them imports)"


def _trains(training: Training | None, updates: int) -> str:
    if training is None:
        return "-"
    made = len(training.micro_batches)
    if training.failure is None and made == updates:
        return f"yes, {updates} updates"
    return f"no, after {made} updates: {_short(training.failure)}"


def _short(text: str | None) -> str:
    line = " ".join((text or "no message").replace("|", "/").split())
    return line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 1] + "…"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
