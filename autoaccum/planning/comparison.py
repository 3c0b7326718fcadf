"""Plans of one workload in a table: for simulated cards, values of its parameters, numbers of ranks, and savers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from autoaccum.devices.base import Device
from autoaccum.devices.device_choice import run_on_cards
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import message
from autoaccum.planning.comparison_record import Comparison, ComparisonRow, find_least, name_subject
from autoaccum.planning.comparison_request import ComparisonRequest
from autoaccum.planning.plan_events import Listener, SaversTried
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, make_setup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_trials import Parts, SaverTrials, Words, find_front
from autoaccum.planning.throughput import estimate_seconds
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.sources.command import read_command

if TYPE_CHECKING:
    from autoaccum.simulation.cards import Card


def compare_plans(
    workload: Any,
    request: ComparisonRequest,
    *,
    on_row: Callable[[ComparisonRow], None] = lambda row: None,
    on_event: Listener = lambda event: None,
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
                    return plan_front(setup, asked, card.name, on_event)
                return [plan_row(setup, asked, card.name, estimates=request.estimates)]

        results = run_on_cards(shared.settings, cards, plan, confirms=not shares)
        with shared.running(), closing(results):
            for card, rows in results:
                for row in rows:
                    if shares and row.plan is not None:
                        notes = (*row.plan.notes, message("shared_traces"))
                        row = dataclasses.replace(row, plan=dataclasses.replace(row.plan, notes=notes))
                    price = request.price_by_card.get(card.name)
                    yield dataclasses.replace(row, overrides=varying(variant), price_per_hour=price)

    def varying(variant: Mapping[str, Any]) -> dict[str, Any]:
        return {name: variant[name] for name in request.varying}

    def subject(card: Card, variant: Mapping[str, Any]) -> str:
        return name_subject(card.name, varying(variant))

    variants = {name_subject(None, varying(variant)): variant for variant in request.variants}

    def plan_subjects(world_size: int, names: Sequence[str]) -> Iterator[ComparisonRow]:
        for where, variant in variants.items():
            cards = [card for card in request.cards if subject(card, variant) in names]
            try:
                yield from plan_cards(world_size, cards, variant) if cards else ()
            except AutoaccumError as error:
                if where:
                    error.message = f"{where}: {error.message}"
                    error.args = (f"{where}: {error}",)
                raise

    subjects = [subject(card, variant) for card in request.cards for variant in variants.values()]
    return find_rows(plan_subjects, subjects, request.world_sizes, on_row).sorted_by(
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
    return estimate_seconds(cost, device.predictor.rates, plan.micro_batches, precision=plan.spec.precision)
