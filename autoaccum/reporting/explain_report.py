"""Show where the memory of a step goes, and how a recorded snapshot and its prediction compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from autoaccum.devices.explanation import Change, Explanation, ModuleShare
from autoaccum.reporting.console import Block, Table
from autoaccum.sentences import name_memory
from autoaccum.units import format_bytes, format_parts, percent, precise_bytes, signed_bytes

if TYPE_CHECKING:
    from autoaccum.devices.simulated.recorded_update import (
        Figure,
        RequestDifference,
        SourceDifference,
        UpdateComparison,
    )

_NONE = "-"
_MOST_SOURCES = 10


def explanation_blocks(explanation: Explanation, measured_bytes: int | None = None) -> list[Block]:
    """Return where the peak is, and tables of what holds it and what would change it.

    `measured_bytes` is the peak of real trials, which stands beside the predicted one.
    """
    peak = f"{format_bytes(explanation.peak_bytes)} (predicted)"
    measured = "" if measured_bytes is None else f"; measured: {format_bytes(measured_bytes)}"
    of = f" of {explanation.module}" if explanation.module else ""
    blocks: list[Block] = [
        Text(f"{explanation.card}, micro-batches of {format_parts(explanation.parts)}: {peak}{measured}"),
        Text(f"the peak is in {explanation.phase}, at {explanation.op or 'what is there from the start'}{of}"),
    ]
    for table in (_categories(explanation), _modules(explanation.modules), _changes(explanation.changes)):
        blocks += ["", table] if table else []
    return blocks


def _categories(explanation: Explanation) -> Table:
    """Return the categories of the peak that are not empty, their sum, and the CUDA context on top."""
    table, peak = Table("at the peak", ">bytes", ">share"), explanation.peak_bytes
    for category, held in explanation.categories.items():
        if held:
            table.add(name_memory(category), format_bytes(held), percent(held, peak))
    table.add("in all", format_bytes(peak), percent(peak, peak), style="bold")
    table.add("context", format_bytes(explanation.context_bytes), "on top")
    return table


def _modules(modules: Sequence[ModuleShare]) -> Table:
    table = Table("module", "class", ">count", ">bytes")
    for share in modules:
        name = share.name or ("(the model itself)" if share.kind else "(no module)")
        table.add(name, share.kind or _NONE, str(share.count), format_bytes(share.bytes))
    return table


def _changes(changes: Sequence[Change]) -> Table:
    """Return the suggested changes, each with its own effect on the peak."""
    table = Table("change", ">peak", ">smallest budget", "what")
    for change in changes:
        least = _NONE if change.min_budget_bytes is None else format_bytes(change.min_budget_bytes)
        what = change.what if change.message is None else f"{change.what}: not simulated ({change.message})"
        style = "green" if (change.saved_bytes or 0) > 0 else ""
        name = Text(change.name, no_wrap=True)
        saved = _NONE if change.saved_bytes is None else _signed(-change.saved_bytes, "no change")
        table.add(name, Text(saved, style), least, what)
    return table


def _signed(size: int, none: str) -> str:
    return signed_bytes(size) if size else none


def snapshot_blocks(update: UpdateComparison) -> list[Block]:
    """Return the figures of both updates, and what differs at their peaks."""
    last = f"the last update of {update.snapshot} ({update.events:,} events)"
    parts = format_parts(update.parts)
    blocks: list[Block] = [
        Text(f"{last} beside that predicted for {update.card}, micro-batches of {parts}"),
        _figures(update),
    ]
    if update.first_difference is not None and not update.agrees:
        blocks.append(Text(f"the first request that differs: {_request_words(update.first_difference)}"))
    if update.differences:
        blocks += ["", _differences(update.differences)]
    return [*blocks, "", _verdict(update)]


def _peaks(update: UpdateComparison) -> dict[str, Figure]:
    return {"peak held": update.held, "peak reserved": update.reserved}


def _figures(update: UpdateComparison) -> Table:
    table = Table("", ">recorded", ">predicted", ">difference")
    for name, peak in _peaks(update).items():
        table.add(name, precise_bytes(peak.recorded), precise_bytes(peak.predicted), _difference(peak))
    return table


def _difference(figure: Figure) -> str:
    return _signed(figure.recorded - figure.predicted, "none")


def _differences(differences: Sequence[SourceDifference]) -> Table:
    table = Table("at the peak", ">recorded", ">predicted", "module", "operator", "line")
    for difference in differences[:_MOST_SOURCES]:
        source = difference.source
        sizes = map(format_bytes, (difference.recorded_bytes, difference.predicted_bytes))
        origin = (text or _NONE for text in (source.module, source.op, _short(source.line)))
        table.add(name_memory(source.category), *sizes, *origin)
    if differences[_MOST_SOURCES:]:
        table.add(f"{len(differences) - _MOST_SOURCES} more")
    return table


def _request_words(found: RequestDifference) -> str:
    of = f" of {found.source.module}" if found.source.module else ""
    predicted = f"{format_bytes(found.predicted_bytes)} by {found.source.op or 'a tensor'}{of}"
    return f"recorded {format_bytes(found.recorded_bytes)}{_at(found.recorded_line)}, predicted {predicted}"


def _verdict(update: UpdateComparison) -> Text:
    if update.agrees:
        uncertainty = format_bytes(update.held.uncertainty)
        return Text(f"the snapshot agrees with the prediction, to its uncertainty of {uncertainty}", "green")
    wrong = [
        f"the {name} by {_difference(peak)} (the uncertainty is {format_bytes(peak.uncertainty)})"
        for name, peak in _peaks(update).items()
        if not peak.agrees
    ]
    return Text(f"the snapshot differs from the prediction: {', '.join(wrong)}", "red")


def _at(line: str) -> str:
    return f" at {_short(line)}" if line else ""


def _short(line: str) -> str:
    """Return a line of code without the folder of its file, which may be one of another machine."""
    return line[line.rfind("/") + 1 :]
