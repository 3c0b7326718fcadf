"""Show what several numbers of ranks would train: a table, or records."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

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
        print_wrapped(console, f"the least number of ranks that trains the model is {least}{tried}")


def world_sizes_json(rows: Sequence[WorldSize]) -> str:
    """Return the rows as JSON, with the least number of ranks that trains the model, or null."""
    record = {"world_sizes": [to_plain(row) for row in rows], "least_world_size": find_least(rows)}
    return json.dumps(record, indent=2, allow_nan=False) + "\n"
