"""The cards that can be simulated, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.context import context_bytes
from autoaccum.units import GIB

_HEADINGS = ("name", "card", "GiB", "CC", "SMs")
_LEGEND = (
    "GiB: what torch sees on Linux (~ estimated, not read from such a card); CC: compute capability; "
    "SMs: multiprocessors"
)
_INDENT = "    "


def print_cards(console: Console, cards: Sequence[Card], *, sources: bool = False) -> None:
    """Draw cards, a section for each generation.

    Args:
        console: Where to.
        cards: In the order in which they are drawn.
        sources: Whether to tell where each card's figures come from.
    """
    rows = [_HEADINGS, *map(_row, cards)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    console.print(Text(_line(_HEADINGS, widths), "bold"), soft_wrap=True)
    for architecture, group in groupby(cards, key=lambda card: card.architecture):
        console.print(Text(architecture, "bold cyan"), soft_wrap=True)
        for card in group:
            console.print(Text(_line(_row(card), widths)), soft_wrap=True)
            for note in _notes(card) if sources else ():
                _print_wrapped(console, note, indent=_INDENT)
    console.print()
    _print_wrapped(console, _LEGEND)
    console.print("plan for one, or for any size (--gpu 24GiB):", soft_wrap=True)
    console.print(Text("  autoaccum plan WORKLOAD --target-batch N --gpu NAME", "cyan"), soft_wrap=True)


def card_record(card: Card) -> dict[str, Any]:
    """A card as JSON has it."""
    outside = context_bytes(card)
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
    }


def _row(card: Card) -> tuple[str, ...]:
    memory = f"{'' if card.measured else '~'}{card.total_bytes / GIB:.2f}"
    capability = ".".join(map(str, card.capability))
    return card.name, card.title.removeprefix("NVIDIA "), memory, capability, str(card.multiprocessors)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, title, *numbers = row
    cells = [f"{name:<{widths[0]}}", f"{title:<{widths[1]}}"]
    cells += [f"{number:>{width}}" for number, width in zip(numbers, widths[2:], strict=True)]
    return "  ".join(cells)


def _notes(card: Card) -> Iterator[str]:
    yield f"memory: {card.source}"
    yield f"context: {context_bytes(card).source}"
    if card.aliases:
        yield f"also: {', '.join(card.aliases)}"


def _print_wrapped(console: Console, text: str, *, indent: str = "") -> None:
    for line in Text(text).wrap(console, console.width - len(indent)):
        line.rstrip()
        console.print(Text.assemble(indent, line), soft_wrap=True)
