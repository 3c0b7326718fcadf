"""Show sets of savers that no other beats: a table, or records."""

from __future__ import annotations

import json

from rich.console import Console

from autoaccum.planning.saver_choice import format_savers
from autoaccum.planning.saver_table import SaverTable
from autoaccum.reporting.console import make_table, print_table, print_wrapped
from autoaccum.serialization import to_plain
from autoaccum.units import format_bytes


def print_savers(console: Console, table: SaverTable) -> None:
    """Print a row for each set, and what its numbers mean."""
    print_wrapped(
        console,
        f"{table.device} with {format_bytes(table.limit_bytes)}, updates of {table.target_batch}: sets of savers that"
        " no other beats in both time and largest micro-batch",
    )
    peak = f">peak at {table.least_size}"
    shown = make_table(peak, ">micro-batch", ">iter_size", ">FLOPs", ">moved", ">time", "savers")
    for row in table.rows:
        shown.add_row(
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            str(row.micro_batch),
            str(row.iter_size),
            f"{100 * row.recomputed:+.1f} %",
            format_bytes(row.moved_bytes),
            f"{row.relative_time:.2f}",
            format_savers(row.savers),
        )
    print_table(console, shown)
    first = table.rows[0].estimate
    notes = (
        f"peak at {table.least_size}: with micro-batches of that size, without a limit",
        "FLOPs: those of recomputation; moved: between card and host per update",
        "time: of an update, in units of one without savers in the fewest micro-batches, whether that fits or not. An"
        " estimate from FLOPs and bytes alone, for comparing rows: the first takes"
        f" {first.least_seconds:.2g} to {first.most_seconds:.2g} s",
    )
    for note in notes:
        print_wrapped(console, note)
    for remark in table.remarks:
        print_wrapped(console, remark)


def savers_json(table: SaverTable) -> str:
    """Return the table as JSON."""
    return json.dumps(to_plain(table), indent=2, allow_nan=False) + "\n"
