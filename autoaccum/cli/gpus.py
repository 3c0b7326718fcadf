"""`autoaccum gpus`: the cards that can be simulated."""

from __future__ import annotations

from typing import Any

import click

from autoaccum.checks import did_you_mean
from autoaccum.cli.flags import HelpWithHeadings
from autoaccum.cli.outputs import Outputs
from autoaccum.errors import UsageError


@click.command("gpus", cls=HelpWithHeadings, short_help="List the cards that can be simulated.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the cards as JSON on stdout, and nothing else there.")
def command(name: str | None, **asked: Any) -> None:
    """List the cards that --gpu can simulate, and what PyTorch sees of them.

    NAME selects cards by part of their name or by generation, such as ampere, and shows the sources of their figures.

    Example:
      autoaccum gpus 4090

    Exit codes:
      0  cards were listed
      2  no card has this name
    """
    from autoaccum.reporting.comparison_table import card_blocks, card_record
    from autoaccum.simulation.cards import GENERATIONS, all_cards, find_card, matching_cards

    cards = all_cards() if name is None else matching_cards(name)
    if name is not None and not cards:
        if guess := did_you_mean(name, map(str.lower, GENERATIONS)):
            raise UsageError(f"there is no {name!r} among the names and generations of cards", hint=guess)
        cards = (find_card(name),)
    Outputs(asked).show(lambda: list(map(card_record, cards)), lambda: card_blocks(cards, sources=name is not None))
