"""Plans of one workload in a table: for simulated cards, numbers of ranks and sets of savers."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoaccum.checks import check_alone, check_word
from autoaccum.devices.base import Device
from autoaccum.devices.device_choice import run_on_cards
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.planning.plan_events import Listener, SaversTried
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_trials import Parts, SaverTrials, Words, find_front
from autoaccum.planning.throughput import estimate_seconds
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.serialization import to_plain
from autoaccum.sources.command import read_command

if TYPE_CHECKING:
    from autoaccum.simulation.cards import Card

_ALL_SAVERS: Final = ("all", ("all",), ["all"])
"""In place of savers: sets of them are compared."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one card, number of ranks and set of savers can do.

    Attributes:
        card: The name of the card.
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
    world_size: int = 1
    savers: Words = ()
    plan: Plan | None = None
    limit_bytes: int
    message: str | None = None
    update_seconds: float | None = None
    price_per_hour: float | None = None
    warnings: tuple[Message, ...] = ()

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
class Comparison:
    """The rows of a table of plans, and for each card the least number of ranks that trains the model.

    Attributes:
        rows: By card, then by number of ranks, then the fastest savers first; or as they were sorted.
        least_world_sizes: By the name of a card; without cards that cannot train it. None: rows are missing.
    """

    rows: tuple[ComparisonRow, ...]
    least_world_sizes: Mapping[str, int] | None

    def to_json(self) -> str:
        """Return the table as JSON; the plan of each row is what `Plan.from_json` reads."""
        return json.dumps(to_plain(self), indent=2, allow_nan=False) + "\n"

    def sorted_by(self, column: str | None) -> Comparison:
        """Return the rows in the order of a column, the best first, those that fit before others; None: as they are."""
        if column is None:
            return self
        values = [(row, SORT_KEYS[column](row)) for row in self.rows]
        values.sort(key=lambda pair: (not pair[0].fits, pair[1] is None, pair[1] or 0))
        return dataclasses.replace(self, rows=tuple(row for row, _ in values))


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
            check_word(self.sort, "column", SORT_KEYS)
        if self.sort == "cost" and self.prices is None:
            raise UsageError("cost needs the prices of cards", hint="give them: --prices FILE")
        if (self.sort == "speed" or self.prices is not None) and not self.estimates:
            raise UsageError(
                "speed is estimated for several cards or sets of savers, since what ranks exchange is not counted, and"
                f" this is one card, {self.gpu}",
                hint="leave --sort and --prices out",
            )
        self.plan_request()
        if self.prices is not None and not self.price_by_card.keys() & {card.name for card in self.cards}:
            raise UsageError(f"no price is of {self.gpu}", hint="name a card that the prices have, or all")

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
        return len(self.cards) > 1 or self.compares_savers

    def plan_request(self, world_size: int | None = None, gpu: str | None = None) -> PlanRequest:
        """Return the request for a plan; without arguments on the first card, and the least number of ranks."""
        given = {
            **self.options,
            "gpu": gpu or self.cards[0].name,
            "world_size": world_size or self.world_sizes[0],
            "savers": None if self.compares_savers else self.savers,
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


def compare_plans(
    workload: Any,
    request: ComparisonRequest,
    *,
    on_row: Callable[[ComparisonRow], None] = lambda row: None,
    on_event: Listener = lambda event: None,
    on_output: Callable[[str], None] | None = None,
) -> Comparison:
    """Plan for each card, number of ranks and set of savers, as `autoaccum.compare`.

    Raises:
        AutoaccumError: As `make_plan`, but for `DoesNotFitError`, which is a row.
    """
    if isinstance(workload, list | tuple) and isinstance(request.world_size, range):
        raise UsageError(
            f"world_size is {request.world_size!r}, and a command starts its own ranks",
            hint="compare for one number of ranks at a time (--world-size N)",
        )
    cards = {card.name: card for card in request.cards}
    shares = len(cards) > 1

    def plan_cards(world_size: int, names: Sequence[str]) -> Iterator[ComparisonRow]:
        asked = request.plan_request(world_size, names[0])
        decided: dict[str, Any] = {"savers": request.savers, "fit_micro_batch": request.fit_micro_batch}
        source, options = read_command(workload, asked.options, verb="compare", **decided)
        asked = dataclasses.replace(asked, options=options)
        shared = make_setup(source, asked, on_output=on_output)  # Its own device is not used.

        def plan(card: Card, device: Device) -> list[ComparisonRow]:
            with device:
                setup = PlanSetup(device, shared.settings)
                if request.compares_savers:
                    return plan_front(setup, asked, card.name, on_event)
                return [plan_row(setup, asked, card.name, estimates=request.estimates)]

        results = run_on_cards(shared.settings, [cards[name] for name in names], plan, confirms=not shares)
        with shared.running(), closing(results):
            for card, rows in results:
                for row in rows:
                    if shares and row.plan is not None:
                        notes = (*row.plan.notes, message("shared_traces"))
                        row = dataclasses.replace(row, plan=dataclasses.replace(row.plan, notes=notes))
                    yield dataclasses.replace(row, price_per_hour=request.price_by_card.get(card.name))

    return find_rows(plan_cards, list(cards), request.world_sizes, on_row).sorted_by(
        request.sort or (None if request.prices is None else "cost")
    )


def find_rows(
    plan: Callable[[int, Sequence[str]], Iterable[ComparisonRow]],
    cards: Sequence[str],
    sizes: Sequence[int],
    on_row: Callable[[ComparisonRow], None],
) -> Comparison:
    """Plan for each card and number of ranks, and between those where the model begins to fit for the least that does.

    Of several cards, each is planned with no more ranks than train the model.

    Args:
        plan: Plans for so many ranks of each of these cards, and returns their rows in any order.
        cards: The names of the cards.
        sizes: The numbers of ranks, ascending.
        on_row: Called with each row as it is found.

    Raises:
        AutoaccumError: As `plan`.
    """
    rows: list[ComparisonRow] = []

    def run(size: int, names: Sequence[str]) -> None:
        for row in plan(size, names) if names else ():
            rows.append(row)
            on_row(row)

    for size in sizes:
        least = find_least(rows)
        run(size, [card for card in cards if len(cards) == 1 or card not in least])
    while True:
        between: dict[int, list[str]] = {}
        for card, size in find_least(rows).items():
            smaller = [row.world_size for row in rows if row.card == card and row.world_size < size]
            below = max(smaller, default=size - 1)
            if size - below > 1:
                between.setdefault((below + size) // 2, []).append(card)
        if not between:
            ordered = sorted(rows, key=lambda row: (cards.index(row.card), row.world_size))
            return Comparison(tuple(ordered), find_least(rows))
        for size, names in between.items():
            run(size, names)


def find_least(rows: Iterable[ComparisonRow]) -> dict[str, int]:
    """Return the least number of ranks that trains the model, by card; without the cards on which none does."""
    least: dict[str, int] = {}
    for row in rows:
        if row.fits:
            least[row.card] = min(row.world_size, least.get(row.card, row.world_size))
    return least


def plan_row(setup: PlanSetup, request: PlanRequest, card: str, *, estimates: bool) -> ComparisonRow:
    """Plan on a simulated card; with `estimates` also estimate the time of an update.

    Raises:
        AutoaccumError: As `make_plan`, but for `DoesNotFitError`, which is a row.
    """
    try:
        plan = plan_on_device(setup, request)
    except DoesNotFitError as error:
        return _row_without_plan(setup, request, card, error)
    return _row_of_plan(plan, card, _estimate(setup.device, plan) if estimates else None)


def plan_front(setup: PlanSetup, request: PlanRequest, card: str, notify: Listener) -> list[ComparisonRow]:
    """Plan on a simulated card with each set of savers that no other beats in both time and largest micro-batch.

    Returns:
        The rows, the fastest first; one without a plan if not even the least micro-batch fits with any set.

    Raises:
        AutoaccumError: As `make_plan`, but for `DoesNotFitError`, which is a row.
    """
    trials = SaverTrials(setup.device, request, SearchLimits(), notify)
    request = trials.request
    plans: dict[Words, Plan] = {}

    def plan_larger(words: Words, above: int) -> Parts | None:
        """Return the parts of the plan with these savers, unless its micro-batch is not above that size."""
        notify(SaversTried(words))
        setup.device.use_savers(words)
        if above:
            larger = next(size for size in request.sizes(trials.size) if size > above)
            tried = trials.runner.try_size(larger, fresh=True, unlimited=True)
            if not tried.ran:
                notify(SaversTried(words, tried))
                return None
        try:
            plans[words] = plan_on_device(setup, request)
        except DoesNotFitError:
            return None
        notify(SaversTried(words, plans[words].trials[-1]))
        return plans[words].micro_batches

    front = find_front(
        trials.list_sets(),
        trials.estimate,
        plan_larger,
        request.schedule(request.cap).micro_batches,
    )
    if not front:
        return [_row_without_plan(setup, request, card, trials.does_not_fit())]
    rows = [_row_of_plan(plans[words], card, trials.estimate(words, parts)) for words, parts in front.items()]
    return [dataclasses.replace(row, warnings=(*row.warnings, *trials.remarks)) for row in rows]


def _row_of_plan(plan: Plan, card: str, update_seconds: float | None) -> ComparisonRow:
    return ComparisonRow(
        card=card,
        world_size=plan.world_size,
        savers=tuple(plan.spec.savers),
        plan=plan,
        limit_bytes=plan.limit_bytes,
        update_seconds=update_seconds,
        warnings=plan.warnings,
    )


def _row_without_plan(setup: PlanSetup, request: PlanRequest, card: str, error: DoesNotFitError) -> ComparisonRow:
    ranks, limit_bytes = request.options.world_size, setup.device.limit_bytes
    return ComparisonRow(card=card, world_size=ranks, limit_bytes=limit_bytes, message=error.message)


def _estimate(device: Device, plan: Plan) -> float | None:
    """Return the estimated seconds of an update by the plan; None where its cost cannot be counted."""
    assert device.predictor is not None
    try:
        cost = device.predictor.count_cost()
    except (WorkloadError, NotMeasuredError):
        return None
    return estimate_seconds(cost, device.predictor.rates, plan.micro_batches, precision=plan.spec.precision)
