"""Show a comparison of plans, the table and a line for each row as it is found; and the cards to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from autoaccum.checks import counted, join_words
from autoaccum.messages import Message
from autoaccum.planning.comparison_record import Comparison, ComparisonRow, find_least, name_subject
from autoaccum.planning.saver_trials import format_savers
from autoaccum.planning.throughput import RATIO_BAND
from autoaccum.reporting.console import Block, Table, offer
from autoaccum.serialization import to_plain
from autoaccum.simulation.cards import Card, card_rates, context_memory
from autoaccum.units import GIB, MIB, format_bytes

_OPTIONAL = ("card", ">ranks", ">speed", ">cost", "grad_sync", "savers")
_MOST_NAMED = 5
_LEGEND = (
    "GiB: what torch sees on Linux (~ estimated, not read from such a card); CC: compute capability; "
    "SMs: multiprocessors"
)


def shown_rows(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows that a table shows: of several cards or values, those with the least ranks that fit."""
    if len({row.subject for row in rows}) == 1:
        return list(rows)
    least, most = find_least(rows), max((row.world_size for row in rows), default=1)
    return [row for row in rows if row.world_size == least.get(row.subject, most)]


def comparison_blocks(comparison: Comparison) -> list[Block]:
    """Return a row for each plan, and what the numbers mean; columns that do not apply are left out."""
    rows = shown_rows(comparison.rows)
    cells = [_cells(row, rows) for row in rows]
    names = cells[0] if cells else ()
    columns = [name for name in names if name not in _OPTIONAL or any(row[name] is not None for row in cells)]
    table = Table(*columns, whole=True)
    for row, cell in zip(rows, cells, strict=True):
        table.add(*(cell[name] or "-" for name in columns), style="" if row.fits else "magenta")
    return [table, *_notes(comparison, rows)]


