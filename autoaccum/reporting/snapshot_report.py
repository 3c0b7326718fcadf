"""Show how a recorded snapshot and a prediction compare: tables, or a record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.simulated.explain.recorded_update import (
    Figure,
    RequestDifference,
    SourceDifference,
    UpdateComparison,
)
from autoaccum.planning.snapshot_check import SnapshotCheck
from autoaccum.reporting.console import make_table, one_line, print_line, print_table
from autoaccum.serialization import to_plain
from autoaccum.units import format_bytes, precise_bytes, signed_bytes

_NONE = "-"
_MOST_SOURCES = 10


def print_snapshot(console: Console, check: SnapshotCheck) -> None:
    """Print the replay, the figures of both updates, and what differs at their peaks."""
    for line in _replay_lines(check):
        print_line(console, Text(line))
    update = check.update
    console.print()
    parts = format_parts(update.parts)
    print_line(console, Text(f"its last update beside that predicted for {check.card}, micro-batches of {parts}"))
    print_table(console, _figures(update))
    if update.last_difference is not None and not update.agrees:
        print_line(console, Text(f"the last request that differs: {_request_words(update.last_difference)}"))
    if update.differences:
        console.print()
        print_table(console, _sources(update.differences))
    console.print()
    print_line(console, _verdict(check))


def snapshot_json(check: SnapshotCheck) -> str:
    """Return the check as JSON."""
    return json.dumps({"agrees": check.agrees, **to_plain(check)}, indent=2, allow_nan=False) + "\n"


def _replay_lines(check: SnapshotCheck) -> Iterator[str]:
    of = f"{check.snapshot}: {check.events:,} events"
    found = check.replay_difference
    if check.not_replayed is not None:
        yield f"{of}, not replayed: {check.not_replayed}"
    elif found is None:
        yield f"{of}, replayed by the simulated allocator: equal addresses"
    else:
        yield f"{of}; the simulated allocator differs from event {found.event:,} on"
        at = f" at {_short(found.line)}" if found.line else ""
        yield f"  {found.action} of {format_bytes(found.bytes)}{at}"
        yield f"  recorded: {found.recorded}; replayed: {found.replayed}"
        if not found.certain:
            yield "  or a block from before the record was larger than it tells: record from the start of the process"


def _figures(update: UpdateComparison) -> Table:
    table = make_table("", ">recorded", ">predicted", ">difference")
    for name, figure in (
        ("peak held", update.held),
        ("peak reserved", update.reserved),
    ):
        table.add_row(name, precise_bytes(figure.recorded), precise_bytes(figure.predicted), _change(figure))
    return table


def _change(figure: Figure) -> str:
    difference = figure.recorded - figure.predicted
    return signed_bytes(difference) if difference else "none"


def _sources(differences: Sequence[SourceDifference]) -> Table:
    table = make_table("at the peak", ">recorded", ">predicted", "module", "operator", "line")
    for one in differences[:_MOST_SOURCES]:
        source = one.source
        table.add_row(
            source.category.replace("_", " "),
            format_bytes(one.recorded_bytes),
            format_bytes(one.predicted_bytes),
            Text(one_line(source.module) or _NONE),
            Text(one_line(source.op) or _NONE),
            Text(_short(source.line) or _NONE),
        )
    if differences[_MOST_SOURCES:]:
        table.add_row(f"{len(differences) - _MOST_SOURCES} more")
    return table


def _request_words(found: RequestDifference) -> str:
    at = f" at {_short(found.recorded_line)}" if found.recorded_line else ""
    of = f" of {found.source.module}" if found.source.module else ""
    predicted = f"{format_bytes(found.predicted_bytes)} by {found.source.op or 'a tensor'}{of}"
    return f"recorded {format_bytes(found.recorded_bytes)}{at}, predicted {predicted}"


def _verdict(check: SnapshotCheck) -> Text:
    if check.agrees:
        band = format_bytes(check.update.held.band)
        return Text(f"the snapshot agrees with the prediction, to the band of {band}", "green")
    wrong = ["addresses"] if check.replay_differs else []
    figures = (("peak held", check.update.held), ("peak reserved", check.update.reserved))
    wrong += [
        f"the {name} by {_change(figure)} (the band is {format_bytes(figure.band)})"
        for name, figure in figures
        if not figure.agrees
    ]
    return Text(f"the snapshot differs from the prediction: {', '.join(wrong)}", "red")


def _short(line: str) -> str:
    """Return a line of code without the folder of its file, which may be one of another machine."""
    return one_line(line[line.rfind("/") + 1 :])
