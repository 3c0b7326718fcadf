"""Show what several numbers of ranks would train: a table, or records."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from autoaccum.checks import join_words
from autoaccum.planning.world_sizes import WorldSize, find_least
from autoaccum.reporting.console import make_table, print_table, print_wrapped
from autoaccum.serialization import to_plain
from autoaccum.units import format_bytes

_NONE = "-"


def print_world_sizes(console: Console, rows: Sequence[WorldSize]) -> None:
    """Print a row for each number of ranks, and the least that trains the model."""
    table = make_table(">ranks", "fits", ">micro-batch", ">iter_size", ">needed", ">peak", "reduce")
    for row in rows:
        numbers = [_NONE if number is None else str(number) for number in (row.micro_batch, row.iter_size)]
        sizes = [_NONE if size is None else format_bytes(size) for size in (row.least_bytes, row.peak_bytes)]
        fits, style = ("yes", "") if row.fits else ("no", "magenta")
        table.add_row(str(row.world_size), fits, *numbers, *sizes, row.reduce or _NONE, style=style)
    print_table(console, table)
    least = find_least(rows)
    if least is not None:
        below = [row for row in rows if row.world_size < least]
        tried = f"; on {below[-1].world_size}, {below[-1].message}" if below else ""
        if not below and least > 1:
            tried = "; fewer were not tried"
        print_wrapped(console, f"the least number of ranks that trains the model is {least}{tried}")


def world_size_line(row: WorldSize) -> str:
    """Return a row in words.

    >>> world_size_line(WorldSize(world_size=1, fits=False))
    '1 rank: does not fit'
    """
    ranks = f"{row.world_size} rank{'s' if row.world_size > 1 else ''}"
    if row.least_bytes is None:
        return f"{ranks}: does not fit"
    return f"{ranks}: micro-batch {row.micro_batch}, iter_size {row.iter_size}, {format_bytes(row.least_bytes)} needed"


def world_sizes_warnings(rows: Sequence[WorldSize]) -> list[str]:
    """Return each warning of the rows once, with the numbers of ranks that it is about, unless it is about all."""
    of: dict[str, list[str]] = {}
    for row in rows:
        for text in row.warnings:
            of.setdefault(text, []).append(str(row.world_size))
    count = sum(row.fits for row in rows)
    return [text if len(on) == count else f"on {join_words(on)} ranks {text}" for text, on in of.items()]


def world_sizes_json(rows: Sequence[WorldSize]) -> str:
    """Return the rows as JSON, with the least number of ranks that trains the model, or null."""
    record = {"world_sizes": [to_plain(row) for row in rows], "least_world_size": find_least(rows)}
    return json.dumps(record, indent=2, allow_nan=False) + "\n"
