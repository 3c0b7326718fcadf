"""The request for a comparison: which cards, values, numbers of ranks and savers there are, and what cards cost."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoaccum.checks import check_alone, check_word, join_words
from autoaccum.errors import UsageError, first_line
from autoaccum.options import Options, read_overrides
from autoaccum.planning.comparison_record import SORT_KEYS
from autoaccum.planning.plan_request import PlanRequest

if TYPE_CHECKING:
    from autoaccum.simulation.cards import Card

_ALL_SAVERS: Final = ("all", ("all",), ["all"])
"""In place of savers: sets of them are compared."""
_MOST_VARIANTS: Final = 64


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """The request for a comparison; the fields are the arguments of `autoaccum.compare`.

    Raises:
        UsageError: An argument cannot be honoured.
    """

    target_batch: int | None
    gpu: str
    world_size: int | range = 1
    savers: str | Sequence[str] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    max_micro_batch: int | None = None
    fit_micro_batch: int | None = None
    exact_max: bool = False
    sort: str | None = None
    prices: str | os.PathLike[str] | Mapping[str, float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_alone("compare")
        if isinstance(self.world_size, range) and (not self.world_size or self.world_size.step != 1):
            raise UsageError(
                f"world_size is {self.world_size!r}", hint="give a number, or a range such as range(1, 65)"
            )
        if self.sort is not None:
            check_word(self.sort, "column", [*SORT_KEYS, *self.varying])
        if self.sort == "cost" and self.prices is None:
            raise UsageError("cost needs the prices of cards", hint="give them: --prices FILE")
        if (self.sort == "speed" or self.prices is not None) and not self.estimates:
            raise UsageError(
                "speed is estimated for several cards, values or sets of savers, since what ranks exchange is not"
                f" counted, and this is one card, {self.gpu}",
                hint="leave --sort and --prices out",
            )
        self.plan_request()
        if self.prices is not None and not self.price_by_card.keys() & {card.name for card in self.cards}:
            raise UsageError(f"no price is of {self.gpu}", hint="name a card that the prices have, or all")

    @property
    def varying(self) -> list[str]:
        """The names that have several values."""
        return [name for name, value in self.overrides.items() if isinstance(value, list) and len(value) > 1]

    @cached_property
    def variants(self) -> list[dict[str, Any]]:
        """The overrides of each row: the combinations of all values."""
        given = self.overrides if isinstance(self.overrides, Mapping) else read_overrides(self.overrides)
        choices = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        count = math.prod(map(len, choices.values()))
        if not 0 < count <= _MOST_VARIANTS:
            raise UsageError(
                f"the values of {join_words(self.varying or choices)} make {count} rows for each card",
                hint=f"give values that make 1 to {_MOST_VARIANTS}",
            )
        return [read_overrides(dict(zip(choices, values, strict=True))) for values in product(*choices.values())]

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The cards."""
        from autoaccum.simulation.cards import find_cards

        return find_cards(self.gpu)

    @cached_property
    def price_by_card(self) -> Mapping[str, float]:
        """The price of an hour of a card, by its name."""
        if self.prices is None or isinstance(self.prices, Mapping):
            return self.prices or {}
        return read_prices(self.prices)

    @property
    def world_sizes(self) -> list[int]:
        """The numbers of ranks to begin with, ascending: of a range, powers of two and its ends."""
        return choose_world_sizes(self.world_size) if isinstance(self.world_size, range) else [self.world_size]

    @property
    def compares_savers(self) -> bool:
        """Whether sets of savers are compared."""
        return self.savers in _ALL_SAVERS

    @property
    def estimates(self) -> bool:
        """Whether the time of an update is estimated."""
        return len(self.cards) > 1 or self.compares_savers or bool(self.varying)

    def plan_request(
        self, world_size: int | None = None, gpu: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> PlanRequest:
        """Return the request for a plan; without arguments for the first card and values, and the least of ranks."""
        given = {
            **self.options,
            "gpu": gpu or self.cards[0].name,
            "world_size": world_size or self.world_sizes[0],
            "savers": None if self.compares_savers else self.savers,
            "overrides": self.variants[0] if overrides is None else overrides,
        }
        return PlanRequest(
            self.target_batch,
            Options.of("compare", given),
            max_micro_batch=self.max_micro_batch,
            fit_micro_batch=self.fit_micro_batch,
            exact_max=self.exact_max,
            # Of several cards, gradients of a sharded model are summed with each micro-batch.
            chooses_grad_sync=len(self.cards) == 1,
        )


def choose_world_sizes(within: range) -> list[int]:
    """Return the powers of two within a range of numbers of ranks, and its ends.

    >>> choose_world_sizes(range(1, 65)), choose_world_sizes(range(3, 13))
    ([1, 2, 4, 8, 16, 32, 64], [3, 4, 8, 12])
    """
    powers = [1 << exponent for exponent in range(within[-1].bit_length())]
    return sorted({within[0], within[-1], *(power for power in powers if power in within)})


def read_prices(path: str | os.PathLike[str]) -> dict[str, float]:
    """Read the price of an hour of each card from a CSV file with the columns `name` and `per_hour`.

    Raises:
        UsageError: The file cannot be read, or a line has no card or no price above 0.
    """
    from autoaccum.simulation.cards import find_card

    hint = "write a line name,per_hour, then one for each card, such as rtx4090,0.69"
    try:
        rows = list(csv.DictReader(Path(path).read_text(encoding="utf-8-sig").splitlines(), skipinitialspace=True))
        return {find_card(row["name"]).name: _positive(row["per_hour"]) for row in rows}
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=hint) from None
    except (OSError, UnicodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} has no prices ({first_line(error)})", hint=hint) from None


def _positive(text: str) -> float:
    if not 0 < (price := float(text)) < math.inf:
        raise ValueError(f"per_hour is {text}")
    return price
