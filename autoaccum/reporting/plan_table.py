"""Show the plans for several cards or numbers of ranks, or sets of savers that no other beats: tables, or records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Console

from autoaccum.checks import join_words
from autoaccum.planning.plan_comparison import PlanRow, find_least
from autoaccum.planning.saver_choice import format_savers
from autoaccum.planning.saver_table import SaverTable
from autoaccum.planning.throughput import BAND, RATIO_BAND
from autoaccum.reporting.console import make_table, print_table, print_wrapped
from autoaccum.serialization import to_plain
from autoaccum.units import MIB, format_bytes

_NONE = "-"
_MOST_NAMED = 5

SORT_KEYS: Final[dict[str, Callable[[PlanRow], Any]]] = {
    "card": lambda row: row.card,
    "ranks": lambda row: row.world_size,
    "micro-batch": lambda row: -(row.micro_batch or 0),
    "iter_size": lambda row: row.iter_size,
    "needed": lambda row: row.least_bytes,
    "peak": lambda row: row.peak_bytes,
    "headroom": lambda row: -(row.headroom_bytes or 0),
    "speed": lambda row: -(row.samples_per_second or 0),
    "cost": lambda row: row.cost_per_million,
}
"""By the name of a column, what is less in a better row."""


def sort_rows(rows: Sequence[PlanRow], column: str | None) -> list[PlanRow]:
    """Return the rows in the order of a column, the best first, those that fit before others; None: as they are."""
    if column is None:
        return list(rows)
    key = SORT_KEYS[column]

    def order(row: PlanRow) -> tuple[bool, bool, Any]:
        value = key(row)
        return not row.fits, value is None, value or 0

    return sorted(rows, key=order)


def print_cards_table(console: Console, rows: Sequence[PlanRow], *, names_ranks: bool = False) -> None:
    """Print a row for each card, with the least ranks that it needs, and what its numbers mean."""
    least, most = find_least(rows), max(row.world_size for row in rows)
    shown = [row for row in rows if row.world_size == least.get(row.card, most)]
    fastest = max((row.samples_per_second or 0.0 for row in shown), default=0.0)
    with_costs = any(row.cost_per_million is not None for row in shown)
    with_savers = any(row.savers for row in shown)
    table = make_table(
        "card",
        *([">ranks"] if names_ranks else []),
        "fits",
        ">micro-batch",
        ">iter_size",
        ">needed",
        ">peak",
        ">headroom",
        ">speed",
        *([">cost"] if with_costs else []),
        *(["savers"] if with_savers else []),
    )
    for row in shown:
        ranks = [str(row.world_size) if row.fits else f"> {most}"] if names_ranks else []
        headroom = _NONE if row.headroom_bytes is None else f"{row.headroom_bytes / MIB:,.0f} MiB"
        speed = _NONE if row.samples_per_second is None else f"{row.samples_per_second / fastest:.3f}"
        cost = [_NONE if row.cost_per_million is None else f"{row.cost_per_million:.3g}"] if with_costs else []
        savers = [format_savers(row.savers) if row.fits else _NONE] if with_savers else []
        style = "" if row.fits else "magenta"
        table.add_row(row.card, *ranks, *_cells(row), headroom, speed, *cost, *savers, style=style)
    print_table(console, table, whole=True)
    notes = [
        "needed: the smallest budget at which the schedule would still run; `autoaccum plan --gpu NAME` predicts one"
        " card alone, from a trace of its own parts",
        "headroom: the budget less what is needed; peak: what the allocator would cache if it had room, so it may"
        " exceed the budget",
        "speed: samples per second as a share of the fastest, an estimate from FLOPs, bytes and kernels; a ratio may be"
        f" off by {RATIO_BAND:g} times" + (", and what ranks exchange is left out" if most > 1 else ""),
    ]
    if with_costs:
        notes.append(f"cost: of a million samples by the prices and that estimate, which may be off by {BAND:g} times")
    for note in notes:
        print_wrapped(console, note)


def print_ranks_table(console: Console, rows: Sequence[PlanRow], *, is_whole: bool = True) -> None:
    """Print a row for each number of ranks of a card, and the least that trains the model if the table is whole."""
    table = make_table(">ranks", "fits", ">micro-batch", ">iter_size", ">needed", ">peak", "reduce")
    for row in rows:
        style = "" if row.fits else "magenta"
        table.add_row(str(row.world_size), *_cells(row), row.reduce or _NONE, style=style)
    print_table(console, table)
    for least in find_least(rows).values() if is_whole else ():
        below = max((row for row in rows if row.world_size < least), key=lambda row: row.world_size, default=None)
        tried = "" if below is None else f"; on {below.world_size}, {below.message}"
        if below is None and least > 1:
            tried = "; fewer were not tried"
        print_wrapped(console, f"the least number of ranks that trains the model is {least}{tried}")


def _cells(row: PlanRow) -> list[str]:
    numbers = [_NONE if number is None else str(number) for number in (row.micro_batch, row.iter_size)]
    sizes = [_NONE if size is None else format_bytes(size) for size in (row.least_bytes, row.peak_bytes)]
    return ["yes" if row.fits else "no", *numbers, *sizes]


def row_line(row: PlanRow, *, names_card: bool = False, names_ranks: bool = True) -> str:
    """Return a row in words.

    >>> row_line(PlanRow(card="t4", world_size=1, fits=False))
    '1 rank: does not fit'
    >>> row_line(PlanRow(card="t4", world_size=2, fits=False), names_card=True)
    't4, 2 ranks: does not fit'
    """
    ranks = f"{row.world_size} rank{'s' if row.world_size > 1 else ''}"
    about = ", ".join([row.card] * names_card + [ranks] * names_ranks)
    if row.least_bytes is None:
        return f"{about}: does not fit"
    return f"{about}: micro-batch {row.micro_batch}, iter_size {row.iter_size}, {format_bytes(row.least_bytes)} needed"


def table_warnings(rows: Sequence[PlanRow]) -> list[str]:
    """Return each warning of the rows once, with the cards or numbers of ranks it is about, unless it is about all."""
    of: dict[str, list[str]] = {}
    of_cards = len({row.card for row in rows}) > 1
    for row in rows:
        for text in row.warnings:
            of.setdefault(text, []).append(row.card if of_cards else str(row.world_size))
    count = sum(row.fits for row in rows)
    return [
        text if len(on) == count else f"on {_name(on)}{'' if of_cards else ' ranks'} {text}" for text, on in of.items()
    ]


def _name(names: Sequence[str]) -> str:
    few = list(dict.fromkeys(names))
    if len(few) > _MOST_NAMED:
        few = [*few[: _MOST_NAMED - 1], f"{len(few) - _MOST_NAMED + 1} others"]
    return join_words(few)


def plan_table_json(rows: Sequence[PlanRow], *, is_whole: bool = True) -> str:
    """Return the rows as JSON; if they are all, with the least number of ranks for each card that trains the model."""
    record: dict[str, Any] = {"plans": [to_plain(row) for row in rows]}
    if is_whole:
        record["least_world_sizes"] = find_least(rows)
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


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
