"""The user's prices of cards, from a CSV file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoaccum.checks import join_words
from autoaccum.errors import UsageError

_COLUMNS = ("name", "per_hour")
_FORM = "write a line `name,per_hour`, then one for each card, such as `rtx4090,0.69`"


def read_prices(path: str | os.PathLike[str]) -> tuple[dict[str, float], list[str]]:
    """Read the price of an hour of each card, by the card's own name; and warnings of names that are not one card's.

    Raises:
        UsageError: The file cannot be read, has other columns or names no card, or a line has no price above 0, or a
            card that was there before.
    """
    from autoaccum.devices.simulated.cards import find_card

    prices: dict[str, float] = {}
    unknown: dict[str, str] = {}
    for line, row in _read_rows(Path(path)):
        where = f"{path}, line {line}"
        if None in row or None in row.values():
            raise UsageError(f"{where} has {_count(row)} fields, and there are {len(_COLUMNS)} columns", hint=_FORM)
        try:
            price = float(row["per_hour"])
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf:
            raise UsageError(f"{where}: per_hour is {row['per_hour']!r}", hint="give a number above 0, such as 0.69")
        if not row["name"].strip():
            raise UsageError(f"{where} has no name of a card", hint=_FORM)
        try:
            name = find_card(row["name"]).name
        except UsageError as error:
            unknown[repr(row["name"])] = f"{where} is not used, {error}"
            continue
        if name in prices:
            raise UsageError(f"{where} has {name} again", hint="leave one price for each card")
        prices[name] = price
    if not prices:
        beside = f", only of {join_words(unknown)}" if unknown else ""
        raise UsageError(f"{path} has no prices of single cards{beside}", hint=_FORM)
    return prices, list(unknown.values())


def _read_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        seen = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{path} cannot be read ({seen})", hint=_FORM) from None
    reader = csv.DictReader(lines, skipinitialspace=True, strict=True)
    try:
        found = [name.strip() for name in reader.fieldnames or ()]
        if sorted(found) != sorted(_COLUMNS):
            seen = ",".join(found) or "nothing"
            raise UsageError(f"{path}, line 1 has {seen}, and its columns must be name and per_hour", hint=_FORM)
        reader.fieldnames = found
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num} is no CSV ({error})", hint=_FORM) from None


def _count(row: dict[Any, Any]) -> int:
    return len(row.get(None, ())) + sum(name is not None and value is not None for name, value in row.items())
