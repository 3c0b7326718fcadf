"""Show a comparison of plans, the table and a line for each row as it is found; and the cards to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from autoaccum.checks import counted, join_words
from autoaccum.planning.comparison import Comparison, ComparisonRow, find_least
from autoaccum.planning.saver_trials import format_savers
from autoaccum.planning.throughput import RATIO_BAND
from autoaccum.reporting.console import make_table, print_table, print_wrapped
from autoaccum.simulation.cards import Card, card_rates, context_memory
from autoaccum.units import GIB, MIB, format_bytes

_NONE, _SPEED = "-", ">speed"
_MOST_NAMED = 5
_LEGEND = (
    "GiB: what torch sees on Linux (~ estimated, not read from such a card); CC: compute capability; "
    "SMs: multiprocessors"
)


@dataclass(frozen=True)
class _Column:
    """A column: its header, with ">" if it is aligned right, its cells, and whether a table has it."""

    header: str
    cell: Callable[[ComparisonRow], Any]
    applies: Callable[[Sequence[ComparisonRow]], bool] = lambda rows: True


def _size(size: int | None) -> str | None:
    return None if size is None else format_bytes(size)


def _of_plan(name: str) -> Callable[[ComparisonRow], Any]:
    return lambda row: getattr(row.plan, name, None)


def _several(name: str) -> Callable[[Sequence[ComparisonRow]], bool]:
    return lambda rows: len({getattr(row, name) for row in rows}) > 1


def _any(name: str) -> Callable[[Sequence[ComparisonRow]], bool]:
    return lambda rows: any(getattr(row, name) for row in rows)


_COLUMNS: Final = (
    _Column("card", lambda row: row.card, _several("card")),
    _Column(">ranks", lambda row: row.world_size, _several("world_size")),
    _Column("fits", lambda row: "yes" if row.fits else "no"),
    _Column(">micro-batch", _of_plan("micro_batch")),
    _Column(">iter_size", _of_plan("iter_size")),
    _Column(">needed", lambda row: _size(getattr(row.plan, "least_bytes", None))),
    _Column(">peak", lambda row: _size(getattr(row.plan, "peak_bytes", None))),
    _Column(">headroom", lambda row: None if row.headroom_bytes is None else f"{row.headroom_bytes / MIB:,.0f} MiB"),
    _Column(_SPEED, lambda row: row.samples_per_second, _any("samples_per_second")),
    _Column("reduce", _of_plan("reduce"), lambda rows: any(row.plan and row.plan.reduce for row in rows)),
    _Column("savers", lambda row: format_savers(row.savers) if row.fits else None, _any("savers")),
)


def shown_rows(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows that a table shows: of several cards, those with the least ranks that train the model."""
    if len({row.card for row in rows}) == 1:
        return list(rows)
    least, most = find_least(rows), max((row.world_size for row in rows), default=1)
    return [row for row in rows if row.world_size == least.get(row.card, most)]


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print a row for each plan, and what the numbers mean; columns that do not apply are left out."""
    rows = shown_rows(comparison.rows)
    columns = [column for column in _COLUMNS if column.applies(rows)]
    fastest = max((row.samples_per_second or 0.0 for row in rows), default=0.0)
    of_cards = len({row.card for row in rows}) > 1
    table = make_table(*(column.header for column in columns))
    for row in rows:
        cells = []
        for column in columns:
            cell = column.cell(row)
            if column.header == _SPEED and cell is not None:
                cell = f"{cell / fastest:.3f}"
            if column.header == ">ranks" and of_cards and not row.fits:
                cell = f"> {cell}"
            cells.append(_NONE if cell is None else str(cell))
        table.add_row(*cells, style="" if row.fits else "magenta")
    print_table(console, table, whole=True)
    for note in _notes(comparison, rows):
        print_wrapped(console, note)


def _notes(comparison: Comparison, rows: Sequence[ComparisonRow]) -> Iterator[str]:
    if not any(row.fits for row in rows):
        return
    yield "needed: the smallest budget at which the schedule would still run; headroom: the budget less that"
    yield "peak: what the allocator would cache if it had room, so it may exceed the budget"
    if any(row.samples_per_second for row in rows):
        several_ranks = ", and what ranks exchange is left out" if any(row.world_size > 1 for row in rows) else ""
        yield (
            "speed: samples per second as a share of the fastest, an estimate from FLOPs, bytes and kernels; between"
            f" cards a ratio may be off by {RATIO_BAND:g} times{several_ranks}"
        )
    if len({row.card for row in rows}) == 1 and len({row.world_size for row in rows}) > 1:
        for least in (comparison.least_world_sizes or {}).values():
            fewer = [row for row in rows if row.world_size < least]
            below = max(fewer, key=lambda row: row.world_size, default=None)
            why = "" if below is None else f"; on {below.world_size}, {below.message}"
            yield f"the least number of ranks that trains the model is {least}{why}"


def row_line(row: ComparisonRow) -> str:
    """Return a row in words.

    >>> row_line(ComparisonRow(card="t4", world_size=2, limit_bytes=0))
    't4, 2 ranks: does not fit'
    """
    ranks = [counted(row.world_size, "rank")] if row.world_size > 1 else []
    about = ", ".join([row.card, *ranks, *([format_savers(row.savers)] if row.savers else [])])
    if row.plan is None:
        return f"{about}: does not fit"
    needed = format_bytes(row.plan.least_bytes or 0)
    return f"{about}: micro-batch {row.plan.micro_batch}, iter_size {row.plan.iter_size}, {needed} needed"


def comparison_warnings(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return each warning of the rows once, with the cards, ranks or savers it is about, unless it is about all."""
    about: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        for text in row.warnings:
            about.setdefault(text, []).append(row)
    count = sum(row.fits for row in rows)
    return [text if len(some) == count else f"on {_names(some, rows)}: {text}" for text, some in about.items()]


