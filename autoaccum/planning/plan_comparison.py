"""Plans of one workload for several cards or numbers of ranks: a row for each, and the least ranks of each card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import Device, Trial, TrialSettings
from autoaccum.devices.update_cost import CountingDevice
from autoaccum.errors import DoesNotFitError, NotMeasuredError, WorkloadError
from autoaccum.options import Parallel, Reduce
from autoaccum.planning.device_choice import make_fleet
from autoaccum.planning.plan_events import Event, Listener, TrialFinished
from autoaccum.planning.plan_messages import peak_bytes
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.throughput import SpeedEstimate, estimate_seconds

if TYPE_CHECKING:
    from autoaccum.devices.simulated.card_fleet import CardFleet
    from autoaccum.devices.simulated.cards import Card

_MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The plan for so many ranks with a card each, in short.

    Attributes:
        card: The name of the card.
        world_size: The number of ranks.
        fits: Whether each can train at all; if not, the fields of a plan are None.
        micro_batch, iter_size, parallel, reduce, least_bytes, band_bytes: As in `Plan`.
        peak_bytes: As in `Plan`; where nothing fits, what the smallest trial would take, if it is known.
        limit_bytes: The budget of each rank.
        headroom_bytes: The budget less the least that the schedule needs; that of `Plan` is less the peak.
        savers: The savers of the plan, which may have chosen them.
        update: The estimated seconds of an update, without what ranks exchange; None: not known.
        samples_per_second: The target batch in that time.
        cost_per_million: What a million samples cost by that estimate, where the price of the card is known.
        message: Why nothing fits.
        warnings: As in `Plan`.
    """

    card: str
    world_size: int = 1
    fits: bool
    micro_batch: int | None = None
    iter_size: int | None = None
    parallel: Parallel | None = None
    reduce: Reduce | None = None
    least_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    headroom_bytes: int | None = None
    band_bytes: int | None = None
    savers: tuple[str, ...] = ()
    update: SpeedEstimate | None = None
    samples_per_second: float | None = None
    cost_per_million: float | None = None
    message: str | None = None
    warnings: tuple[str, ...] = ()


PlanCards = Callable[[int, Sequence[str]], Iterable[PlanRow]]
"""Plans for so many ranks of each of these cards, and returns their rows in any order."""
PlanCard = Callable[["Card", Device], Callable[[], PlanRow]]
"""Plans for a card, and returns a function that estimates the time of an update and makes the row."""


def choose_world_sizes(within: range) -> list[int]:
    """Return the powers of two within a range of numbers of ranks, and its ends.

    >>> choose_world_sizes(range(1, 65)), choose_world_sizes(range(3, 13))
    ([1, 2, 4, 8, 16, 32, 64], [3, 4, 8, 12])
    """
    powers = [1 << exponent for exponent in range(within[-1].bit_length())]
    return sorted({within[0], within[-1], *(power for power in powers if power in within)})


