"""The user's prices of cards, from a CSV file."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

from autoaccum.errors import UsageError, first_line

_FORM = "write a line `name,per_hour`, then one for each card, such as `rtx4090,0.69`"


def read_prices(path: str | os.PathLike[str]) -> dict[str, float]:
    """Read the price of an hour of each card, by the card's own name.

    Raises:
        UsageError: The file cannot be read or has other columns, or a line has no price above 0, no card, or one that
            was there before.
    """
    from autoaccum.devices.simulated.cards import find_card

    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path} cannot be read ({first_line(error)})", hint=_FORM) from None
    header, *rows = [[cell.strip() for cell in row] for row in csv.reader(lines)] or [[]]
    if header != ["name", "per_hour"]:
        raise UsageError(f"{path}, line 1 is {','.join(header)!r}", hint=_FORM)
    prices: dict[str, float] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}, line {number}"
        if not row:
            continue
        if len(row) != len(header):
            raise UsageError(f"{where} has {len(row)} fields, and there are {len(header)} columns", hint=_FORM)
        try:
            card = find_card(row[0])
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
        if card.name in prices:
            raise UsageError(f"{where} has {card.name} again", hint="leave one price for each card")
        prices[card.name] = _read_price(row[1], where)
    return prices


def _read_price(text: str, where: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise UsageError(f"{where}: per_hour is {text!r}", hint="give a number above 0, such as 0.69")
    return price
