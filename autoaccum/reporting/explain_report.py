"""Show where the memory of a step goes: tables by category and by module, and of suggested changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.explanation import Change, Explanation, ModuleShare
from autoaccum.reporting.console import make_table, one_line, print_line, print_table
from autoaccum.units import format_bytes, percent, signed_bytes

_NONE = "-"


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
    table = make_table("module", "class", ">count", ">bytes", ">per sample")
    for share in modules:
        each = _NONE if share.bytes_per_sample is None else format_bytes(share.bytes_per_sample)
        held = format_bytes(share.bytes)
        table.add_row(Text(module_name(share)), Text(one_line(share.kind) or _NONE), str(share.count), held, each)
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
