"""Show the cards that can be simulated, as a table or as records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from autoaccum.devices.simulated.cards import Card, card_rates, context_memory
from autoaccum.reporting.console import make_table, print_table, print_wrapped
from autoaccum.units import GIB

_LEGEND = (
    "GiB: what torch sees on Linux (~ estimated, not read from such a card); CC: compute capability; "
    "SMs: multiprocessors"
)


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
