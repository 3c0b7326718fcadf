"""The request for a comparison, checked before anything starts; and the user's prices of cards, from a CSV file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoaccum.checks import check_alone, check_word
from autoaccum.errors import UsageError, first_line
from autoaccum.options import Options
from autoaccum.planning.plan_request import PlanRequest

if TYPE_CHECKING:
    from autoaccum.simulation.cards import Card

ALL: Final = "all"
"""In place of savers: sets of them are compared."""
COLUMNS: Final = ("card", "ranks", "micro-batch", "iter_size", "needed", "peak", "headroom", "speed", "cost")
"""Columns of the table that its rows can be sorted by."""
_FORM = "write a line `name,per_hour`, then one for each card, such as `rtx4090,0.69`"


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """The request for a comparison; the fields are the arguments of `autoaccum.compare`.

    Raises:
        UsageError: An argument cannot be honoured.
    """

    target_batch: int
    gpu: str
    world_size: int | range = 1
    savers: str | Sequence[str] | None = None
    max_micro_batch: int | None = None
    micro_batch: int | None = None
    ceiling: bool = False
    prices: str | os.PathLike[str] | Mapping[str, float] | None = None
    sort: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_alone("compare")
        if isinstance(self.world_size, range) and (not self.world_size or self.world_size.step != 1):
            raise UsageError(
                f"world_size is {self.world_size!r}", hint="give a number, or a range such as range(1, 65)"
            )
        if self.sort is not None:
            check_word(self.sort, "column", COLUMNS)
        if self.sort == "cost" and self.prices is None:
            raise UsageError("cost needs the prices of cards", hint="give them (--prices FILE)")
        if (self.sort == "speed" or self.prices is not None) and not self.estimates:
            raise UsageError(
                "speed and cost are estimated for several cards or sets of savers, since what ranks exchange is not"
                f" counted, and this is one card, {self.gpu}",
                hint="leave --sort and --prices out",
            )
        self.plan_request()
        if self.prices is not None and not self.read_prices().keys() & {card.name for card in self.cards}:
            raise UsageError(f"no price is of {self.gpu}", hint="name a card that the prices have, or all")

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The cards."""
        from autoaccum.simulation.cards import find_cards

        return find_cards(self.gpu)

    @property
    def world_sizes(self) -> list[int]:
        """The numbers of ranks to begin with, ascending: of a range, powers of two and its ends."""
        return choose_world_sizes(self.world_size) if isinstance(self.world_size, range) else [self.world_size]

    @property
    def compares_savers(self) -> bool:
        """Whether sets of savers are compared."""
        return self.savers in (ALL, (ALL,), [ALL])

    @property
    def estimates(self) -> bool:
        """Whether the time of an update is estimated."""
        return len(self.cards) > 1 or self.compares_savers

    def plan_request(self) -> PlanRequest:
        """Return the request for a plan on the first card, and the least number of ranks."""
        savers = None if self.compares_savers else self.savers
        given = {**self.options, "gpu": self.cards[0].name, "world_size": self.world_sizes[0], "savers": savers}
        return PlanRequest(
            self.target_batch,
            Options.of("compare", given),
            max_micro_batch=self.max_micro_batch,
            micro_batch=self.micro_batch,
            ceiling=self.ceiling,
            # Of several cards, gradients of a sharded model are summed with each micro-batch.
            chooses_reduce=len(self.cards) == 1,
        )

    def read_prices(self) -> Mapping[str, float]:
        """Return the price of an hour of a card, by its name."""
        if self.prices is None or isinstance(self.prices, Mapping):
            return self.prices or {}
        return read_prices(self.prices)


def choose_world_sizes(within: range) -> list[int]:
    """Return the powers of two within a range of numbers of ranks, and its ends.

    >>> choose_world_sizes(range(1, 65)), choose_world_sizes(range(3, 13))
    ([1, 2, 4, 8, 16, 32, 64], [3, 4, 8, 12])
    """
    powers = [1 << exponent for exponent in range(within[-1].bit_length())]
    return sorted({within[0], within[-1], *(power for power in powers if power in within)})


def read_prices(path: str | os.PathLike[str]) -> dict[str, float]:
    """Read the price of an hour of each card, by the card's own name.

    Raises:
        UsageError: The file cannot be read or has other columns, or a line has no price above 0, no card, or one that
            was there before.
    """
    from autoaccum.simulation.cards import find_card

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
