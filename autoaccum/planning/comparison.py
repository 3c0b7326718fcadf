"""Plans of one workload in a table: for simulated cards, values of its parameters, numbers of ranks, and savers."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoaccum.checks import check_alone, check_word, join_words
from autoaccum.devices.base import Device
from autoaccum.devices.device_choice import run_on_cards
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.messages import message
from autoaccum.options import Options, read_overrides
from autoaccum.planning.comparison_record import SORT_KEYS, Comparison, ComparisonRow, find_least, name_subject
from autoaccum.planning.plan_events import Listener, SaversTried
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_trials import Parts, SaverTrials, Words, find_front
from autoaccum.planning.throughput import estimate_seconds
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.sources.command import read_command
from autoaccum.sources.overrides import read_text

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

    def varied(self, variant: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of those names, with numbers that are texts as numbers."""
        given = {name: variant[name] for name in self.varying}
        return {name: read_text(value) if isinstance(value, str) else value for name, value in given.items()}

    @cached_property
    def variants(self) -> list[dict[str, Any]]:
        """The overrides of each row: the combinations of all values."""
        given = self.overrides if isinstance(self.overrides, Mapping) else read_overrides(self.overrides)
        choices = [value if isinstance(value, list) else [value] for value in given.values()]
        if not 0 < (count := math.prod(map(len, choices))) <= _MOST_VARIANTS:
            raise UsageError(
                f"the values of {join_words(self.varying or given)} have {count} combinations",
                hint=f"give values that have 1 to {_MOST_VARIANTS}",
            )
        return [read_overrides(dict(zip(given, values, strict=True))) for values in product(*choices)]

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


def compare_plans(
    workload: Any,
    request: ComparisonRequest,
    *,
    on_row: Callable[[ComparisonRow], None] | None = None,
    on_event: Listener | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Comparison:
    """Plan for each card, value, number of ranks and set of savers, as `autoaccum.compare`.

    Raises:
        AutoaccumError: As `make_plan`, but for `DoesNotFitError`, which is a row.
    """
    if isinstance(workload, list | tuple) and isinstance(request.world_size, range):
        raise UsageError(
            f"world_size is {request.world_size!r}, and a command starts its own ranks",
            hint="compare for one number of ranks at a time (--world-size N)",
        )
    shares = len(request.cards) > 1

    def plan_cards(world_size: int, cards: Sequence[Card], variant: Mapping[str, Any]) -> Iterator[ComparisonRow]:
        asked = request.plan_request(world_size, cards[0].name, variant)
        decided: dict[str, Any] = {"savers": request.savers, "fit_micro_batch": request.fit_micro_batch}
        source, options = read_command(workload, asked.options, verb="compare", **decided)
        asked = dataclasses.replace(asked, options=options)
        shared = make_setup(source, asked, on_output=on_output)  # Its own device is not used.

        def plan(card: Card, device: Device) -> list[ComparisonRow]:
            with device:
                setup = PlanSetup(device, shared.settings)
                if request.compares_savers:
                    return plan_front(setup, asked, card.name, on_event or (lambda event: None))
                return [plan_row(setup, asked, card.name, estimates=request.estimates)]

        results = run_on_cards(shared.settings, cards, plan, confirms=not shares)
        with shared.running(), closing(results):
            for card, rows in results:
                for row in rows:
                    if shares and row.plan is not None:
                        notes = (*row.plan.notes, message("shared_traces"))
                        row = dataclasses.replace(row, plan=dataclasses.replace(row.plan, notes=notes))
                    price = request.price_by_card.get(card.name)
                    yield dataclasses.replace(row, overrides=request.varied(variant), price_per_hour=price)

    def plan_subjects(world_size: int, names: Sequence[str]) -> Iterator[ComparisonRow]:
        for variant in request.variants:
            cards = [card for card in request.cards if name_subject(card.name, request.varied(variant)) in names]
            try:
                yield from plan_cards(world_size, cards, variant) if cards else ()
            except AutoaccumError as error:
                if where := name_subject(None, request.varied(variant)):
                    error.message, error.args = f"{where}: {error.message}", (f"{where}: {error}",)
                raise

    varied = map(request.varied, request.variants)
    subjects = [name_subject(card.name, values) for card, values in product(request.cards, varied)]
    return find_rows(plan_subjects, subjects, request.world_sizes, on_row or (lambda row: None)).sorted_by(
        request.sort or (None if request.prices is None else "cost")
    )


def find_rows(
    plan: Callable[[int, Sequence[str]], Iterable[ComparisonRow]],
    subjects: Sequence[str],
    sizes: Sequence[int],
    on_row: Callable[[ComparisonRow], None],
) -> Comparison:
    """Plan for each subject and number of ranks, and between those where it begins to fit for the least that does.

    A subject is a card, with values that are set. Of several, each is planned with no more ranks than train the model.

    Args:
        plan: Plans for so many ranks of each of these subjects, and returns their rows in any order.
        subjects: Each as in `ComparisonRow.subject`.
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
        run(size, [subject for subject in subjects if len(subjects) == 1 or subject not in least])
    while True:
        between: dict[int, list[str]] = {}
        for subject, size in find_least(rows).items():
            smaller = [row.world_size for row in rows if row.subject == subject and row.world_size < size]
            below = max(smaller, default=size - 1)
            if size - below > 1:
                between.setdefault((below + size) // 2, []).append(subject)
        if not between:
            ordered = sorted(rows, key=lambda row: (subjects.index(row.subject), row.world_size))
            return Comparison(tuple(ordered), find_least(rows))
        for size, names in between.items():
            run(size, names)


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
    precision = plan.workload.product_precision(plan.spec)
    return estimate_seconds(cost, device.predictor.rates, plan.micro_batches, precision=precision)