def _cells(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> dict[str, str | None]:
    """Return the cells of a row by their headers; None: there is nothing to say, or it is the same in all rows."""
    plan, of_cards = row.plan, len({other.card for other in rows}) > 1
    several, several_ranks = len({other.subject for other in rows}) > 1, len({other.world_size for other in rows}) > 1
    fastest = max(other.samples_per_second or 0.0 for other in rows)
    has_savers = row.fits and any(other.savers for other in rows)
    return {
        "card": row.card if of_cards else None,
        **{f">{name}": str(value) for name, value in row.overrides.items()},
        ">ranks": f"{'> ' if several and not row.fits else ''}{row.world_size}" if several_ranks else None,
        "fits": "yes" if row.fits else "no",
        ">micro-batch": None if plan is None else str(plan.micro_batch),
        ">iter_size": None if plan is None else str(plan.iter_size),
        ">needed": None if plan is None else _size(plan.min_budget_bytes),
        ">peak": None if plan is None else _size(plan.peak_bytes),
        ">headroom": None if row.headroom_bytes is None else f"{row.headroom_bytes / MIB:,.0f} MiB",
        ">speed": None if row.samples_per_second is None else f"{row.samples_per_second / fastest:.3f}",
        ">cost": None if row.cost_per_million is None else f"{row.cost_per_million:.3g}",
        "grad_sync": None if plan is None else plan.grad_sync,
        "savers": format_savers(row.savers) if has_savers else None,
    }


def _size(size: int | None) -> str | None:
    return None if size is None else format_bytes(size)


def _notes(comparison: Comparison, rows: Sequence[ComparisonRow]) -> Iterator[str]:
    if not any(row.fits for row in rows):
        return
    yield "needed: the smallest budget at which the schedule would still run; headroom: the budget less that"
    yield "peak: what the allocator would cache if it had room, so it may exceed the budget"
    if any(row.samples_per_second for row in rows):
        several_ranks = "; communication between ranks is left out" if any(row.world_size > 1 for row in rows) else ""
        yield (
            "speed: samples per second as a share of the fastest, an estimate from FLOPs, bytes and kernels; between"
            f" cards a ratio may be off by {RATIO_BAND:g} times{several_ranks}"
        )
    if any(row.cost_per_million for row in rows):
        yield "cost: of a million samples, by that estimate and the prices"
    if len({row.subject for row in rows}) == 1 and len({row.world_size for row in rows}) > 1:
        for least in (comparison.least_world_sizes or {}).values():
            fewer = [row for row in rows if row.world_size < least]
            below = max(fewer, key=lambda row: row.world_size, default=None)
            why = "" if below is None else f"; on {below.world_size}, {below.message}"
            yield f"the smallest number of ranks that works is {least}{why}"


def row_line(row: ComparisonRow) -> str:
    """Return a row in words.

    >>> row_line(ComparisonRow(card="t4", world_size=2, limit_bytes=0))
    't4, 2 ranks: does not fit'
    """
    ranks = [counted(row.world_size, "rank")] if row.world_size > 1 else []
    about = ", ".join([row.subject, *ranks, *([format_savers(row.savers)] if row.savers else [])])
    if row.plan is None:
        return f"{about}: does not fit"
    needed = format_bytes(row.plan.min_budget_bytes or 0)
    return f"{about}: micro-batch {row.plan.micro_batch}, iter_size {row.plan.iter_size}, {needed} needed"


def comparison_warnings(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return each warning of the rows once, with the rows it is about, unless it is about all."""
    about: dict[Message, list[ComparisonRow]] = {}
    for row in rows:
        for warning in row.warnings:
            about.setdefault(warning, []).append(row)
    count = sum(row.fits for row in rows)
    return [str(text) if len(some) == count else f"on {_names(some, rows)}: {text}" for text, some in about.items()]


def _names(some: Sequence[ComparisonRow], rows: Sequence[ComparisonRow]) -> str:
    of_cards = len({row.card for row in rows}) > 1
    if len({row.subject for row in rows}) > 1:
        names = [name_subject(row.card if of_cards else None, row.overrides) for row in some]
    elif len({row.world_size for row in rows}) > 1:
        names = [counted(row.world_size, "rank") for row in some]
    else:
        names = [format_savers(row.savers) for row in some]
    few = list(dict.fromkeys(names))
    if len(few) > _MOST_NAMED:
        few = [*few[: _MOST_NAMED - 1], f"{len(few) - _MOST_NAMED + 1} others"]
    return join_words(few)


def card_blocks(cards: Sequence[Card], *, sources: bool = False) -> list[Block]:
    """Return cards, a section for each architecture; with `sources` also where the numbers of each card come from."""
    table = Table("name", "card", ">GiB", ">CC", ">SMs")
    for architecture, group in groupby(cards, key=lambda card: card.architecture):
        table.add(Text(architecture, "bold cyan"))
        for card in group:
            memory = f"{'' if card.measured else '~'}{card.total_bytes / GIB:.2f}"
            capability, count = ".".join(map(str, card.capability)), str(card.multiprocessors)
            table.add(card.name, card.title.removeprefix("NVIDIA "), memory, capability, count)
    blocks: list[Block] = [table]
    for card in cards if sources else ():
        rates = card_rates(card)
        speeds = f"{rates.tensor_flops / 1e12:.4g} TFLOPS in fp16 or bf16, {rates.fp32_flops / 1e12:.4g} in fp32"
        blocks += [
            *("", Text(card.name, "bold"), f"memory: {card.source}", f"context: {context_memory(card).source}"),
            f"rates: {speeds}, {rates.memory_bytes / 1e9:.4g} GB/s; {rates.source}",
            *([f"also: {', '.join(card.aliases)}"] if card.aliases else []),
        ]
    command = "autoaccum plan WORKLOAD --target-batch N --gpu NAME"
    return [*blocks, "", _LEGEND, *offer("plan for one, or for any size (--gpu 24GiB)", command)]


def card_record(card: Card) -> dict[str, Any]:
    """Return a card as plain values for JSON, with the memory of its context and its rates."""
    context = context_memory(card)
    return {
        **to_plain(card),
        "architecture": card.architecture,
        "context": {**to_plain(context), "bytes": context.bytes},
        "rates": to_plain(card_rates(card)),
    }
