"""`autoaccum gpus`: the cards that can be simulated."""

from __future__ import annotations

import click


@click.command("gpus", short_help="List the cards that can be simulated.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="The cards as JSON on stdout, and nothing else there.")
def command(name: str | None, as_json: bool) -> None:
    """List the cards that `autoaccum plan --gpu` knows, and what PyTorch sees of them.

    NAME leaves those that have it in their name, or one generation (`ampere`), and tells where their figures come from.

    Exit code: 0 cards were listed, 2 none has this name.
    """
    import json

    from autoaccum.devices.simulated.cards import all_cards, find_card, matching_cards
    from autoaccum.reporting.console import make_console
    from autoaccum.reporting.gpus_table import card_record, print_cards

    cards = all_cards() if name is None else matching_cards(name) or (find_card(name),)
    if as_json:
        click.echo(json.dumps([card_record(card) for card in cards], indent=2))
        return
    print_cards(make_console(), cards, sources=name is not None)
