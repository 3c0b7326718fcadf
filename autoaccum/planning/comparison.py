"""Plans of one workload in a table: for cards, numbers of ranks and sets of savers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from autoaccum.devices.base import Device, Trial, TrialSettings
from autoaccum.errors import DoesNotFitError, NotMeasuredError, WorkloadError
from autoaccum.planning.comparison_request import ComparisonRequest
from autoaccum.planning.device_choice import make_device, make_fleet
from autoaccum.planning.plan_events import Event, Listener, SaversTried, TrialFinished
from autoaccum.planning.plan_messages import peak_bytes
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_trials import Parts, SaverTrials, Words, find_front
from autoaccum.planning.throughput import SpeedEstimate, estimate_seconds
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.serialization import to_plain

if TYPE_CHECKING:
    from autoaccum.devices.simulated.card_fleet import CardFleet
    from autoaccum.simulation.cards import Card

_MILLION = 1_000_000
_SHARES_TRACES = (
    "planned from traces that cards share: `autoaccum plan --gpu NAME` traces the parts of this plan itself"
)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one card, number of ranks and set of savers can do.

    Attributes:
        card: The name of the card.
        world_size: The number of ranks, with such a card each.
        savers: The savers of the plan.
        plan: The plan; None if not even the least micro-batch fits.
        limit_bytes: The budget of each rank.
        peak_bytes: As in `Plan`; where nothing fits, what the smallest trial would take, if it is known.
        message: Why nothing fits.
        update: The estimated seconds of an update, without what ranks exchange; None: not estimated.
        samples_per_second: The target batch in that time.
        cost_per_million: What a million samples cost by that estimate, where the price of the card is known.
        warnings: Those of the plan, and sentences on savers that cannot be used.
    """

    card: str
    world_size: int = 1
    savers: Words = ()
    plan: Plan | None = None
    limit_bytes: int
    peak_bytes: int | None = None
    message: str | None = None
    update: SpeedEstimate | None = None
    samples_per_second: float | None = None
    cost_per_million: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def headroom_bytes(self) -> int | None:
        """The budget less the least that the schedule needs, where `Plan.headroom_bytes` is less the peak."""
        return None if self.plan is None or self.plan.least_bytes is None else self.limit_bytes - self.plan.least_bytes


SORT_KEYS: Final[Mapping[str, Callable[[ComparisonRow], Any]]] = {
    "card": lambda row: row.card,
    "ranks": lambda row: row.world_size,
    "micro-batch": lambda row: row.plan and -row.plan.micro_batch,
    "iter_size": lambda row: row.plan and row.plan.iter_size,
    "needed": lambda row: row.plan and row.plan.least_bytes,
    "peak": lambda row: row.peak_bytes,
    "headroom": lambda row: None if row.headroom_bytes is None else -row.headroom_bytes,
    "speed": lambda row: None if row.samples_per_second is None else -row.samples_per_second,
    "cost": lambda row: row.cost_per_million,
}
"""By each of `comparison_request.COLUMNS`, what is less in a better row; None: not known."""


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
        key = SORT_KEYS[column]

        def order(row: ComparisonRow) -> tuple[bool, bool, Any]:
            value = key(row)
            return not row.fits, value is None, value or 0

        return dataclasses.replace(self, rows=tuple(sorted(self.rows, key=order)))


PlanCards = Callable[[int, Sequence[str]], Iterable[ComparisonRow]]
"""Plans for so many ranks of each of these cards, and returns their rows in any order."""


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
    cards, prices = {card.name: card for card in request.cards}, request.read_prices()
    shares = len(cards) > 1

    def plan_cards(world_size: int, names: Sequence[str]) -> Iterator[ComparisonRow]:
        asked = request.plan_request()
        options = dataclasses.replace(asked.options, world_size=world_size, gpu=names[0])
        asked = dataclasses.replace(asked, options=options)
        fleets: list[CardFleet] = []

        def make_one(settings: TrialSettings) -> Device:
            fleets.append(make_fleet(settings, confirms=not shares))
            return make_device(settings)  # It starts nothing.

        shared = make_setup(workload, asked, on_output=on_output, device_maker=make_one)

        def plan(card: Card, device: Device) -> list[ComparisonRow]:
            setup = PlanSetup(device, shared.reference)
            with device:
                if request.compares_savers:
                    rows = plan_front(setup, asked, card.name, on_event)
                else:
                    rows = [plan_row(setup, asked, card.name, estimates=request.estimates)]
            return [_with_price(row, prices.get(card.name)) for row in rows]

        (fleet,) = fleets
        with shared.running(), closing(fleet):
            for _, rows in fleet.each([cards[name] for name in names], plan):
                yield from map(_noted, rows) if shares else rows

    comparison = find_rows(plan_cards, list(cards), request.world_sizes, on_row)
    return comparison.sorted_by(request.sort or ("cost" if request.prices is not None else None))


