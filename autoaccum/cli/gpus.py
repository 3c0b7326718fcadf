"""`autoaccum gpus`: the cards that can be simulated."""

from __future__ import annotations

import click

from autoaccum.cli.flags import HelpWithHeadings


@click.command("gpus", cls=HelpWithHeadings, short_help="List the cards that can be simulated.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the cards as JSON on stdout, and nothing else there.")
def command(name: str | None, as_json: bool) -> None:
    """List the cards that --gpu can simulate, and what PyTorch sees of them.

    NAME selects the cards that have it in their name, or one generation such as ampere, and shows the sources of
    their figures.

    Example:
      autoaccum gpus 4090

    Exit codes:
      0  cards were listed
      2  no card has this name
    """
    import json

    from autoaccum.reporting.comparison_table import card_record, print_cards
    from autoaccum.reporting.console import make_console
    from autoaccum.simulation.cards import all_cards, find_card, matching_cards

    cards = all_cards() if name is None else matching_cards(name) or (find_card(name),)
    if as_json:
        click.echo(json.dumps([card_record(card) for card in cards], indent=2))
        return
    print_cards(make_console(), cards, sources=name is not None)
