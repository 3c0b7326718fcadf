"""Savers and micro-batch chosen together for the most samples per second (`--savers auto --prefer fastest`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoaccum.devices.base import TimingDevice
from autoaccum.devices.update_cost import SavingDevice
from autoaccum.errors import DoesNotFitError, NotMeasuredError
from autoaccum.planning.memory_explanation import explain_memory
from autoaccum.planning.plan_events import Listener, Loading
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup, check_device_can
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_choice import Words, format_savers, list_sets
from autoaccum.planning.saver_table import compare_savers
from autoaccum.planning.saver_trials import SaverTrials
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.throughput import format_rate
from autoaccum.planning.trial_runner import SearchLimits

_TIMED = 3
"""So many sets of savers are timed."""


def plan_fastest_savers(
    setup: PlanSetup, request: PlanRequest, *, on_event: Listener | None = None, started: float | None = None
) -> Plan:
    """Plan as `plan_on_device`, with the savers whose plan makes the most samples per second.

    On a simulated card that is by an estimate. On an installed card the three best by an estimate for it are planned
    and timed; on the CPU the three that recompute the fewest blocks.

    Raises:
        UsageError, WorkloadError, DoesNotFitError, NotMeasuredError: As `make_plan`.
    """
    check_device_can(setup, request)
    notify = on_event or (lambda event: None)
    limits = SearchLimits(request.max_trials, request.options.time_limit, started=started)
    notify(Loading(setup.reference))
    trials = SaverTrials(setup.device, request, limits, notify)
    measures = isinstance(setup.device, TimingDevice)
    try:
        sets = _find_candidates(trials, setup.reference, _TIMED if measures else 1)
    except SearchStopped as stopped:
        raise NotMeasuredError(f"{stopped} ended the choice of savers", hint="allow more") from None
    finally:
        trials.end(setup.device)
    apart: dict[str, Any] = dict.fromkeys(("explain", "picture", "report"), False) if measures else {}
    plans: dict[Words, Plan] = {}
    for words in sets:
        _use(setup, words)
        options = dataclasses.replace(request.options, savers=words)
        asked = dataclasses.replace(request, options=options, micro_batch=None, **apart)
        try:
            plans[words] = plan_on_device(setup, asked, on_event=notify, started=started)
        except DoesNotFitError:  # A simulation is not the card itself.
            continue
    if not plans:
        raise trials.does_not_fit()
    best = max(plans, key=lambda words: _rate(plans[words]) or 0.0)
    plan = plans[best]
    notes = [_describe_choice(best, plans) if measures else _ESTIMATED.format(format_savers(best)), *trials.remarks]
    if measures:
        _use(setup, best)
        explanation, more = explain_memory(setup, request, plan.trials[-1].parts, limits, notify)
        plan = dataclasses.replace(plan, explanation=explanation, notes=(*plan.notes, *more))
    return dataclasses.replace(plan, notes=(*notes, *plan.notes))


_ESTIMATED = "{}: by an estimate from FLOPs and bytes, no other set of savers with which a sample fits takes less time"


def _find_candidates(trials: SaverTrials, reference: str, most: int) -> list[Words]:
    """Return the sets to plan with, the most promising first."""
    if trials.counts:
        return [row.savers for row in compare_savers(trials, reference, enough=most).rows[:most]]
    found = list_sets((), trials.inspection.blocks, trials.fits)
    if not found:
        raise trials.does_not_fit()
    return found[:most]


def _use(setup: PlanSetup, words: Words) -> None:
    assert isinstance(setup.device, SavingDevice)
    setup.device.use_savers(words)


def _rate(plan: Plan) -> float | None:
    return None if plan.throughput is None else plan.throughput.at_knee.samples_per_second


def _describe_choice(best: Words, plans: dict[Words, Plan]) -> str:
    rates = ", ".join(f"{format_savers(words)} with {format_rate(_rate(plan))}" for words, plan in plans.items())
    return f"{format_savers(best)}: the most samples per second of the sets of savers that were timed ({rates})"