def compare_plans(
    plan: PlanCards, cards: Sequence[str], sizes: Sequence[int], on_row: Callable[[PlanRow], None] = lambda row: None
) -> list[PlanRow]:
    """Plan for each card and number of ranks, and between those where the model begins to fit for the least that does.

    Of several cards, each is planned with no more ranks than train the model.

    Args:
        plan: Plans for cards.
        cards: The names of the cards.
        sizes: The numbers of ranks, ascending.
        on_row: Called with each row as it is found.

    Returns:
        The rows in the order of the cards, then of the numbers of ranks.

    Raises:
        AutoaccumError: As `plan`.
    """
    rows: dict[tuple[str, int], PlanRow] = {}

    def run(size: int, some: Sequence[str]) -> None:
        for row in plan(size, some) if some else ():
            rows[row.card, size] = row
            on_row(row)

    for size in sizes:
        least = find_least(rows.values())
        run(size, [card for card in cards if len(cards) == 1 or card not in least])
    while True:
        between: dict[int, list[str]] = {}
        for card, size in find_least(rows.values()).items():
            below = max((of for name, of in rows if name == card and of < size), default=size - 1)
            if size - below > 1:
                between.setdefault((below + size) // 2, []).append(card)
        if not between:
            return sorted(rows.values(), key=lambda row: (cards.index(row.card), row.world_size))
        for size, some in between.items():
            run(size, some)


def find_least(rows: Iterable[PlanRow]) -> dict[str, int]:
    """Return the least number of ranks that trains the model, by card; without the cards on which none does."""
    least: dict[str, int] = {}
    for row in rows:
        if row.fits:
            least[row.card] = min(row.world_size, least.get(row.card, row.world_size))
    return least


def plan_each(fleet: CardFleet, cards: Sequence[Card], plan: PlanCard) -> Iterator[PlanRow]:
    """Plan on the device of each card; those that traces cannot tell from one another come together."""
    waiting, group = list(cards), None
    while waiting:
        group = group or fleet.group(waiting[0], waiting[1:])
        # The first plan makes the traces of the group; the others replay them while the next ones are made.
        planned = [(group.card, plan(group.card, fleet.device(group.card, group)))]
        others = [card for card in waiting if card != group.card]
        following, ahead = fleet.work_ahead(group, others) if others else (None, None)
        for card in others:
            if group.is_alike(card):
                planned.append((card, plan(card, fleet.device(card, group))))
        if ahead is not None:
            ahead.result()
        for card, finish in planned:
            row = finish()
            # What was traced for this card may have told it from that of the group.
            if group.is_alike(card):
                waiting.remove(card)
                yield row
        group = following


class CardPlans:
    """Plans for cards, as `PlanCards`, from traces that they share.

    With several cards, the traces of a plan's own parts are extrapolated like all others, gradients of a sharded model
    are summed with each micro-batch, and the time of an update is estimated.

    Args:
        workload: As of `make_plan`.
        request: The request for one rank of one card, whatever card that is.
        cards: The cards of all plans, by name.
        prices: The price of an hour of a card, by its name.
        on_start: Called with the card and the number of ranks before each plan.
        on_output: As of `make_plan`.
    """

    def __init__(
        self,
        workload: Any,
        request: PlanRequest,
        cards: Mapping[str, Card],
        *,
        prices: Mapping[str, float] | None = None,
        on_start: Callable[[str, int], None] = lambda card, size: None,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        self._workload, self._cards, self._prices = workload, cards, prices or {}
        self._request = dataclasses.replace(request, chooses_reduce=request.chooses_reduce and len(cards) == 1)
        self._on_start, self._on_output = on_start, on_output

    def __call__(self, world_size: int, names: Sequence[str]) -> Iterator[PlanRow]:
        """Plan for so many ranks of each card; yield the rows of cards that share traces together."""
        options = dataclasses.replace(self._request.options, world_size=world_size, gpu=names[0])
        request = dataclasses.replace(self._request, options=options)
        cards = [self._cards[name] for name in names]
        fleets: list[CardFleet] = []

        def make_first(settings: TrialSettings) -> Device:
            fleets.append(make_fleet(settings, confirms=len(self._cards) == 1))
            return fleets[0].device(cards[0], fleets[0].group(cards[0], ()))

        reference = make_setup(self._workload, request, on_output=self._on_output, device_maker=make_first).reference

        def plan(card: Card, device: Device) -> Callable[[], PlanRow]:
            self._on_start(card.name, world_size)
            setup = PlanSetup(device, reference, isolated=False)
            price, estimates = self._prices.get(card.name), len(self._cards) > 1
            return plan_row(setup, request, card.name, price=price, estimates=estimates)

        (fleet,) = fleets
        try:
            yield from plan_each(fleet, cards, plan)
        finally:
            fleet.close()


def plan_row(
    setup: PlanSetup, request: PlanRequest, card: str, *, price: float | None = None, estimates: bool = True
) -> Callable[[], PlanRow]:
    """Plan on a simulated card, which is closed; return a function that estimates the time, and returns the row.

    Args:
        setup: The device of the card.
        request: The request.
        card: The name of the card.
        price: The price of an hour of it.
        estimates: Whether the time of an update is estimated.

    Raises:
        AutoaccumError: As `make_plan`, but for `DoesNotFitError`, which is a row.
    """
    with setup.device as device:
        trials: list[Trial] = []
        try:
            plan = plan_on_device(setup, request, on_event=_keep_trials(trials))
        except DoesNotFitError as error:
            peaks = [peak for trial in trials if (peak := peak_bytes(trial)) is not None]
            row = PlanRow(
                card=card,
                world_size=request.options.world_size,
                fits=False,
                peak_bytes=min(peaks, default=None),
                limit_bytes=device.limit_bytes,
                message=error.message,
            )
            return lambda: row
        return lambda: _row_of_plan(plan, card, _estimate(device, plan) if estimates else None, price)


def _row_of_plan(plan: Plan, card: str, update: SpeedEstimate | None, price: float | None) -> PlanRow:
    rate = None if update is None else plan.target_batch / update.seconds
    cost = None if price is None or rate is None else price * plan.world_size * _MILLION / (3600 * rate)
    return PlanRow(
        card=card,
        world_size=plan.world_size,
        fits=True,
        micro_batch=plan.micro_batch,
        iter_size=plan.iter_size,
        parallel=plan.parallel,
        reduce=plan.reduce,
        least_bytes=plan.least_bytes,
        peak_bytes=plan.peak_bytes,
        limit_bytes=plan.limit_bytes,
        headroom_bytes=None if plan.least_bytes is None else plan.limit_bytes - plan.least_bytes,
        band_bytes=plan.band_bytes,
        savers=tuple(plan.workload.get("savers") or ()),
        update=update,
        samples_per_second=rate,
        cost_per_million=cost,
        warnings=plan.warnings,
    )


def _keep_trials(trials: list[Trial]) -> Listener:
    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            trials.append(event.trial)

    return listen


def _estimate(device: Device, plan: Plan) -> SpeedEstimate | None:
    if not isinstance(device, CountingDevice):
        return None
    try:
        cost = device.count_cost()
    except (WorkloadError, NotMeasuredError):
        return None
    return estimate_seconds(cost, device.rates, plan.micro_batches, precision=str(plan.workload["precision"]))
