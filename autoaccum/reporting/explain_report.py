"""Show where the memory of a step goes, and how a recorded snapshot and its prediction compare."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.explanation import Change, Explanation, ModuleShare
from autoaccum.reporting.console import make_table, one_line, print_line, print_table
from autoaccum.serialization import to_plain
from autoaccum.units import format_bytes, percent, precise_bytes, signed_bytes

if TYPE_CHECKING:
    from autoaccum.devices.simulated.recorded_update import (
        Figure,
        RequestDifference,
        SourceDifference,
        UpdateComparison,
    )
    from autoaccum.planning.snapshot_check import SnapshotCheck

_NONE = "-"
_MOST_SOURCES = 10


def print_explanation(console: Console, explanation: Explanation, measured_bytes: int | None = None) -> None:
    """Print an explanation, labelled as predicted, with the measured peak of real trials next to the predicted one."""
    print_line(console, Text("where the memory goes", "bold"))
    for line in explanation_lines(explanation, measured_bytes):
        print_line(console, Text(line))
    for table in (_categories(explanation), _modules(explanation.modules), changes_table(explanation.changes)):
        if table.rows:
            console.print()
            print_table(console, table)


def explanation_lines(explanation: Explanation, measured_bytes: int | None) -> Iterator[str]:
    """Yield two lines: the peak of which parts on which card, and the moment of the peak."""
    peak = f"{format_bytes(explanation.peak_bytes)} (predicted)"
    measured = "" if measured_bytes is None else f"; measured: {format_bytes(measured_bytes)}"
    yield f"{explanation.card}, micro-batches of {format_parts(explanation.parts)}: {peak}{measured}"
    of = f" of {explanation.module}" if explanation.module else ""
    yield f"the peak is in {explanation.phase}, at {explanation.op or 'what is there from the start'}{of}"


def _categories(explanation: Explanation) -> Table:
    """Return the categories of the peak that are not empty, their sum, and the CUDA context on top."""
    table, peak = make_table("at the peak", ">bytes", ">share"), explanation.peak_bytes
    for category, held in explanation.categories.items():
        if held:
            table.add_row(category.replace("_", " "), format_bytes(held), percent(held, peak) if peak else _NONE)
    table.add_row("in all", format_bytes(peak), percent(peak, peak) if peak else _NONE, style="bold")
    table.add_row("context", format_bytes(explanation.context_bytes), "on top")
    return table


def _modules(modules: Sequence[ModuleShare]) -> Table:
    table = make_table("module", "class", ">count", ">bytes")
    for share in modules:
        held = format_bytes(share.bytes)
        table.add_row(Text(module_name(share)), Text(one_line(share.kind) or _NONE), str(share.count), held)
    return table


def module_name(share: ModuleShare) -> str:
    """Return how a module is called, also the model itself and none."""
    return one_line(share.name) or ("(the model itself)" if share.kind else "(no module)")


def changes_table(changes: Sequence[Change]) -> Table:
    """Return the suggested changes, each with its own effect on the peak."""
    table = make_table("change", ">peak", ">least budget", "what")
    for change in changes:
        least = _NONE if change.least_bytes is None else format_bytes(change.least_bytes)
        said = change.what if change.message is None else f"{change.what}: not simulated ({change.message})"
        name, what = Text(one_line(change.name), no_wrap=True), Text(one_line(said))
        style = "green" if (change.saved_bytes or 0) > 0 else ""
        table.add_row(name, Text(change_words(change.saved_bytes), style), least, what)
    return table


def change_words(saved_bytes: int | None) -> str:
    """Write by how much a peak changes that is lower by `saved_bytes`.

    >>> change_words(3 * 2**30), change_words(-2 * 2**30), change_words(0), change_words(None)
    ('-3.00 GiB', '+2.00 GiB', 'no change', '-')
    """
    if saved_bytes is None:
        return _NONE
    return signed_bytes(-saved_bytes) if saved_bytes else "no change"


def print_snapshot(console: Console, check: SnapshotCheck) -> None:
    """Print the replay, the figures of both updates, and what differs at their peaks."""
    for line in _replay_lines(check):
        print_line(console, Text(line))
    update = check.update
    console.print()
    parts = format_parts(update.parts)
    print_line(console, Text(f"its last update beside that predicted for {check.card}, micro-batches of {parts}"))
    print_table(console, _figures(update))
    if update.first_difference is not None and not update.agrees:
        print_line(console, Text(f"the first request that differs: {_request_words(update.first_difference)}"))
    if update.differences:
        console.print()
        print_table(console, _differences(update.differences))
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
        table.add_row(name, precise_bytes(figure.recorded), precise_bytes(figure.predicted), _figure_change(figure))
    return table


def _figure_change(figure: Figure) -> str:
    difference = figure.recorded - figure.predicted
    return signed_bytes(difference) if difference else "none"


def _differences(differences: Sequence[SourceDifference]) -> Table:
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
        f"the {name} by {_figure_change(figure)} (the band is {format_bytes(figure.band)})"
        for name, figure in figures
        if not figure.agrees
    ]
    return Text(f"the snapshot differs from the prediction: {', '.join(wrong)}", "red")


def _short(line: str) -> str:
    """Return a line of code without the folder of its file, which may be one of another machine."""
    return one_line(line[line.rfind("/") + 1 :])
