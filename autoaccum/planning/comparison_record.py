"""The rows of a comparison, and the table of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from autoaccum.checks import counted
from autoaccum.messages import Message
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_trials import Words
from autoaccum.serialization import HtmlRecord, to_plain
from autoaccum.units import format_overrides


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one card can do with some values that were set, a number of ranks and a set of savers.

    Attributes:
        card: The name of the card.
        overrides: The values of names that have several, read as `read_text` does; `plan.workload.overrides` has all.
        world_size: The number of ranks, with such a card each.
        savers: The savers of the plan.
        plan: The plan; None if not even the least micro-batch fits.
        limit_bytes: The budget of each rank.
        message: Why nothing fits.
        update_seconds: The estimated time of an update, without what ranks exchange; None: not estimated.
        price_per_hour: The price of an hour of one card; None: not given.
        warnings: Those of the plan, and those on savers that cannot be used.
    """

    card: str
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    world_size: int = 1
    savers: Words = ()
    plan: Plan | None = None
    limit_bytes: int
    message: str | None = None
    update_seconds: float | None = None
    price_per_hour: float | None = None
    warnings: tuple[Message, ...] = ()

    @property
    def subject(self) -> str:
        """The card and the values, for which the least number of ranks is found."""
        return name_subject(self.card, self.overrides)

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def headroom_bytes(self) -> int | None:
        """The budget less the least that the schedule needs, where `Plan.headroom_bytes` is less the peak."""
        return (
            None
            if self.plan is None or self.plan.min_budget_bytes is None
            else self.limit_bytes - self.plan.min_budget_bytes
        )

    @property
    def samples_per_second(self) -> float | None:
        """The target batch in the estimated time of an update."""
        return (
            None if self.plan is None or self.update_seconds is None else self.plan.target_batch / self.update_seconds
        )

    @property
    def cost_per_million(self) -> float | None:
        """The price of a million samples by that estimate, on all ranks."""
        if self.price_per_hour is None or self.samples_per_second is None:
            return None
        return self.price_per_hour * self.world_size * 1e6 / self.samples_per_second / 3600


def name_subject(card: str | None, overrides: Mapping[str, Any]) -> str:
    """Return a card and values in words.

    >>> name_subject("t4", {"length": 1024, "lora": 16})
    't4 length=1024 lora=16'
    """
    return f"{card or ''} {format_overrides(overrides)}".strip()


SORT_KEYS: Final[Mapping[str, Callable[[ComparisonRow], Any]]] = {
    "card": lambda row: row.card,
    "ranks": lambda row: row.world_size,
    "micro-batch": lambda row: row.plan and -row.plan.micro_batch,
    "iter_size": lambda row: row.plan and row.plan.iter_size,
    "needed": lambda row: row.plan and row.plan.min_budget_bytes,
    "peak": lambda row: row.plan and row.plan.peak_bytes,
    "headroom": lambda row: None if row.headroom_bytes is None else -row.headroom_bytes,
    "cost": lambda row: row.cost_per_million,
    "speed": lambda row: None if row.samples_per_second is None else -row.samples_per_second,
}
"""The columns that rows can be sorted by, each with what is less in a better row; None: not known."""


@dataclass(frozen=True)
class Comparison(HtmlRecord):
    """The rows of a table of plans, and for each card and value the smallest number of ranks that works.

    Attributes:
        rows: By card, then by value, by number of ranks, and the fastest savers first; or as they were sorted.
        least_world_sizes: That number by `ComparisonRow.subject`, if any works. None: rows are missing.
    """

    rows: tuple[ComparisonRow, ...]
    least_world_sizes: Mapping[str, int] | None

    def __repr__(self) -> str:
        """Return what is compared in one line; `to_json` has all of it."""
        fits = sum(row.fits for row in self.rows)
        return f"<Comparison: {counted(len(self.rows), 'row')}, of which {fits} {'fits' if fits == 1 else 'fit'}>"

    def to_json(self) -> str:
        """Return the table as JSON; the plan of each row is what `Plan.from_json` reads."""
        return json.dumps(to_plain(self), indent=2, allow_nan=False) + "\n"

    def sorted_by(self, column: str | None) -> Comparison:
        """Return the rows by a column, best or smallest first, and those that fit before others; None: as they are."""
        if column is None:
            return self
        key = SORT_KEYS.get(column) or (
            lambda row: (0, value) if isinstance(value := row.overrides[column], int | float) else (1, str(value))
        )
        values = [(row, key(row)) for row in self.rows]
        values.sort(key=lambda pair: (not pair[0].fits, pair[1] is None, pair[1] or 0))
        return dataclasses.replace(self, rows=tuple(row for row, _ in values))


def find_least(rows: Iterable[ComparisonRow]) -> dict[str, int]:
    """Return the least number of ranks that trains the model, by card and value; without those for which none does."""
    least: dict[str, int] = {}
    for row in rows:
        if row.fits:
            least[row.subject] = min(row.world_size, least.get(row.subject, row.world_size))
    return least