def find_rows(
    plan: PlanCards, cards: Sequence[str], sizes: Sequence[int], on_row: Callable[[ComparisonRow], None]
) -> Comparison:
    """Plan for each card and number of ranks, and between those where the model begins to fit for the least that does.

    Of several cards, each is planned with no more ranks than train the model.

    Args:
        plan: Plans for cards.
        cards: The names of the cards.
        sizes: The numbers of ranks, ascending.
        on_row: Called with each row as it is found.

    Raises:
        AutoaccumError: As `plan`.
    """
    rows: list[ComparisonRow] = []

    def run(size: int, some: Sequence[str]) -> None:
        for row in plan(size, some) if some else ():
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
        for size, some in between.items():
            run(size, some)


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
    trials: list[Trial] = []

    def keep(event: Event) -> None:
        if isinstance(event, TrialFinished):
            trials.append(event.trial)

    try:
        plan = plan_on_device(setup, request, on_event=keep)
    except DoesNotFitError as error:
        peaks = [peak for trial in trials if (peak := peak_bytes(trial)) is not None]
        return ComparisonRow(
            card=card,
            world_size=request.options.world_size,
            limit_bytes=setup.device.limit_bytes,
            peak_bytes=min(peaks, default=None),
            message=error.message,
        )
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
        lambda words, parts: trials.estimate(words, parts).seconds,
        plan_larger,
        request.schedule(request.cap).micro_batches,
    )
    if not front:
        return [
            ComparisonRow(
                card=card,
                world_size=request.options.world_size,
                limit_bytes=setup.device.limit_bytes,
                message=trials.does_not_fit().message,
            )
        ]
    rows = [_row_of_plan(plans[words], card, trials.estimate(words, parts)) for words, parts in front.items()]
    return [dataclasses.replace(row, warnings=(*row.warnings, *trials.remarks)) for row in rows]


def _row_of_plan(plan: Plan, card: str, update: SpeedEstimate | None) -> ComparisonRow:
    return ComparisonRow(
        card=card,
        world_size=plan.world_size,
        savers=tuple(plan.workload.get("savers") or ()),
        plan=plan,
        limit_bytes=plan.limit_bytes,
        peak_bytes=plan.peak_bytes,
        update=update,
        samples_per_second=None if update is None else plan.target_batch / update.seconds,
        warnings=plan.warnings,
    )


def _with_price(row: ComparisonRow, price: float | None) -> ComparisonRow:
    if price is None or row.samples_per_second is None:
        return row
    seconds = _MILLION / row.samples_per_second
    return dataclasses.replace(row, cost_per_million=price * row.world_size * seconds / 3600)


def _noted(row: ComparisonRow) -> ComparisonRow:
    """Return a row whose plan says that its traces are those of several cards."""
    if row.plan is None:
        return row
    return dataclasses.replace(row, plan=dataclasses.replace(row.plan, notes=(*row.plan.notes, _SHARES_TRACES)))


def _estimate(device: Device, plan: Plan) -> SpeedEstimate | None:
    """Return the estimated seconds of an update by the plan; None where its cost cannot be counted."""
    if "predict" not in device.capabilities:
        return None
    try:
        cost = device.count_cost()
    except (WorkloadError, NotMeasuredError):
        return None
    return estimate_seconds(cost, device.rates, plan.micro_batches, precision=str(plan.workload["precision"]))