def _names(some: Sequence[ComparisonRow], rows: Sequence[ComparisonRow]) -> str:
    if _several("card")(rows):
        names = [row.card for row in some]
    elif _several("world_size")(rows):
        names = [counted(row.world_size, "rank") for row in some]
    else:
        names = [format_savers(row.savers) for row in some]
    few = list(dict.fromkeys(names))
    if len(few) > _MOST_NAMED:
        few = [*few[: _MOST_NAMED - 1], f"{len(few) - _MOST_NAMED + 1} others"]
    return join_words(few)


def print_cards(console: Console, cards: Sequence[Card], *, sources: bool = False) -> None:
    """Print cards, a section for each architecture; with `sources` also where the numbers of each card come from."""
    table = make_table("name", "card", ">GiB", ">CC", ">SMs")
    for architecture, group in groupby(cards, key=lambda card: card.architecture):
        table.add_row(Text(architecture, "bold cyan"))
        for card in group:
            memory = f"{'' if card.measured else '~'}{card.total_bytes / GIB:.2f}"
            capability, count = ".".join(map(str, card.capability)), str(card.multiprocessors)
            table.add_row(card.name, card.title.removeprefix("NVIDIA "), memory, capability, count)
    print_table(console, table)
    for card in cards if sources else ():
        console.print(f"\n{card.name}", style="bold", soft_wrap=True)
        print_wrapped(console, f"memory: {card.source}")
        print_wrapped(console, f"context: {context_memory(card).source}")
        rates = card_rates(card)
        print_wrapped(
            console,
            f"rates: {rates.tensor_flops / 1e12:.4g} TFLOPS in fp16 or bf16, {rates.fp32_flops / 1e12:.4g} in fp32,"
            f" {rates.memory_bytes / 1e9:.4g} GB/s; {rates.source}",
        )
        if card.aliases:
            print_wrapped(console, f"also: {', '.join(card.aliases)}")
    console.print()
    print_wrapped(console, _LEGEND)
    console.print("plan for one, or for any size (--gpu 24GiB):", soft_wrap=True)
    console.print(Text("  autoaccum plan WORKLOAD --target-batch N --gpu NAME", "cyan"), soft_wrap=True)


def card_record(card: Card) -> dict[str, Any]:
    """Return a card as plain values for JSON."""
    outside, rates = context_memory(card), card_rates(card)
    return {
        "name": card.name,
        "title": card.title,
        "architecture": card.architecture,
        "total_bytes": card.total_bytes,
        "compute_capability": ".".join(map(str, card.capability)),
        "multiprocessors": card.multiprocessors,
        "measured": card.measured,
        "source": card.source,
        "aliases": list(card.aliases),
        "context_bytes": outside.bytes,
        "context_band_bytes": outside.band_bytes,
        "context_measured": outside.measured,
        "context_source": outside.source,
        "tensor_flops": rates.tensor_flops,
        "fp32_flops": rates.fp32_flops,
        "memory_bytes_per_second": rates.memory_bytes,
        "rates_source": rates.source,
    }
